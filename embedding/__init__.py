"""Embeddings: from the modules that users hold down to the tables that this process has open."""
