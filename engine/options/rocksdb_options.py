"""RocksDB's own options, checked as users give them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from .. import _core
from ..errors import OptionError, StoreError
from ..numeric import real

CACHE_MB = 32  # of RocksDB's cache of blocks
READ_MODES = ("buffered", "mmap", "direct")


def require_rocksdb() -> None:
    """Raises StoreError where the package was built without RocksDB."""
    if not _core.has_rocksdb:
        raise StoreError(
            "cached_ssd: this build of tierbed has no RocksDB; install it (apt install librocksdb-dev) and build "
            "tierbed again (pip install --force-reinstall --no-deps . in its source folder)"
        )


def options_text(options: Mapping[str, Any] | str | None) -> str:
    """RocksDB's options string, `name=value;name={name=value;...}`, from a dict or from such a string.

    Raises OptionError, which names the option, where RocksDB does not know the name or cannot read the value, and where
    the store would break a promise by it.
    """
    if options is None:
        return ""
    if isinstance(options, Mapping):
        text = ";".join(f"{name}={_value(name, value)}" for name, value in options.items())
    elif isinstance(options, str):
        text = options.strip()
    else:
        raise OptionError(f"rocksdb_options={options!r}: give a dict of RocksDB options or RocksDB's options string")
    try:
        _core.check_rocksdb_options(_core.parse_rocksdb_options(text))
    except ValueError as error:
        raise OptionError(f"rocksdb_options: {error}{_suggestion(str(error))}") from None
    return text


def _suggestion(error: str) -> str:
    if field := re.search(r"has no field named (\w+)", error):
        wrong, names = field[1], _core.rocksdb_table_field_names()
    elif "no option of this name" in error:
        wrong, names = error.split("=")[0], _core.rocksdb_option_names() + _core.rocksdb_table_field_names()
    else:
        return ""
    near = difflib.get_close_matches(wrong, names, 1)
    if not near:
        return ""
    within = "" if field or near[0] in _core.rocksdb_option_names() else " in block_based_table_factory"
    return f"; did you mean {near[0]}{within}?"


def _value(name: object, value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ";".join(f"{inner}={_value(inner, of_inner)}" for inner, of_inner in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    given = value if isinstance(value, str) else real(value)
    if not isinstance(name, str) or given is None:
        raise OptionError(f"rocksdb_options: {name}={value!r}: give a name and a str, int, float, bool or dict")
    if not name.isidentifier() or (isinstance(value, str) and set(value) & set(";={}")):
        raise OptionError(
            f"rocksdb_options: {name}={value!r}: give one option a name, and a dict where an option has fields"
        )
    return str(given)
