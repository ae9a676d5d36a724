"""The engine: rows in tiers, on a processor. Its public names are those of `tierbed`."""
