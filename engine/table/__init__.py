"""An embedding's open table, which passes batches through the tiers."""
