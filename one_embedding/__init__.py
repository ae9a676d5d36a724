"""A replacement for OneFlow's `one_embedding`, with its names and arguments; docs/oneflow.md lists the differences.

`__init__.pyi` tells where each name comes from. A name is imported at its first use, so importing this package loads
neither torch nor the engine. lazy_loader cannot do this, because it rejects stubs that import from other packages.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_SOURCES = {
    name.asname: ("." * import_statement.level + str(import_statement.module), name.name)
    for import_statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(import_statement, ast.ImportFrom)
    for name in import_statement.names
}
_SOURCES |= {"Embedding": _SOURCES["MultiTableMultiColumnEmbedding"], "FTRL": _SOURCES["Ftrl"]}
__all__ = [*_SOURCES]


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _SOURCES[name]
    value = globals()[name] = getattr(import_module(module, __package__), attribute)
    return value


def __dir__() -> list[str]:
    return __all__
