"""Readers and writers of snapshots with OneFlow's signatures, which take the store folder in a list."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..engine.checks import checked_arguments
from ..engine.errors import OptionError
from ..snapshots import exchange

if TYPE_CHECKING:
    from ..snapshots.exchange.persistent_table import PersistentTableReader, PersistentTableWriter

AnyPath = str | os.PathLike[str]


@checked_arguments()
def make_persistent_table_reader(
    paths: Sequence[AnyPath] | AnyPath,
    snapshot_name: str,
    key_type: torch.dtype,
    value_type: torch.dtype,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    table_ids: bool = False,
) -> PersistentTableReader:
    """Read a snapshot as chunks of (keys [n] of `key_type`, values float32 [n, storage_dim]), arrays of NumPy.

    paths: the store folder, `<persistent_path>/<embedding name>`, by itself or as the one item of a list. The other
    arguments and errors are those of `tierbed.snapshots.exchange.make_persistent_table_reader`; OptionError for paths
    that are not one store folder.
    """
    return exchange.make_persistent_table_reader(
        _store_folder(paths),
        snapshot_name,
        key_type,
        value_type,
        storage_dim,
        physical_block_size,
        table_ids=table_ids,
    )


@checked_arguments()
def make_persistent_table_writer(
    paths: Sequence[AnyPath] | AnyPath,
    snapshot_name: str,
    key_type: torch.dtype,
    value_type: torch.dtype,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    description: Mapping[str, Any] | None = None,
) -> PersistentTableWriter:
    """A writer of snapshot `snapshot_name`, which takes rows as NumPy arrays.

    paths: the store folder, `<persistent_path>/<embedding name>`, by itself or as the one item of a list. The other
    arguments and errors are those of `tierbed.snapshots.exchange.make_persistent_table_writer`; OptionError for paths
    that are not one store folder.
    """
    return exchange.make_persistent_table_writer(
        _store_folder(paths),
        snapshot_name,
        key_type,
        value_type,
        storage_dim,
        physical_block_size,
        description=description,
    )


def _store_folder(paths: Any) -> Path:
    """The one store folder of `paths`; OneFlow has a list with a folder for each rank. Raises OptionError."""
    given = list(paths) if isinstance(paths, (list, tuple)) else [paths]
    if len(given) != 1 or not isinstance(given[0], (str, os.PathLike)):
        raise OptionError(
            f"paths={paths!r}: an embedding has one store folder; give [<persistent_path>/<embedding name>]"
        )
    folder = Path(given[0])
    if re.fullmatch(r"\d+-\d+", folder.name) and not folder.exists():
        raise OptionError(
            f"paths={paths!r}: there is no folder {folder.name!r}, which is OneFlow's name for the folder of a rank; "
            "give [<persistent_path>/<embedding name>]"
        )
    return folder
