"""What a store folder keeps between runs: opening, recovery after a kill, saving and loading."""
