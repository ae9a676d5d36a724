"""Optimizers for rows and dense parameters that `torch.optim` does not have. They are defined in `engine.optim`."""

from .engine.optim import *  # noqa: F403  the names are listed in its stub
from .engine.optim import __all__ as __all__  # type: ignore[attr-defined]  # made from that stub
