"""Tracing a user's step: what it depends on, and what it holds."""
