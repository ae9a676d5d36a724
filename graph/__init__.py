"""The static graph: a user's step, traced once an input signature and run as one compiled step."""
