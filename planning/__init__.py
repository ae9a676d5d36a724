"""Predicts cache hit rates, and how much data ranks would exchange, from a sample of ids."""
