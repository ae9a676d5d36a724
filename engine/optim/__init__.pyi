from .catch_up_adam import CatchUpAdam as CatchUpAdam
from .catch_up_adam import CatchUpAdamW as CatchUpAdamW
from .ftrl import Ftrl as Ftrl
from .lamb import LAMB as LAMB
from .lamb import PartialRowWiseLAMB as PartialRowWiseLAMB
from .lars_sgd import LarsSGD as LarsSGD
from .partial_rowwise_adam import PartialRowWiseAdam as PartialRowWiseAdam
from .rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad
