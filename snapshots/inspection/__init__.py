"""Inspects snapshots: single rows, summaries, differences and plots."""
