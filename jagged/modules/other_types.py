"""Tables whose `data_type` changed: their rows are in the folder of another embedding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from ...engine.spec.options import StoreOptions
from ...engine.spec.table_spec import DTYPES

log = logging.getLogger("tierbed")


def warn_of_other_types(named: Callable[[torch.dtype], str], dtype: torch.dtype, options: StoreOptions) -> None:
    """Log that an embedding will begin empty, if there are rows of the same tables by another dtype alone.

    named: what the embedding is called for rows of a dtype.
    """
    own = named(dtype)
    if options.persistent_path is None or options.open == "fresh" or (Path(options.persistent_path) / own).exists():
        return
    for other in (named(one) for one in DTYPES if one != dtype):
        folder = Path(options.persistent_path) / other
        if folder.exists():
            log.warning(
                "embedding %r begins empty, and %s has rows of another dtype: to keep them, copy a snapshot of them to "
                "%s, and load it by embedding_of(table).load_snapshot(name, convert=True)",
                own,
                folder,
                Path(options.persistent_path) / own / "snapshots",
            )
