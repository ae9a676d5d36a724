"""Snapshots: every row of an embedding with its optimizer state, in checksummed files that NumPy can read."""

from __future__ import annotations

from ..engine.errors import SnapshotError
from .files.format import Manifest, check_name
from .files.reader import Listing, Snapshot, latest_snapshot, list_snapshots
from .files.writer import write_incremental, write_snapshot

__all__ = [
    "Listing",
    "Manifest",
    "Snapshot",
    "SnapshotError",
    "check_name",
    "latest_snapshot",
    "list_snapshots",
    "write_incremental",
    "write_snapshot",
]
