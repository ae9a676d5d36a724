"""The lifecycle of rows: admission, eviction and expiry."""
