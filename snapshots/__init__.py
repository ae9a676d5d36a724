"""Snapshots: all rows of an embedding with their optimizer state, in checksummed files that NumPy can read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
