"""The optimizers that torch.optim has not, as `import tierbed.optim` finds them; they are those of `engine.optim`."""

from .engine.optim import CatchUpAdam as CatchUpAdam
from .engine.optim import Ftrl as Ftrl
from .engine.optim import RowWiseAdagrad as RowWiseAdagrad

__all__ = ["CatchUpAdam", "Ftrl", "RowWiseAdagrad"]
