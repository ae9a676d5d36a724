"""Processors, which run a table's operations on a CPU or GPU, and their interface."""
