"""Trace a user's step, and find what the trace depends on."""
