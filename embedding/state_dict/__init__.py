"""Rows in state_dicts, and snapshots of whole models."""
