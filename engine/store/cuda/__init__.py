"""The full table on a GPU."""
