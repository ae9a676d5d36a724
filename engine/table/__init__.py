"""The open table of an embedding: the way of one batch through its tiers."""
