"""Jagged and keyed tensors: what features are given in, and what collections return."""
