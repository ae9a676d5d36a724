"""tierbed's engine: embeddings whose tables live over device memory, host memory and SSD."""

from importlib.metadata import version as _version

from .errors import (
    CapacityError,
    ClosedError,
    GraphError,
    InputError,
    OptimizerError,
    OptionError,
    SnapshotError,
    StoreError,
    TierbedError,
)
from .modules.eager import EagerOptimizer
from .modules.embedding import MultiTableMultiColumnEmbedding
from .modules.multi_table import MultiTableEmbedding
from .observe.metrics import MetricsCollector, prometheus_text, write_tensorboard
from .observe.plan import Curve, Plan, plan
from .optim.optimizers import RowOptimizer, row_optimizer
from .spec.initializers import (
    make_column_options,
    make_constant_initializer,
    make_normal_initializer,
    make_table,
    make_table_options,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)
from .spec.options import (
    load_store_options,
    make_cached_host_mem_store_options,
    make_cached_ssd_store_options,
    make_device_mem_store_options,
    make_host_mem_store_options,
)
from .store.rocksdb import rocksdb_info

__version__ = _version("tierbed")

__all__ = [
    "CapacityError",
    "ClosedError",
    "Curve",
    "EagerOptimizer",
    "GraphError",
    "InputError",
    "MetricsCollector",
    "MultiTableEmbedding",
    "MultiTableMultiColumnEmbedding",
    "OptimizerError",
    "OptionError",
    "Plan",
    "RowOptimizer",
    "SnapshotError",
    "StoreError",
    "TierbedError",
    "__version__",
    "load_store_options",
    "make_cached_host_mem_store_options",
    "make_cached_ssd_store_options",
    "make_column_options",
    "make_constant_initializer",
    "make_device_mem_store_options",
    "make_host_mem_store_options",
    "make_normal_initializer",
    "make_table",
    "make_table_options",
    "make_trunc_normal_initializer",
    "make_uniform_initializer",
    "plan",
    "prometheus_text",
    "rocksdb_info",
    "row_optimizer",
    "write_tensorboard",
]
