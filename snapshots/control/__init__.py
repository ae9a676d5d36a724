"""The control socket: other processes ask a store's lock holder to save, prune or report."""
