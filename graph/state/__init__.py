"""Optimizers of a graph, their state, and checkpoints."""
