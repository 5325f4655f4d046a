"""The JAX backend: flax NNX or Equinox modules, NamedSharding, GSPMD/Shardy, optax. Never imports the torch backend."""
