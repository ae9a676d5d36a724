"""What users hold: the embedding modules, their training and metrics, and what their rows are between runs."""
