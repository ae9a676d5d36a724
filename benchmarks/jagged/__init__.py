"""Parts of the benchmark of jagged features."""
