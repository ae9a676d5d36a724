"""The file CHANGED in a store folder: the keys of rows that changed since the snapshot that was saved or loaded last.

A clean close writes the file, so that the next run's first incremental snapshot need not compare all rows with its
parent. The file contains row keys with dtype ROW_KEY_DTYPE. A field of the clean marker names the parent and has the
file's checksum. So the file is used only with the live rows for which it was written.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ...engine.checksum import crc32
from ...engine.durable import write_atomically
from ...engine.row_format import ROW_KEY_DTYPE, RowArray
from ..files.format import CHANGED_KEYS
from .folder_state import FolderState

FILE = "CHANGED"
CONSEQUENCE = "the next incremental snapshot compares all rows with its parent"
log = logging.getLogger("tierbed")


def write_changed_keys(folder: FolderState, parent_id: str, keys: RowArray) -> dict[str, Any]:
    """Durably write the file. Returns the field for the clean marker; no field if the file cannot be written."""
    data, path = keys.view(np.uint8).data, folder.path / FILE
    try:
        write_atomically(path, data)
    except OSError as error:  # as on a full disk, where the store can still be closed
        log.warning("%r cannot be written: %s; %s", str(path), error, CONSEQUENCE)
        return {}
    return {CHANGED_KEYS: {"parent": parent_id, "rows": len(keys), "crc32": crc32(data)}}


def read_changed_keys(folder: FolderState, marker: dict[str, Any]) -> tuple[str, RowArray] | None:
    """Returns the parent's id and the keys [n] of rows that changed since; None if they are unknown."""
    match marker.get(CHANGED_KEYS):
        case {"parent": str(parent_id), "rows": int(rows), "crc32": int(checksum)}:
            pass
        case _:
            return None
    path = folder.path / FILE
    try:
        keys = np.fromfile(path, ROW_KEY_DTYPE)
    except OSError as error:
        problem = f"cannot be read: {error}"
    else:
        if len(keys) == rows and crc32(keys.view(np.uint8).data) == checksum:
            return parent_id, keys
        problem = "does not belong to these live rows, or is damaged"
    log.warning("%r %s; %s", str(path), problem, CONSEQUENCE)
    return None
