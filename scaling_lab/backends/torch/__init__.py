"""The PyTorch backend: plain modules, FSDP2, DTensor. Never imports the JAX backend."""
