"""The engine: row storage in tiers, on a CPU or GPU. `tierbed` exports its public names."""
