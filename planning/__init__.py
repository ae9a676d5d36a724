"""Predicts, from a sample of ids, cache hit rates and the data that ranks would exchange."""
