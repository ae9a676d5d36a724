"""What lookups need to know of an embedding: a `TableSpec` for Python, and bytes for the native code."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from ..engine.options.initializers import as_arrays, make_table_options
from ..engine.options.table_names import read_table_names
from ..engine.options.table_spec import DTYPES, KEY_TYPES, TableSpec, make_table_spec

_ROW_TYPES = ("float32", "float16", "bfloat16")  # numbered as the native code's FloatType
_HAS_PADDING, _HAS_ZERO_KEY = 1, 2


def make_spec(description: Mapping[str, Any]) -> TableSpec:
    """Make the spec of a version's embedding. Raises OptionError, TypeError or KeyError if options are invalid."""
    dtypes, key_types = ({name: dtype for dtype, name in names.items()} for names in (DTYPES, KEY_TYPES))
    options, names = description["tables"], read_table_names(description)
    ids, bad_ids = (description.get(field) or [None] * len(options) for field in ("ids", "bad_ids"))
    tables = [make_table_options(*each) for each in zip(options, names, ids, bad_ids, strict=True)]
    name, columns, padding_idx, seed = itemgetter("name", "columns", "padding_idx", "seed")(description)
    key_type, dtype = key_types[description["key_type"]], dtypes[description["dtype"]]
    spec = make_table_spec(name, columns, key_type, tables, padding_idx, seed, dtype)
    return replace(spec, zero_key=description.get("zero_key"))


def pack_settings(spec: TableSpec) -> bytes:
    """Pack a spec for `_core.ServedTables` and the C interface. `Settings` in native/served_tables.cpp reads it."""
    kinds, parameters, quantiles = as_arrays(spec.tables, spec.columns)
    flags = _HAS_PADDING * (spec.padding_key is not None) + _HAS_ZERO_KEY * (spec.zero_key is not None)
    numbers = spec.dim, spec.num_tables, len(spec.columns), _ROW_TYPES.index(spec.dtype), flags
    max_ids = np.full(spec.num_tables, 2**64 - 1, np.uint64) if spec.max_ids is None else spec.max_ids
    drops = np.array(spec.drops_illegal or [False] * spec.num_tables, np.uint32)
    arrays = max_ids, drops, np.array(spec.columns, np.uint32), np.array(kinds, np.uint32), parameters, quantiles
    keys = spec.seed % 2**64, spec.padding_key or 0, spec.zero_key or 0
    return struct.pack("<5I3Q", *numbers, *keys) + b"".join(array.tobytes() for array in arrays)
