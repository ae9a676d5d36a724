"""Which rows are kept: admission, eviction and expiry."""
