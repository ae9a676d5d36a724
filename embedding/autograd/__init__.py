"""Lookups that autograd records: the shadow parameter, gradients, the op."""
