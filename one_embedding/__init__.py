"""OneFlow's `one_embedding` on tierbed: its names and arguments; docs/oneflow.md has what differs.

A name is resolved at its first use, so that importing this package loads neither torch nor the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine import (
        MultiTableEmbedding,
        MultiTableMultiColumnEmbedding,
        make_cached_host_mem_store_options,
        make_cached_ssd_store_options,
        make_column_options,
        make_constant_initializer,
        make_device_mem_store_options,
        make_normal_initializer,
        make_table,
        make_table_options,
        make_trunc_normal_initializer,
        make_uniform_initializer,
    )
    from ..engine import MultiTableMultiColumnEmbedding as Embedding
    from ..engine.optim import Ftrl
    from ..engine.optim import Ftrl as FTRL
    from .optimizers import Optimizer, SmartDecayAdam
    from .persistent_table import make_persistent_table_reader, make_persistent_table_writer

__all__ = [
    "FTRL",
    "Embedding",
    "Ftrl",
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

# of the names that are not the engine's own: the module that has it, and what it is called there
_ELSEWHERE = {
    "Embedding": ("..engine", "MultiTableMultiColumnEmbedding"),
    "FTRL": ("..engine.optim", "Ftrl"),
    "Ftrl": ("..engine.optim", "Ftrl"),
    "Optimizer": (".optimizers", "Optimizer"),
    "SmartDecayAdam": (".optimizers", "SmartDecayAdam"),
    "make_persistent_table_reader": (".persistent_table", "make_persistent_table_reader"),
    "make_persistent_table_writer": (".persistent_table", "make_persistent_table_writer"),
}


if not TYPE_CHECKING:  # a type checker knows the names by the imports above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _ELSEWHERE.get(name, ("..engine", name))
        found = globals()[name] = getattr(import_module(module, __package__), attribute)
        return found


def __dir__() -> list[str]:
    return __all__
