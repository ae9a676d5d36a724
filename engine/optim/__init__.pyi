from .catch_up_adam import CatchUpAdam as CatchUpAdam
from .ftrl import Ftrl as Ftrl
from .rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad
