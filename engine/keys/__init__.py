"""Ids that are made of other things than whole numbers."""
