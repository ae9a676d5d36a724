"""TorchRec's embedding collections, and the configs that describe their tables and features."""
