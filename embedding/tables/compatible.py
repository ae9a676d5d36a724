"""Whether stored rows fit a table and the optimizer that is to train them, and which of their ids a table takes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

import numpy as np

from ...engine.checks import fits
from ...engine.errors import InputError, OptimizerError, SnapshotError, StoreError
from ...engine.optim.kernel import kernels
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options import table_names
from ...engine.options.table_spec import KEY_TYPES, TableSpec
from ...engine.row_format import Chunks
from ...snapshots.store.selection import Selection, converted_description

log = logging.getLogger("tierbed")


def check_stored(
    spec: TableSpec,
    stored: dict[str, Any],
    optimizer: RowOptimizer | None,
    error: type[Exception],
    what: str,
    wanted: Collection[int] | None = None,
    can_load: bool = False,
    for_load: bool = False,
) -> None:
    """Raises where the stored rows, or those of the tables `wanted`, cannot be rows of the embedding.

    Raises `error` where their columns, keys or number of tables differ, StoreError for names of tables or their order,
    OptimizerError where the rows lack the state of `optimizer`. what: names the stored rows in messages.
    can_load: whether they are of a snapshot that a load can convert, as SnapshotError says of all. for_load: whether
    the rows are about to be replaced.
    """
    for field, argument, mine in (
        ("columns", "embedding_dim", list(spec.columns)),
        ("key_type", "key_type", KEY_TYPES[spec.key_type]),
    ):
        if stored[field] != mine:
            raise error(
                f"{what} holds rows of {argument} {stored[field]}, not {mine}; give that {argument}, or another "
                f"name or persistent_path"
            )
    if stored["dtype"] != spec.dtype:
        raise _of_other_type(error, what, "dtype", stored["dtype"], spec.dtype, can_load)
    _check_names(spec, stored, what, wanted)
    there, begun = stored["tables"], spec.plain_tables()
    if wanted is not None:  # rows of tables with higher numbers are not loaded
        there = there[: max(wanted, default=-1) + 1]
    if len(there) > len(begun):
        raise error(f"{what} holds {len(there)} tables, not {len(begun)}; give all of them, in their order")
    if (stored["seed"], there) != (spec.seed, begun[: len(there)]):
        log.warning(
            "%s began its rows with another seed or other initializers: rows not yet stored begin differently", what
        )
    if optimizer is None and not for_load:
        _warn_of_state(spec, stored, what)
    if optimizer is None or stored.get("rows") == 0 or (stored["optimizer"] is None and not stored["states"]):
        return
    if (stored["optimizer"], stored["states"]) != (optimizer.rule, list(optimizer.states)):
        raise OptimizerError(
            f"{what} holds rows of optimizer {stored['optimizer']} with state {stored['states']}, not of "
            f"{optimizer.rule}; train with that optimizer, reset its state by loading a snapshot with "
            "weights_only=True, or take another name or persistent_path"
        )
    if RowState.described(stored).types != spec.state_of(optimizer).types:
        state_type, _ = RowState.described(stored).narrow
        raise _of_other_type(error, what, "state_dtype", state_type, spec.state_dtype, can_load)


def _warn_of_state(spec: TableSpec, stored: dict[str, Any], what: str) -> None:
    """Warn, before an optimizer is given, that none could train the stored rows with this `state_dtype`."""
    kernel, (theirs, _) = kernels().get(stored["optimizer"]), RowState.described(stored).narrow
    if kernel is not None and kernel.element_states and theirs != spec.state_dtype:
        log.warning(
            "%s holds state of %s, and state_dtype=torch.%s: its rows can be read, and a step will raise; give "
            "state_dtype=torch.%s",
            what,
            theirs,
            spec.state_dtype,
            theirs,
        )


def _of_other_type(
    error: type[Exception], what: str, argument: str, theirs: str, ours: str, can_load: bool
) -> Exception:
    convert = "load_snapshot(name, convert=True)"
    if error is SnapshotError:
        remedy = "load it with convert=True"
    elif can_load:
        remedy = f"load it by {convert}"
    else:
        remedy = (
            f'save them by `tierbed snapshot save`, open with open="fresh", which drops them, and {convert}, or of a '
            "checkpoint graph.load(path, convert=True)"
        )
    return error(
        f"{what} holds rows of {argument} {theirs}, not {ours}; give {argument}=torch.{theirs}; or {remedy}; or take "
        "another name or persistent_path"
    )


def _mismatched(spec: TableSpec, stored: dict[str, Any]) -> Collection[int]:
    """Stored tables that have another name than the embedding's: none, if tensors gave all names, which it lacks."""
    if stored.get(table_names.OF_TENSORS) and not any(spec.table_names):
        return ()
    return table_names.mismatched_tables(table_names.names_in(stored), spec.table_names)


def _check_names(spec: TableSpec, stored: dict[str, Any], what: str, wanted: Collection[int] | None) -> None:
    """Raises StoreError if the rows of a stored table would become those of another table."""
    others = [table for table in _mismatched(spec, stored) if wanted is None or table in wanted]
    if others and stored.get("rows") != 0:
        labels = table_names.labels_of(table_names.names_in(stored))
        raise StoreError(
            f"{what} holds tables {list(labels)}, and the embedding has {list(spec.labels)}: rows go by "
            "position, and would become those of another table; list the tables in the stored order by the stored "
            "names, new ones at the end, or rename the stored ones (docs/embedding.md#names-of-tables)"
        )


def fitting(
    spec: TableSpec,
    stored: dict[str, Any],
    optimizer: RowOptimizer | None,
    selection: Selection,
    strict: bool,
    what: str,
) -> tuple[Selection, list[str]]:
    """The part of a snapshot that fits the table, and remarks on what is left out. strict: leave out padding alone.

    Raises InputError for a selection of missing tables, and what `check_stored` raises if the snapshot cannot be loaded
    in this way.
    """
    remarks: list[str] = []
    names, given = table_names.names_in(stored), selection.tables
    if given is not None and (not fits(given, Collection) or not len(given)):
        raise InputError(f"tables={given!r}: give a list of table ids or names, or None for all")
    if selection.where is not None and not callable(selection.where):
        raise InputError(f"where={selection.where!r}: give a function of (table_ids, keys), NumPy arrays, or None")
    tables = None
    if given is not None:
        tables = [_selected(spec, names, table, f"tables={given!r}: {what}") for table in given]
    others = {*_mismatched(spec, stored), *range(spec.num_tables, len(names))}
    if others and not strict:
        remarks.append(_left_out(spec, names, others, what))
        tables = [table for table in (range(len(names)) if tables is None else tables) if table not in others]
    selection = dataclasses.replace(selection, tables=tables)
    wanted = spec.dtype, spec.state_dtype
    if selection.convert and converted_description(stored, wanted) != stored:
        selection = dataclasses.replace(selection, types=wanted)
    try:
        check_stored(spec, selection.description(stored), optimizer, SnapshotError, what, tables)
    except OptimizerError as error:
        if strict:
            raise OptimizerError(f"{error}; or load it with weights_only=True") from error
        remarks.append(f"the optimizer's state is reset: {error}")
        selection = dataclasses.replace(selection, state=False)
    if spec.padding_idx not in (None, stored["padding_idx"]):
        remarks.append(f"padding_idx={spec.padding_idx} was none when {what} was saved: rows of that id are left out")
        selection = dataclasses.replace(selection, padding=spec.padding_key)
    return selection, remarks


def _left_out(spec: TableSpec, names: table_names.Names, others: Collection[int], what: str) -> str:
    """The remark on tables of a snapshot that the embedding lacks."""
    if not any(names):
        return f"{what} has {len(names)} tables, and the embedding {spec.num_tables}: the others are left out"
    labels = table_names.labels_of(names)
    left = [labels[table] for table in sorted(others)]
    return f"{what} has tables {list(labels)}, and the embedding {list(spec.labels)}: {left} are left out"


def _selected(spec: TableSpec, names: table_names.Names, given: Any, where: str) -> int:
    """A table of a snapshot, by its number or stored name, or by the embedding's name where it has none stored."""
    for known in (names, spec.table_names[: len(names)]):
        number = table_names.table_number(given, known)
        if number is not None:
            return number
    raise InputError(f"{where} has tables {table_names.choices(names)}; {given!r} is none")


class LoadedIds:
    """Counts ids of tables that take a known number of them, while their rows are loaded."""

    def __init__(self, spec: TableSpec, counts: bool = True) -> None:
        """counts: False for rows that are about to be replaced, on which it has no remarks."""
        self._spec, self._last = spec, spec.last_ids if counts else None
        self._rows, self._beyond = np.zeros(spec.num_tables, np.int64), np.zeros(spec.num_tables, np.int64)
        self._largest = np.zeros(spec.num_tables, np.uint64)
        self._with_padding: set[int] = set()

    def stored(self, chunks: Chunks) -> Chunks:
        """The same chunks, of all that is stored: which tables have a row of padding, that no load takes."""
        for bucket, rows in chunks:
            if self._last is not None and self._spec.padding_key is not None:
                self._with_padding.update(rows["table"][rows["key"] == np.uint64(self._spec.padding_key)].tolist())
            yield bucket, rows

    def counted(self, chunks: Chunks) -> Chunks:
        """The same chunks, counted as they pass."""
        for bucket, rows in chunks:
            if self._last is not None:
                tables, keys = rows["table"], rows["key"]
                self._rows += np.bincount(tables, minlength=len(self._rows))
                self._beyond += np.bincount(tables[keys > self._last[tables]], minlength=len(self._rows))
                np.maximum.at(self._largest, tables, keys)
            yield bucket, rows

    def remarks(self, what: str, of_dense: bool, stored_padding: int | None) -> list[str]:
        """What does not fit. of_dense: whether the rows may be those of a dense table, which has all ids from 0 on.

        stored_padding: the padding_idx of what is stored, whose row a dense table had and an import left out.
        """
        found = []
        for number, (label, options) in enumerate(zip(self._spec.labels, self._spec.tables, strict=True)):
            takes, rows, beyond = options.ids, int(self._rows[number]), int(self._beyond[number])
            if takes is None or not rows:
                continue
            ids = int(self._largest[number]) + 1
            if beyond:
                found.append(
                    f"{what} has {beyond} rows of table {label} with ids from {takes} on, which no lookup takes: give "
                    f"the table num_embeddings (or ids) of {ids}, or leave them out by where= of load_snapshot"
                )
                continue
            padding = self._spec.padding_idx
            left_out = padding is not None and padding == stored_padding and 0 <= padding <= ids
            if padding is not None and (left_out or number in self._with_padding):
                rows, ids = rows + 1, max(ids, padding + 1)  # a row of the dense table that no load takes
            if of_dense and rows == ids < takes:
                found.append(
                    f"{what} has ids 0 to {ids - 1} of table {label}, which takes {takes}, so the others begin as new "
                    f"rows: if it has all of them, give the table num_embeddings (or ids) of {ids}"
                )
        return found
