"""Row optimizers, one file each: formula, kernel, hyper-parameters.

Those that torch.optim has not are optimizers of their own here, which move dense parameters as well.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
