"""What an embedding is, without the store of its rows: names, widths, tables, seed.

A `TableSpec` makes the native layout and the stored description.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _core
from ..checks import as_int, int_option, is_folder_name
from ..errors import OptionError
from ..optim.row_optimizer import RowOptimizer
from ..optim.row_state import RowState
from ..row_format import STATE_TYPES, RowForm, overflows
from .initializers import TABLE_FACTS, AnyTableOptions, InitialValues, TableOptions, as_arrays, make_table_options
from .table_names import FIELD, check_distinct, labels_of

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}  # of stored numbers
RUN = "run"  # of a description: a random id, drawn when rows begin empty
REACH = "reach"  # of a description: for each table, a number above its stored ids, or None
KEY_TYPES = {torch.int32: "int32", torch.int64: "int64", torch.uint64: "uint64"}


@dataclass(frozen=True)
class TableSpec:
    """What an embedding is. `columns`: the widths of the column groups. `padding_idx`: the id that names no row."""

    name: str
    columns: tuple[int, ...]
    key_type: torch.dtype
    tables: tuple[AnyTableOptions, ...]
    padding_idx: int | None
    seed: int
    dtype: str = "float32"  # of the embedding's numbers: a name of NUMBERS
    state_dtype: str = "float32"  # of the numbers of states that elements have
    has_own_seed: bool = True  # whether the seed was given; else it is made of the name, or that of the stored rows
    zero_key: int | None = None  # the 64 bits of the id whose row begins as zeros
    dim: int = field(init=False)  # numbers of a row, optimizer state apart
    num_tables: int = field(init=False)
    padding_key: int | None = field(init=False)  # the 64 bits of `padding_idx`
    # [num_tables] uint64, the last legal id of each table; None if every id of every table is legal
    last_ids: NDArray[np.uint64] | None = field(init=False, compare=False)
    # for each table, whether lookups drop ids beyond its last one; empty if none does
    drops: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        # not properties: a step reads them several times
        object.__setattr__(self, "dim", sum(self.columns))
        object.__setattr__(self, "num_tables", len(self.tables))
        object.__setattr__(self, "padding_key", None if self.padding_idx is None else self.padding_idx % 2**64)
        last = [(table.ids or 2**64) - 1 for table in self.tables]
        limited = any(table.ids is not None for table in self.tables)
        object.__setattr__(self, "last_ids", np.array(last, np.uint64) if limited else None)
        drops = tuple(table.bad_ids == "drop" for table in self.tables)
        object.__setattr__(self, "drops", drops if any(drops) else ())

    @property
    def legal_ids(self) -> Hashable:
        """A value that is equal for embeddings with the same legal ids of each table."""
        return self.last_ids is not None and (self.last_ids.tobytes(), self.drops)

    @property
    def table_names(self) -> tuple[str | None, ...]:
        return tuple(table.name for table in self.tables)

    @property
    def labels(self) -> tuple[str, ...]:
        """What messages and metrics call each table: the table's name, else its number."""
        return labels_of(self.table_names)

    def reach(self, stored: Mapping[str, Any] | None) -> list[int | None]:
        """For each table a number above its ids, also above those that are stored; None if there is no known one."""
        own = [table.ids for table in self.tables]
        known = None if stored is None else stored.get(REACH)
        theirs = known if isinstance(known, list) else [None] * (0 if stored is None else len(stored["tables"]))
        both = [(mine, *theirs[number : number + 1]) for number, mine in enumerate(own)]
        return [max(pair) if all(type(one) is int for one in pair) else None for pair in both]

    def layout(self, state: RowState) -> _core.Layout:
        last_ids = None if self.last_ids is None else self.last_ids.tolist()
        return _core.Layout(self.dim, *self.initial_values(state), last_ids=last_ids)

    def initial_values(self, state: RowState) -> InitialValues:
        arrays = as_arrays(self.tables, self.columns)
        seed = self.seed % 2**64
        narrow = self.dtype, *state.narrow
        return InitialValues(state.initial, state.widths, seed, self.columns, *arrays, *narrow, self.zero_key)

    def form(self, state: RowState) -> RowForm:
        """The form of a row with that state."""
        return state.form(self.dim, self.dtype)

    def state_of(self, optimizer: RowOptimizer) -> RowState:
        """The state of rows that an optimizer trains."""
        return optimizer.row_state(self.dim, self.state_dtype)

    def plain_tables(self) -> list[dict[str, Any]]:
        """For each table, its options as plain values: how its rows begin."""
        return [
            {part: value for part, value in table.as_dict().items() if part not in TABLE_FACTS} for table in self.tables
        ]

    def with_stored_seed(self, stored: dict[str, Any]) -> TableSpec:
        """The spec for stored rows: new rows are drawn with their seed, if no seed was given."""
        return self if self.has_own_seed or stored["seed"] == self.seed else replace(self, seed=stored["seed"])

    def describe(self, state: RowState, hyper: Sequence[float], step: int) -> dict[str, Any]:
        """The table's description in MARK and in manifests, as plain values. hyper: the rule's numbers at that step."""
        names, form = list(self.table_names), self.form(state)
        return {
            "name": self.name,
            "key_type": KEY_TYPES[self.key_type],
            "dtype": self.dtype,
            "columns": list(self.columns),
            "width": form.width,
            **state.describe(),
            **({STATE_TYPES: [field.type for field in form.fields[1:]]} if form.is_narrow else {}),
            "hyper": list(hyper),
            "seed": self.seed,
            "tables": self.plain_tables(),
            **({FIELD: names} if any(names) else {}),
            "padding_idx": self.padding_idx,
            "step": step,
        }


def table_spec(
    name: Any,
    embedding_dim: Any,
    key_type: Any,
    tables: Sequence[Mapping[str, Any]],
    padding_idx: Any,
    seed: Any,
    dtype: Any = torch.float32,
    state_dtype: Any = torch.float32,
) -> TableSpec:
    """The spec of an embedding from a user's arguments, `tables` with options for each table. Raises OptionError.

    seed: None is the CRC-32 of the name, so that embeddings with different names have different initial rows.
    """
    key_type = check_key_type(key_type)
    dtype, state_dtype = check_dtype(dtype), check_state_dtype(state_dtype)
    options = tuple(make_table_options(table) for table in tables)
    check_reach(options, dtype)
    check_distinct([table.name for table in options])
    name = check_name(name)
    if padding_idx is not None:
        ids = torch.iinfo(key_type)
        expected = f"a whole number from {ids.min} to {ids.max}, or None"
        padding_idx = int_option("padding_idx", padding_idx, expected, ids.min, ids.max)
    return TableSpec(
        name,
        check_columns(embedding_dim),
        key_type,
        options,
        padding_idx,
        zlib.crc32(name.encode()) if seed is None else check_seed(seed),
        dtype,
        state_dtype,
        seed is not None,
    )


def check_name(name: Any) -> str:
    """Raises OptionError for a name that cannot be the name of a folder."""
    if not is_folder_name(name) or name != name.strip():
        raise OptionError(
            f"name={name!r}: give 1 to 200 printable bytes that can name a folder: no slashes, no leading dot or "
            "space around"
        )
    return str(name)


def check_columns(embedding_dim: Any) -> tuple[int, ...]:
    """The widths of the column groups of `embedding_dim`, an int or a sequence of them. Raises OptionError."""
    given = embedding_dim if isinstance(embedding_dim, (list, tuple)) else [embedding_dim]
    columns = tuple(width for one in given if (width := as_int(one, minimum=1)) is not None)
    if not columns or len(columns) != len(given) or sum(columns) > 1 << 16:
        raise OptionError(
            f"embedding_dim={embedding_dim!r}: give a whole number from 1 to 65536, or a list of them for several "
            f"columns"
        )
    return columns


def check_key_type(key_type: Any) -> torch.dtype:
    """Raises OptionError for a key type that rows cannot have."""
    if not isinstance(key_type, torch.dtype) or key_type not in KEY_TYPES:
        raise OptionError(f"key_type={key_type!r}: give torch.int32, torch.int64 or torch.uint64")
    return key_type


def check_dtype(dtype: Any) -> str:
    """The name of an embedding's dtype. Raises OptionError for one that stored rows cannot have."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise OptionError(
            f"dtype={dtype!r}: rows are stored in torch.float32, bfloat16 or float16; give one of them (an "
            "embedding's output_dtype is that of its lookups' results)"
        )
    return DTYPES[dtype]


def check_state_dtype(dtype: Any) -> str:
    """The name of the dtype of element states. Raises OptionError for one that they cannot have."""
    if dtype is torch.float16:
        raise OptionError(
            "state_dtype=torch.float16: sums of squares under 6e-8 would become 0, and updates infinite; give "
            "torch.bfloat16, which has the range of float32, or torch.float32"
        )
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise OptionError(f"state_dtype={dtype!r}: give torch.float32 or torch.bfloat16")
    return DTYPES[dtype]


def check_reach(tables: Sequence[AnyTableOptions], dtype: str) -> None:
    """Raises OptionError for an initializer with values that a finite number of `dtype` cannot hold."""
    for index, table in enumerate(tables):
        for part in [table] if isinstance(table, TableOptions) else table.columns:
            if overflows(np.array([part.initializer.reach], np.float32), dtype).any():
                raise OptionError(
                    f"tables[{index}]: {part.initializer}: values of up to {part.initializer.reach:.6g} overflow "
                    f"dtype=torch.{dtype}; give smaller ones, or torch.float32"
                )


def check_seed(seed: Any) -> int:
    return int_option("seed", seed, "a whole number of 64 bits", -(2**63), 2**64 - 1)
