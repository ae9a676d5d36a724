"""Embeddings: the modules that users create, and the open tables behind these modules."""
