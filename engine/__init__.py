"""tierbed's engine: embeddings whose tables live over device memory, host memory and SSD.

A name is resolved at its first use (PEP 562): importing this package loads no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
