"""Manages open tables: recovery of their rows, their store folders, and their training groups."""
