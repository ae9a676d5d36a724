"""The optimizers that torch.optim has not, as `import tierbed.optim` finds them; they are those of `engine.optim`."""

from .engine.optim import *  # noqa: F403  the stub there is the one list of their names
from .engine.optim import __all__ as __all__  # type: ignore[attr-defined]  # made from that stub
