"""`TableSpec` defines an embedding, independent of where its rows are stored: names, widths, tables, seed."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _core
from ..checks import as_int, check_int, is_folder_name
from ..errors import OptionError
from ..optim.row_optimizer import RowOptimizer
from ..optim.row_state import RowState
from ..row_format import STATE_DTYPES, RowFormat, find_overflows
from .initializers import ID_OPTIONS, AnyTableOptions, InitialValues, TableOptions, as_arrays, make_table_options
from .table_names import TABLE_NAMES, check_distinct, label_tables

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}  # dtypes of stored rows
# Fields of a stored description. RUN_ID_FIELD is a random id, drawn anew whenever the rows start empty.
RUN_ID_FIELD = "run"
ID_LIMITS_FIELD = "reach"  # for each table, a number above all stored ids, or None if unknown
KEY_TYPES = {torch.int32: "int32", torch.int64: "int64", torch.uint64: "uint64"}


@dataclass(frozen=True)
class TableSpec:
    """An embedding's definition."""

    name: str
    columns: tuple[int, ...]  # the widths of the column groups
    key_type: torch.dtype
    tables: tuple[AnyTableOptions, ...]
    padding_idx: int | None  # the id that means padding; no row is stored for it
    seed: int
    dtype: str = "float32"  # the dtype of stored embeddings
    state_dtype: str = "float32"  # the dtype of stored element states; row states are float32
    has_own_seed: bool = True  # True if the user gave the seed; else it comes from the name or stored rows
    zero_key: int | None = None  # the row with this id (as 64 bits) starts as zeros
    dim: int = field(init=False)  # elements of a row, without optimizer state
    num_tables: int = field(init=False)
    padding_key: int | None = field(init=False)  # `padding_idx` as 64 bits
    # [num_tables] uint64, the last legal id of each table; None if every id of every table is legal
    max_ids: NDArray[np.uint64] | None = field(init=False, compare=False)
    # for each table, True if lookups drop illegal ids; empty if no table does
    drops_illegal: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        # These are fields rather than properties, because each step reads them several times.
        object.__setattr__(self, "dim", sum(self.columns))
        object.__setattr__(self, "num_tables", len(self.tables))
        object.__setattr__(self, "padding_key", None if self.padding_idx is None else self.padding_idx % 2**64)
        max_ids = [(table.ids or 2**64) - 1 for table in self.tables]
        has_limit = any(table.ids is not None for table in self.tables)
        object.__setattr__(self, "max_ids", np.array(max_ids, np.uint64) if has_limit else None)
        drops_illegal = tuple(table.bad_ids == "drop" for table in self.tables)
        object.__setattr__(self, "drops_illegal", drops_illegal if any(drops_illegal) else ())

    @property
    def legal_ids(self) -> Hashable:
        """A value to compare: if two embeddings have equal values, the same ids are legal in their tables."""
        return self.max_ids is not None and (self.max_ids.tobytes(), self.drops_illegal)

    @property
    def table_names(self) -> tuple[str | None, ...]:
        return tuple(table.name for table in self.tables)

    @property
    def labels(self) -> tuple[str, ...]:
        """Each table's name, or its number if it is unnamed, for messages and metrics."""
        return label_tables(self.table_names)

    def read_id_limits(self, stored: Mapping[str, Any] | None) -> list[int | None]:
        """Returns, for each table, a number above all legal ids and all stored ids; None if no such number is known."""
        own_limits = [table.ids for table in self.tables]
        field = None if stored is None else stored.get(ID_LIMITS_FIELD)
        stored_limits = field if isinstance(field, list) else [None] * (0 if stored is None else len(stored["tables"]))
        pairs = [(limit, *stored_limits[table : table + 1]) for table, limit in enumerate(own_limits)]
        return [max(pair) if all(type(limit) is int for limit in pair) else None for pair in pairs]

    def make_layout(self, state: RowState) -> _core.Layout:
        max_ids = None if self.max_ids is None else self.max_ids.tolist()
        return _core.Layout(self.dim, *self.make_initial_values(state), max_ids=max_ids)

    def make_initial_values(self, state: RowState) -> InitialValues:
        arrays = as_arrays(self.tables, self.columns)
        seed = self.seed % 2**64
        types = self.dtype, *state.states_16bit
        return InitialValues(state.initial_values, state.widths, seed, self.columns, *arrays, *types, self.zero_key)

    def make_row_format(self, state: RowState) -> RowFormat:
        return state.make_row_format(self.dim, self.dtype)

    def make_row_state(self, optimizer: RowOptimizer) -> RowState:
        return optimizer.make_row_state(self.dim, self.state_dtype)

    def describe_tables(self) -> list[dict[str, Any]]:
        """Return for each table, as plain values, the options that determine the initial values of its rows."""
        return [
            {name: value for name, value in table.as_dict().items() if name not in ID_OPTIONS} for table in self.tables
        ]

    def with_stored_seed(self, stored: dict[str, Any]) -> TableSpec:
        """Return the spec with the stored rows' seed, unless the user gave a seed."""
        return self if self.has_own_seed or stored["seed"] == self.seed else replace(self, seed=stored["seed"])

    def describe(self, state: RowState, hyperparams: Sequence[float], step: int) -> dict[str, Any]:
        """Return the description stored in MARK and in snapshots. `hyper` is from `compute_hyperparams(step)`."""
        names, row_format = list(self.table_names), self.make_row_format(state)
        return {
            "name": self.name,
            "key_type": KEY_TYPES[self.key_type],
            "dtype": self.dtype,
            "columns": list(self.columns),
            "width": row_format.width,
            **state.describe(),
            **({STATE_DTYPES: [field.type for field in row_format.fields[1:]]} if row_format.has_16bit_floats else {}),
            "hyper": list(hyperparams),
            "seed": self.seed,
            "tables": self.describe_tables(),
            **({TABLE_NAMES: names} if any(names) else {}),
            "padding_idx": self.padding_idx,
            "step": step,
        }


def make_table_spec(
    name: Any,
    embedding_dim: Any,
    key_type: Any,
    tables: Sequence[Mapping[str, Any]],
    padding_idx: Any,
    seed: Any,
    dtype: Any = torch.float32,
    state_dtype: Any = torch.float32,
) -> TableSpec:
    """Check a user's arguments and make the spec. Raises OptionError."""
    key_type, dtype, state_dtype = check_key_type(key_type), check_dtype(dtype), check_state_dtype(state_dtype)
    options = tuple(make_table_options(table) for table in tables)
    check_initializer_range(options, dtype)
    check_distinct([table.name for table in options])
    name = check_name(name)
    if padding_idx is not None:
        ids = torch.iinfo(key_type)
        expected = f"a whole number from {ids.min} to {ids.max}, or None"
        padding_idx = check_int("padding_idx", padding_idx, expected, ids.min, ids.max)
    return TableSpec(
        name,
        check_columns(embedding_dim),
        key_type,
        options,
        padding_idx,
        zlib.crc32(name.encode()) if seed is None else check_seed(seed),  # by default, each name has its own seed
        dtype,
        state_dtype,
        seed is not None,
    )


def check_name(name: Any) -> str:
    """Return an embedding's name. Raises OptionError if no folder can have that name."""
    if not is_folder_name(name) or name != name.strip():
        raise OptionError(
            f"name={name!r}: a folder gets this name; give 1 to 200 printable bytes, without slashes, without a dot at "
            "the start, and without spaces at either end"
        )
    return str(name)


def check_columns(embedding_dim: Any) -> tuple[int, ...]:
    """Return the column groups' widths from `embedding_dim`, an int or a list of ints. Raises OptionError."""
    dims = embedding_dim if isinstance(embedding_dim, (list, tuple)) else [embedding_dim]
    columns = tuple(width for dim in dims if (width := as_int(dim, minimum=1)) is not None)
    if not columns or len(columns) != len(dims) or sum(columns) > 1 << 16:
        remedy = "give a whole number from 1 to 65536, or a list of them for several columns"
        raise OptionError(f"embedding_dim={embedding_dim!r}: {remedy}")
    return columns


def check_key_type(key_type: Any) -> torch.dtype:
    """Return the key type. Raises OptionError for an unsupported type."""
    if not isinstance(key_type, torch.dtype) or key_type not in KEY_TYPES:
        raise OptionError(f"key_type={key_type!r}: give torch.int32, torch.int64 or torch.uint64")
    return key_type


def check_dtype(dtype: Any) -> str:
    """Return the dtype's name. Raises OptionError if rows cannot be stored in this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise OptionError(
            f"dtype={dtype!r}: rows cannot be stored in this dtype; give torch.float32, torch.bfloat16 or "
            "torch.float16. To set the dtype that lookups return, give output_dtype"
        )
    return DTYPES[dtype]


def check_state_dtype(dtype: Any) -> str:
    """Return the dtype's name. Raises OptionError for a dtype that element states do not support."""
    if dtype is torch.float16:
        raise OptionError(
            "state_dtype=torch.float16: float16 rounds sums of squares below 6e-8 to 0, and then updates are infinite; "
            "give torch.float32 or torch.bfloat16. The range of bfloat16 is as large as the range of float32"
        )
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise OptionError(f"state_dtype={dtype!r}: give torch.float32 or torch.bfloat16")
    return DTYPES[dtype]


def check_initializer_range(tables: Sequence[AnyTableOptions], dtype: str) -> None:
    """Raise OptionError if an initializer can draw a value that overflows `dtype`."""
    for index, table in enumerate(tables):
        for part in [table] if isinstance(table, TableOptions) else table.columns:
            if find_overflows(np.array([part.initializer.max_magnitude], np.float32), dtype).any():
                raise OptionError(
                    f"tables[{index}]: {part.initializer}: values up to {part.initializer.max_magnitude:.6g} overflow "
                    f"dtype=torch.{dtype}; give a narrower initializer, or torch.float32"
                )


def check_seed(seed: Any) -> int:
    return check_int("seed", seed, "a whole number of 64 bits", -(2**63), 2**64 - 1)
