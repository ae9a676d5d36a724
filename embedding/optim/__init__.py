"""Optimizers that train rows in plain PyTorch loops."""
