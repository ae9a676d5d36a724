"""The static graph: a user's step, traced once an input signature and run as one compiled step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
