"""Rows in PyTorch's state dictionaries and in the snapshots of a model."""
