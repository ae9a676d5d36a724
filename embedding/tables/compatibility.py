"""Checks that stored rows fit a table and its optimizer, and that the rows' ids are legal in the table."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

import numpy as np

from ...engine.checks import has_type
from ...engine.errors import InputError, OptimizerError, SnapshotError, StoreError
from ...engine.optim.kernel import load_kernels
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options import table_names
from ...engine.options.table_spec import KEY_TYPES, TableSpec
from ...engine.row_format import Chunks
from ...snapshots.store.selection import Selection, convert_description

log = logging.getLogger("tierbed")


def check_stored_rows(
    spec: TableSpec,
    description: dict[str, Any],
    optimizer: RowOptimizer | None,
    error: type[Exception],
    label: str,  # names the stored rows in messages
    tables: Collection[int] | None = None,  # check only the rows of these tables; None for all tables
    can_load: bool = False,  # True if the rows are in a snapshot that a load can convert
    for_load: bool = False,  # True if the rows are about to be replaced
) -> None:
    """Raise if stored rows do not fit the embedding.

    Raises `error` if columns, keys, dtypes or the table count differ. Raises StoreError if the tables' names or order
    differ. Raises OptimizerError if the rows lack the optimizer's state.
    """
    for field, argument, expected in (
        ("columns", "embedding_dim", list(spec.columns)),
        ("key_type", "key_type", KEY_TYPES[spec.key_type]),
    ):
        if description[field] != expected:
            raise error(
                f"{label} holds rows of {argument} {description[field]}, not {expected}; give that {argument}, or "
                f"another name or persistent_path"
            )
    if description["dtype"] != spec.dtype:
        raise _make_dtype_error(error, label, "dtype", description["dtype"], spec.dtype, can_load)
    _check_names(spec, description, label, tables)
    stored_tables, own_tables = description["tables"], spec.describe_tables()
    if tables is not None:  # tables with higher numbers are not loaded
        stored_tables = stored_tables[: max(tables, default=-1) + 1]
    if len(stored_tables) > len(own_tables):
        raise error(
            f"{label} holds {len(stored_tables)} tables, not {len(own_tables)}; give all of them, in their order"
        )
    if (description["seed"], stored_tables) != (spec.seed, own_tables[: len(stored_tables)]):
        log.warning(
            "%s has another seed or other initializers than the embedding, so new rows start with other values", label
        )
    if optimizer is None and not for_load:
        _warn_of_state(spec, description, label)
    rule, states = description["optimizer"], description["states"]
    if optimizer is None or description.get("rows") == 0 or (rule is None and not states):
        return
    if (rule, states) != (optimizer.rule, list(optimizer.states)):
        raise OptimizerError(
            f"{label} holds rows of optimizer {rule} with state {states}, but the new "
            f"optimizer is {optimizer.rule}. Train with the stored optimizer, load a snapshot with weights_only=True "
            "to reset the state, or take another name or persistent_path"
        )
    if RowState.from_description(description).types != spec.make_row_state(optimizer).types:
        state_type, _ = RowState.from_description(description).states_16bit
        raise _make_dtype_error(error, label, "state_dtype", state_type, spec.state_dtype, can_load)


def _warn_of_state(spec: TableSpec, description: dict[str, Any], label: str) -> None:
    """Warn if stored rows have another `state_dtype` than the embedding. Training steps on such rows will raise."""
    kernel = load_kernels().get(description["optimizer"])
    stored_dtype, _ = RowState.from_description(description).states_16bit
    if kernel is not None and kernel.element_states and stored_dtype != spec.state_dtype:
        log.warning(
            "%s holds state of dtype %s, but state_dtype=torch.%s. The rows can be read, but training steps will "
            "raise; give state_dtype=torch.%s",
            *(label, stored_dtype, spec.state_dtype, stored_dtype),
        )


def _make_dtype_error(
    error: type[Exception], label: str, argument: str, stored_dtype: str, dtype: str, can_load: bool
) -> Exception:
    convert = "load_snapshot(name, convert=True)"
    if error is SnapshotError:
        remedy = "load it with convert=True"
    elif can_load:
        remedy = f"load it by {convert}"
    else:
        remedy = (
            f'save them by `tierbed snapshot save`, open with open="fresh", which drops them, and call {convert}; for '
            "a checkpoint, call graph.load(path, convert=True)"
        )
    return error(
        f"{label} holds rows of {argument} {stored_dtype}, not {dtype}; give {argument}=torch.{stored_dtype}; or "
        f"{remedy}; or take another name or persistent_path"
    )


def _find_mismatched_tables(spec: TableSpec, description: dict[str, Any]) -> Collection[int]:
    """Return the numbers of the stored tables that have another name in the embedding.

    If the embedding's tables are unnamed, stored names that an import made from tensors' names are ignored.
    """
    if description.get(table_names.NAMED_LIKE_TENSORS) and not any(spec.table_names):
        return ()
    return table_names.find_mismatched_tables(table_names.read_table_names(description), spec.table_names)


def _check_names(spec: TableSpec, description: dict[str, Any], label: str, tables: Collection[int] | None) -> None:
    """Raise StoreError if rows of a stored table would become rows of another table."""
    others = [table for table in _find_mismatched_tables(spec, description) if tables is None or table in tables]
    if others and description.get("rows") != 0:
        labels = table_names.label_tables(table_names.read_table_names(description))
        raise StoreError(
            f"{label} holds tables {list(labels)}, but the embedding has tables {list(spec.labels)}. Tables are "
            "matched by position, so rows would move to another table. Keep the stored tables' names and order, and "
            "add new tables at the end. To rename a stored table, see docs/embedding.md#names-of-tables"
        )


def fit_selection(
    spec: TableSpec,
    description: dict[str, Any],
    optimizer: RowOptimizer | None,
    selection: Selection,
    strict: bool,
    label: str,
) -> tuple[Selection, list[str]]:
    """Restrict a selection of a snapshot's rows to rows that fit the table. Also returns remarks on what is left out.

    strict: leave out only padding rows. Raises the errors of `check_stored_rows`; InputError for a bad selection.
    """
    remarks: list[str] = []
    names, selected = table_names.read_table_names(description), selection.tables
    if selected is not None and (not has_type(selected, Collection) or not len(selected)):
        raise InputError(f"tables={selected!r}: give a list of table ids or names, or None for all")
    if selection.where is not None and not callable(selection.where):
        raise InputError(f"where={selection.where!r}: give a function of two NumPy arrays, (table_ids, keys); or None")
    tables = None
    if selected is not None:
        tables = [_find_stored_table(spec, names, table, f"tables={selected!r}: {label}") for table in selected]
    others = {*_find_mismatched_tables(spec, description), *range(spec.num_tables, len(names))}
    if others and not strict:
        remarks.append(_remark_on_others(spec, names, others, label))
        tables = [table for table in (range(len(names)) if tables is None else tables) if table not in others]
    selection = dataclasses.replace(selection, tables=tables)
    dtypes = spec.dtype, spec.state_dtype
    if selection.converts and convert_description(description, dtypes) != description:
        selection = dataclasses.replace(selection, target_dtypes=dtypes)
    try:
        check_stored_rows(spec, selection.describe(description), optimizer, SnapshotError, label, tables)
    except OptimizerError as error:
        if strict:
            raise OptimizerError(f"{error}; or load it with weights_only=True") from error
        remarks.append(f"the optimizer's state is reset: {error}")
        selection = dataclasses.replace(selection, includes_state=False)
    if spec.padding_idx not in (None, description["padding_idx"]):
        remarks.append(f"padding_idx={spec.padding_idx} was none when {label} was saved: rows of that id are left out")
        selection = dataclasses.replace(selection, padding_key=spec.padding_key)
    return selection, remarks


def _remark_on_others(spec: TableSpec, names: table_names.Names, others: Collection[int], label: str) -> str:
    """Return a remark about tables that are in the snapshot but not in the embedding."""
    if not any(names):
        return f"{label} has {len(names)} tables, and the embedding {spec.num_tables}: the others are left out"
    labels = table_names.label_tables(names)
    skipped = [labels[table] for table in sorted(others)]
    return f"{label} has tables {list(labels)}, and the embedding {list(spec.labels)}: {skipped} are left out"


def _find_stored_table(spec: TableSpec, names: table_names.Names, table: Any, where: str) -> int:
    """Return a stored table's number. `table`: its number, its stored name, or its name in the embedding."""
    for known_names in (names, spec.table_names[: len(names)]):
        index = table_names.find_table(table, known_names)
        if index is not None:
            return index
    raise InputError(f"{where} has tables {table_names.format_choices(names)}; {table!r} is none of them")


class LoadedIdCounter:
    """Counts ids while tables with a fixed number of ids are loaded. Makes remarks about ids that do not fit.

    If `counts_ids` is False, no ids are counted and no remarks are made. Used if the rows are about to be replaced.
    """

    def __init__(self, spec: TableSpec, counts_ids: bool = True) -> None:
        self._spec, self._max_ids = spec, spec.max_ids if counts_ids else None
        self._num_rows, self._num_unused = np.zeros(spec.num_tables, np.int64), np.zeros(spec.num_tables, np.int64)
        self._max_keys = np.zeros(spec.num_tables, np.uint64)
        self._padded_tables: set[int] = set()

    def remember_padding(self, chunks: Chunks) -> Chunks:
        """Yield the chunks of all stored rows, and remember the tables with a padding row. Loads skip padding rows."""
        for bucket, rows in chunks:
            if self._max_ids is not None and self._spec.padding_key is not None:
                self._padded_tables.update(rows["table"][rows["key"] == np.uint64(self._spec.padding_key)].tolist())
            yield bucket, rows

    def count(self, chunks: Chunks) -> Chunks:
        """Yield the chunks of loaded rows, and count the rows."""
        for bucket, rows in chunks:
            if self._max_ids is not None:
                tables, keys = rows["table"], rows["key"]
                self._num_rows += np.bincount(tables, minlength=len(self._num_rows))
                self._num_unused += np.bincount(tables[keys > self._max_ids[tables]], minlength=len(self._num_rows))
                np.maximum.at(self._max_keys, tables, keys)
            yield bucket, rows

    def log_remarks(self, source: str, may_be_dense: bool, stored_padding: int | None) -> list[str]:
        """Log and return remarks on ids that do not fit. source: names the stored rows.

        `may_be_dense` is True if the rows may come from a dense table. A dense table's ids begin at 0, without gaps.
        `stored_padding` is the stored rows' padding_idx. An import left out the row of this id.
        """
        remarks = []
        for table_id, (label, options) in enumerate(zip(self._spec.labels, self._spec.tables, strict=True)):
            num_ids, rows, num_unused = options.ids, int(self._num_rows[table_id]), int(self._num_unused[table_id])
            if num_ids is None or not rows:
                continue
            ids = int(self._max_keys[table_id]) + 1
            if num_unused:
                remarks.append(
                    f"{source} has {num_unused} rows of table {label} with ids from {num_ids} on, which no lookup takes"
                    f": give the table num_embeddings (or ids) of {ids}, or leave them out by where= of load_snapshot"
                )
                continue
            padding = self._spec.padding_idx
            left_out = padding is not None and padding == stored_padding and 0 <= padding <= ids
            if padding is not None and (left_out or table_id in self._padded_tables):
                rows, ids = rows + 1, max(ids, padding + 1)  # also count the padding row, which was not loaded
            if may_be_dense and rows == ids < num_ids:
                remarks.append(
                    f"{source} has ids 0 to {ids - 1} of table {label}, which takes {num_ids}, so the others begin as "
                    f"new rows: if there are no more ids, give the table num_embeddings (or ids) of {ids}"
                )
        for remark in remarks:
            log.warning("embedding %r: %s", self._spec.name, remark)
        return remarks
