"""Open tables: which rows they open with, their store folder, and the group they are trained in."""
