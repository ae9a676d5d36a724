"""Whether stored rows fit a table, and the optimizer that is to train them."""

from __future__ import annotations

import logging
from typing import Any

from .errors import OptimizerError
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
