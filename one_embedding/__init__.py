"""OneFlow's `one_embedding` on tierbed, with its names and arguments; docs/oneflow.md lists the differences.

A name is imported at its first use, so importing this package loads neither torch nor the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..embedding.embedding import MultiTableEmbedding, MultiTableMultiColumnEmbedding
    from ..embedding.embedding import MultiTableMultiColumnEmbedding as Embedding
    from ..engine.optim import Ftrl
    from ..engine.optim import Ftrl as FTRL
    from ..engine.options.initializers import (
        make_column_options,
        make_constant_initializer,
        make_normal_initializer,
        make_table,
        make_table_options,
        make_trunc_normal_initializer,
        make_uniform_initializer,
    )
    from ..engine.options.store_options import (
        make_cached_host_mem_store_options,
        make_cached_ssd_store_options,
        make_device_mem_store_options,
    )
    from .fused_mlp import FusedMLP
    from .optimizers import Optimizer, SmartDecayAdam
    from .persistent_table import make_persistent_table_reader, make_persistent_table_writer

__all__ = [
    "FTRL",
    "Embedding",
    "Ftrl",
    "FusedMLP",
    "MultiTableEmbedding",
    "MultiTableMultiColumnEmbedding",
    "Optimizer",
    "SmartDecayAdam",
    "make_cached_host_mem_store_options",
    "make_cached_ssd_store_options",
    "make_column_options",
    "make_constant_initializer",
    "make_device_mem_store_options",
    "make_normal_initializer",
    "make_persistent_table_reader",
    "make_persistent_table_writer",
    "make_table",
    "make_table_options",
    "make_trunc_normal_initializer",
    "make_uniform_initializer",
]

_ALIASES = {"Embedding": "MultiTableMultiColumnEmbedding", "FTRL": "Ftrl"}
_MODULES = {
    "MultiTableEmbedding": "..embedding.embedding",
    "MultiTableMultiColumnEmbedding": "..embedding.embedding",
    "Ftrl": "..engine.optim",
    "FusedMLP": ".fused_mlp",
    "Optimizer": ".optimizers",
    "SmartDecayAdam": ".optimizers",
    "make_cached_host_mem_store_options": "..engine.options.store_options",
    "make_cached_ssd_store_options": "..engine.options.store_options",
    "make_device_mem_store_options": "..engine.options.store_options",
    "make_persistent_table_reader": ".persistent_table",
    "make_persistent_table_writer": ".persistent_table",
}


if not TYPE_CHECKING:  # type checkers see the imports above, and refuse other names

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        attribute = _ALIASES.get(name, name)
        module = _MODULES.get(attribute, "..engine.options.initializers")
        value = globals()[name] = getattr(import_module(module, __package__), attribute)
        return value


def __dir__() -> list[str]:
    return __all__
