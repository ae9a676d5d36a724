"""Rows in the files of a serving folder, and trained embeddings to publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.small_snapshots import chunked, description, make_rows
from tierbed import MultiTableEmbedding
from tierbed.engine.row_format import EMBEDDING
from tierbed.serving import ServingFolder, Version
from tierbed.serving.row_file import RowFile, hash_rows
from tierbed.snapshots import Manifest, Snapshot, write_snapshot

Rows = dict[tuple[str, int, int], bytes]  # embedding, table and hash: the encoded row


def rows_of(folder: Path, version: Version | None = None) -> Rows:
    """What lookups in a version find; by default in the one that readers take."""
    opened = ServingFolder(folder)
    version = version or opened.read_version(opened.read_current().version)
    rows: Rows = {}
    for embedding in version.embeddings:
        for number, table in enumerate(embedding.tables):
            for file in table.files:
                counts = [0, 0]
                for hashes, encoded, is_deleted in RowFile(opened.find_file(file)).pieces():
                    for hash, row, gone in zip(hashes.tolist(), encoded, is_deleted.tolist(), strict=True):
                        rows[embedding.name, number, hash] = row.tobytes()
                        counts[gone] += 1
                        if gone:
                            del rows[embedding.name, number, hash]
                assert counts == [file.rows, file.deleted]
    return rows


def rows_in(snapshot: Snapshot) -> Rows:
    """A snapshot's rows, as float32."""
    rows: Rows = {}
    for _, chunk in snapshot.chunks():
        values = np.ascontiguousarray(snapshot.manifest.row_format.values(chunk, EMBEDDING))
        for table, key, row in zip(chunk["table"].tolist(), chunk["key"], values, strict=True):
            hash = hash_rows(table, np.array([key], np.uint64))
            rows[snapshot.description["name"], table, int(hash[0])] = row.tobytes()
    return rows


def snapshot_of(embedding: MultiTableEmbedding, path: Path, name: str) -> Snapshot:
    """A snapshot in a store below `path`."""
    return Snapshot.open(path / embedding.name / "snapshots" / name)


def save_finite(folder: Path, count: int, width: int = 6, **changes: Any) -> Manifest:
    """A full snapshot of rows without NaN and infinities."""
    rows = make_rows(width, count)
    rows["values"] = np.random.default_rng(0).normal(size=rows["values"].shape)
    described = description(width, **changes)
    rows["step"] = np.minimum(rows["step"], described["step"])
    return write_snapshot(folder, described, chunked(by_bucket(rows)))


def by_bucket(rows: NDArray[np.void]) -> dict[int, NDArray[np.void]]:
    from tierbed.engine import _core

    buckets = _core.buckets(rows["table"].copy(), rows["key"].copy())
    return {bucket: rows[buckets == bucket] for bucket in np.unique(buckets).tolist()}
