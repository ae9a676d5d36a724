"""Autograd support for lookups: the ops, the shadow parameter that stands for the rows, and the rows' gradients."""
