"""Jagged and keyed tensors: the inputs and outputs of collections."""
