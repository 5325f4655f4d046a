"""The JAX backend: flax NNX modules, NamedSharding, GSPMD/Shardy, optax. Never imports the torch backend."""
