"""Row optimizers, one file each: formula, kernel and hyper-parameters.

For optimizers missing in torch.optim, the file also defines an optimizer class, usable for dense parameters as well.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
