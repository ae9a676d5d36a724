"""A graph's optimizers, their state, and checkpoints."""
