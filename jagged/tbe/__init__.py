"""FBGEMM's table-batched embedding by its own words."""
