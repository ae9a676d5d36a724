"""Compares two snapshots. Reports which rows differ and by how much, and how the tables' descriptions differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import SnapshotError
from ...engine.options.table_names import Names, label_tables, merge_names, read_table_names
from ...engine.row_format import RowArray
from ...engine.store.merging import STATUS_NEW, join_tables
from ..exchange.columns import EMBEDDING, Columns
from ..files.format import name_hyperparams
from ..files.reader import Snapshot

DiffKind = Literal["added", "changed", "gone"]
DIFF_KINDS: tuple[DiffKind, ...] = get_args(DiffKind)
FieldDiffs = dict[str, tuple[Any, Any]]  # {description field: (old value, new value)} for each field that differs
_MUST_AGREE = ("key_type", "columns")


class RowDiff(NamedTuple):
    """A row that differs. difference: the largest in its embedding; None if one snapshot lacks the row."""

    kind: DiffKind
    table: int
    key: int
    difference: float | None


class Comparison:
    """The differences between two snapshots. Rows of different dtypes are compared as float32."""

    def __init__(self, fields: FieldDiffs, names: Names, old: Columns, new: Columns, max_diffs: int) -> None:
        self.fields = fields  # description fields that differ, with both values
        self.names = names  # the tables' names
        self.counts = {kind: Counter[int]() for kind in DIFF_KINDS}  # rows by table id; a row changed if a byte differs
        self.num_equal, self.first_diffs = 0, list[RowDiff]()  # how many rows are equal; the first rows that differ
        self._old_row_format, self._columns, self._max_diffs = old.row_format, new, max_diffs
        self._has_same_states = not fields.keys() & {"states", "state_widths"}
        # each column's greatest absolute difference in rows of both snapshots; infinite between a number and NaN
        self.column_diffs = dict.fromkeys(new.row_format.counts if self._has_same_states else [EMBEDDING], 0.0)

    @property
    def has_differences(self) -> bool:
        return bool(self.fields or any(self.counts.values()))

    def add(self, old: RowArray, new: RowArray, is_gone: NDArray[np.bool_], is_new: NDArray[np.bool_]) -> None:
        """Compare rows of one key range. is_gone: True for rows only in `old`. is_new: True for rows only in `new`."""
        if not is_new.all():
            self._compare_common(old[~is_gone], new[~is_new])
        self._count("gone", old[is_gone], None)
        self._count("added", new[is_new], None)

    def _compare_common(self, old: RowArray, new: RowArray) -> None:
        changed = (old["updates"] != new["updates"]) | (old["step"] != new["step"])
        if not self._has_same_states:
            changed[:] = True
        differences = {}
        for name in self.column_diffs:
            before, after = self._old_row_format.values(old, name), self._columns.row_format.values(new, name)
            differences[name] = _find_differences(before, after, changed)
            self.column_diffs[name] = max(self.column_diffs[name], float(differences[name].max(initial=0.0)))
        self.num_equal += len(new) - int(changed.sum())
        self._count("changed", new[changed], differences[EMBEDDING][changed])

    def _count(self, kind: DiffKind, rows: RowArray, differences: NDArray[np.float64] | None) -> None:
        for table, count in zip(*np.unique(rows["table"], return_counts=True), strict=True):
            self.counts[kind][int(table)] += int(count)
        first = self.first_diffs
        some = rows[: max(0, self._max_diffs - len(first))]
        for i, (table, key) in enumerate(zip(some["table"], self._columns.to_user_keys(some["key"]), strict=True)):
            first.append(RowDiff(kind, int(table), int(key), None if differences is None else float(differences[i])))


def compare(
    before: Snapshot, after: Snapshot, progress: Callable[[int], None] | None = None, max_diffs: int = 0
) -> Comparison:
    """Compare two snapshots. Raises SnapshotError if a snapshot is damaged or the tables do not match.

    max_diffs: how many differing rows to list. progress: called with the number of rows read.
    """
    old, new = before.description, after.description
    reasons = [f"{name} is {old[name]!r} and {new[name]!r}" for name in _MUST_AGREE if old[name] != new[name]]
    old_names, new_names = read_table_names(old), read_table_names(new)
    if (names := merge_names(old_names, new_names)) is None:
        reasons.append(f"tables are {list(label_tables(old_names))} and {list(label_tables(new_names))}")
    if names is None or reasons:
        raise SnapshotError(
            f"snapshots {before.name!r} and {after.name!r} cannot be compared: their {reasons[0]}; compare snapshots "
            "of the same embedding"
        )
    fields = _compare_fields(name_hyperparams(old), name_hyperparams(new))
    old_values, new_values = fields.get("hyper", (None, None))
    if isinstance(old_values, dict) and isinstance(new_values, dict):
        changed = _compare_fields(old_values, new_values)
        old_values, new_values = ({n: h[n] for n in h if n in changed} for h in (old_values, new_values))
        fields["hyper"] = old_values, new_values
    result = Comparison(fields, names, Columns(old), Columns(new), max_diffs)
    for _, old_rows, new_rows, deleted, state in join_tables(before.chunks(), after.chunks()):
        result.add(old_rows, new_rows, deleted > 0, state == STATUS_NEW)
        if progress is not None:
            progress(len(old_rows) + len(new_rows))
    return result


def _compare_fields(old: dict[str, Any], new: dict[str, Any]) -> FieldDiffs:
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _find_differences(
    old: NDArray[np.float32], new: NDArray[np.float32], changed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Returns each row's greatest absolute difference [n]. Sets `changed` [n] to True for rows that differ."""
    differ = np.ascontiguousarray(old).view(np.uint32) != np.ascontiguousarray(new).view(np.uint32)
    changed |= differ.any(axis=1)
    with np.errstate(invalid="ignore"):
        distance = np.abs(new.astype(np.float64) - old.astype(np.float64))
    distance[np.isnan(distance)] = np.inf
    distance[~differ] = 0.0  # numbers with equal bits have distance 0, even NaN or infinity
    largest: NDArray[np.float64] = distance.max(axis=1, initial=0.0)
    return largest
