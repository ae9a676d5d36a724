"""Passes that rewrite a trace into a training step."""
