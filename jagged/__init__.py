"""TorchRec's way to describe a model: jagged features in, keyed tensors out, over tiered hashed tables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
