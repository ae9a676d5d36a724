"""Looking at a table: metrics, and what a cache of another size would do."""
