"""Inspects snapshots: rows, summaries, differences and plots."""
