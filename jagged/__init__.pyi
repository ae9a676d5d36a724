from .tbe.enums import BoundsCheckMode as BoundsCheckMode
from .tbe.enums import CacheAlgorithm as CacheAlgorithm
from .tbe.enums import ComputeDevice as ComputeDevice
from .tbe.enums import EmbeddingLocation as EmbeddingLocation
from .tbe.enums import OptimType as OptimType
from .tbe.enums import PoolingMode as PoolingMode
from .tbe.enums import WeightDecayMode as WeightDecayMode
from .tbe.module import TableBatchedEmbeddingBags as TableBatchedEmbeddingBags
