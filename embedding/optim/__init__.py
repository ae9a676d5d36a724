"""Training rows in plain loops."""
