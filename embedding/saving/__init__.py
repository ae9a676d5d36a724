"""Saves and loads snapshots through handles to open tables, in one process and across ranks."""
