"""Handles to open tables, which save and load snapshots, for one process and for ranks."""
