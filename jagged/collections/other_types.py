"""Tables whose `data_type` changed: their rows are in the folder of another embedding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from ...engine.options.store_options import StoreOptions
from ...engine.options.table_names import Names, names_in
from ...engine.options.table_spec import DTYPES
from ...snapshots.store.folder_state import FolderState

log = logging.getLogger("tierbed")


def warn_of_other_types(
    named: Callable[[torch.dtype], str],
    dtype: torch.dtype,
    options: StoreOptions,
    used: Collection[str] = (),
    tables: Names = (),
) -> None:
    """Log that an embedding will begin empty, if there are rows of the same tables by another dtype alone.

    named: what the embedding is called for rows of a dtype. used: what else has these names. tables: of the embedding;
    rows of tables that all have other names are none of theirs.
    """
    own = named(dtype)
    if options.persistent_path is None or options.open == "fresh" or (Path(options.persistent_path) / own).exists():
        return
    for other in {named(one) for one in DTYPES if one != dtype}.difference(used):
        folder = Path(options.persistent_path) / other
        if folder.exists() and _may_have(folder, tables):
            log.warning(
                "embedding %r begins empty, and %s has rows of another dtype: to keep them, copy a snapshot of them to "
                "%s, and load it by embedding_of(table).load_snapshot(name, convert=True)",
                own,
                folder,
                Path(options.persistent_path) / own / "snapshots",
            )


def _may_have(folder: Path, tables: Names) -> bool:
    """Whether a store's live rows may be of one of the tables. Without a mark, or names, it is not known."""
    mark = FolderState(folder).read_clean_marker()
    names = () if mark is None or "tables" not in mark else names_in(mark)
    is_known = tables and names and all((*names, *tables))
    return not is_known or not {*names}.isdisjoint(tables)
