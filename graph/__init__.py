"""The static graph: a user's step, traced once for each input signature and run as one compiled step."""
