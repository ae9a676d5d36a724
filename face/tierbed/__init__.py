"""tierbed: embedding tables that outgrow one device's memory, for PyTorch.

`import tierbed` has all that users need. A name is resolved at its first use (PEP 562): the import itself loads no
torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
