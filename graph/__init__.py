"""The static graph traces a user's step once for each input signature, and runs it as one compiled step."""
