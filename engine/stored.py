"""Whether stored rows fit a table, and the optimizer that is to train them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

from ..snapshots.selection import Selection
from .errors import InputError, OptimizerError, SnapshotError
from .optimizers import RowOptimizer
from .spec import KEY_TYPES, TableSpec

log = logging.getLogger("tierbed")


def check_stored(
    spec: TableSpec, stored: dict[str, Any], optimizer: RowOptimizer | None, error: type[Exception], what: str
) -> None:
    """Raises where the stored rows are of another table, or lack the state of the optimizer to train them."""
    for field, argument, mine in (
        ("columns", "embedding_dim", list(spec.columns)),
        ("key_type", "key_type", KEY_TYPES[spec.key_type]),
        ("dtype", "dtype", "float32"),
    ):
        if stored[field] != mine:
            raise error(
                f"{what} holds rows of {argument} {stored[field]}, not {mine}; give that {argument}, or another "
                f"name or persistent_path"
            )
    if len(stored["tables"]) > spec.num_tables:
        raise error(
            f"{what} holds {len(stored['tables'])} tables, not {spec.num_tables}; give all of them, in their order"
        )
    if (stored["seed"], stored["tables"][: spec.num_tables]) != (
        spec.seed,
        spec.plain_tables()[: len(stored["tables"])],
    ):
        log.warning(
            "%s began its rows with another seed or other initializers: rows not yet stored begin differently", what
        )
    if optimizer is None or stored.get("rows") == 0 or (stored["optimizer"] is None and not stored["states"]):
        return
    if (stored["optimizer"], stored["states"]) != (optimizer.rule, list(optimizer.states)):
        raise OptimizerError(
            f"{what} holds rows of optimizer {stored['optimizer']} with state {stored['states']}, not of "
            f"{optimizer.rule}; train with that optimizer, or take another name or persistent_path"
        )


def fitting(
    spec: TableSpec,
    stored: dict[str, Any],
    optimizer: RowOptimizer | None,
    selection: Selection,
    strict: bool,
    what: str,
) -> tuple[Selection, list[str]]:
    """What of a snapshot fits the table, and remarks on what is left out, which where it is `strict` is padding alone.

    Raises InputError for a selection of tables that are not there, SnapshotError and OptimizerError where it cannot be
    loaded so.
    """
    remarks: list[str] = []
    there = len(stored["tables"])
    if selection.tables is not None and not (isinstance(selection.tables, Collection) and len(selection.tables)):
        raise InputError(f"tables={selection.tables!r}: give a list of table ids, or None for all")
    if selection.where is not None and not callable(selection.where):
        raise InputError(f"where={selection.where!r}: give a function of (table_ids, keys), NumPy arrays, or None")
    for table in selection.tables or ():
        if isinstance(table, bool) or not isinstance(table, int) or not 0 <= table < there:
            raise InputError(f"tables={selection.tables!r}: {what} has tables 0 to {there - 1}; {table!r} is none")
    if there > spec.num_tables and not strict:
        remarks.append(f"{what} has {there} tables, and the embedding {spec.num_tables}: the others are left out")
        wanted = range(there) if selection.tables is None else selection.tables
        selection = dataclasses.replace(selection, tables=[table for table in wanted if table < spec.num_tables])
    if selection.tables is not None:  # those above are not asked for
        stored = {**stored, "tables": stored["tables"][: max(selection.tables, default=-1) + 1]}
    try:
        check_stored(spec, selection.description(stored), optimizer, SnapshotError, what)
    except OptimizerError as error:
        if strict:
            raise OptimizerError(f"{error}; or load it with weights_only=True") from error
        remarks.append(f"the optimizer's state is begun anew: {error}")
        selection = dataclasses.replace(selection, state=False)
    if spec.padding_idx not in (None, stored["padding_idx"]):
        remarks.append(f"padding_idx={spec.padding_idx} was none when {what} was saved: rows of that id are left out")
        selection = dataclasses.replace(selection, padding=spec.padding_key)
    return selection, remarks
