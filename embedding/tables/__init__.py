"""Open tables: the rows that a table opens with, its store folder, and its training group."""
