"""Rewriting a recorded step into one that trains."""
