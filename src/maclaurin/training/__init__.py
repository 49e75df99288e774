"""A compact loop on plain PyTorch: config → run directory with records, checkpoints and a model."""
