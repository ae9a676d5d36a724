"""Rewriting a trace into a step that trains."""
