"""Processors run a table's operations on a CPU or GPU."""
