"""Serving: a folder of read-only rows and dense weights that follow a trainer from version to version."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
