"""The cache on a GPU."""
