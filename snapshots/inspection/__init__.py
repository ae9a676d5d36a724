"""Looking into snapshots: rows, summaries, differences and plots."""
