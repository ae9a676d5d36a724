"""Row optimizers. Each has its own file with the formula, the kernel and the hyper-parameters.

If torch.optim lacks the optimizer, the file also defines an optimizer class, usable for dense parameters as well.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
