from ..embedding.modules.embedding import MultiTableEmbedding as MultiTableEmbedding
from ..embedding.modules.embedding import MultiTableMultiColumnEmbedding as MultiTableMultiColumnEmbedding
from ..engine.optim import Ftrl as Ftrl
from ..engine.options.initializers import make_column_options as make_column_options
from ..engine.options.initializers import make_constant_initializer as make_constant_initializer
from ..engine.options.initializers import make_normal_initializer as make_normal_initializer
from ..engine.options.initializers import make_table as make_table
from ..engine.options.initializers import make_table_options as make_table_options
from ..engine.options.initializers import make_trunc_normal_initializer as make_trunc_normal_initializer
from ..engine.options.initializers import make_uniform_initializer as make_uniform_initializer
from ..engine.options.store_options import make_cached_host_mem_store_options as make_cached_host_mem_store_options
from ..engine.options.store_options import make_cached_ssd_store_options as make_cached_ssd_store_options
from ..engine.options.store_options import make_device_mem_store_options as make_device_mem_store_options
from .fused_mlp import FusedMLP as FusedMLP
from .optimizers import Optimizer as Optimizer
from .optimizers import SmartDecayAdam as SmartDecayAdam
from .persistent_table import make_persistent_table_reader as make_persistent_table_reader
from .persistent_table import make_persistent_table_writer as make_persistent_table_writer

Embedding = MultiTableMultiColumnEmbedding
FTRL = Ftrl
