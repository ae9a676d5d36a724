"""Asking the process that has a store open to save or to tell."""
