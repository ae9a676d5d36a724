"""What a graph keeps beside its modules: optimizers, their state, and checkpoints of it."""
