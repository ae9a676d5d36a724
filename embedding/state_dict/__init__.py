"""Rows in state_dicts, and snapshots of all embeddings of a model."""
