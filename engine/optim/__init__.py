"""Row optimizers, one file each: formula, kernel, hyper-parameters, NumPy reference.

Those that torch.optim has not are optimizers of their own here, which move dense parameters as well.
"""

from .catch_up_adam import CatchUpAdam
from .ftrl import Ftrl
from .rowwise_adagrad import RowWiseAdagrad

__all__ = ["CatchUpAdam", "Ftrl", "RowWiseAdagrad"]
