"""Optimizers that torch.optim lacks. They are defined in `engine.optim`."""

from .engine.optim import *  # noqa: F403  the stub there lists the names
from .engine.optim import __all__ as __all__  # type: ignore[attr-defined]  # made from that stub
