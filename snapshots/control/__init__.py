"""The control socket: other processes ask the lock holder of a store to save, prune, or report."""
