"""FBGEMM's table-batched embedding, API-compatible."""
