"""Between the live rows of a closed store and its snapshots: what `tierbed snapshot save` and `load` do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ..engine.errors import SnapshotError, StoreError
from ..engine.store.contract import Chunks
from ..engine.store.folder import StoreFolder
from .format import Manifest, check_name
from .reader import Snapshot
from .writer import write_snapshot

Progress = Callable[[int], None]

OF_THE_MARK = ("live", "rows", "shards")  # what a mark says beside the description of a snapshot


def save_live(store: StoreFolder, name: str, progress: Progress | None = None) -> Manifest:
    """Write the live rows of a store that was closed cleanly as snapshot `name`. The live rows stay as they are.

    Raises StoreError if the store carries no mark, SnapshotError as `write_snapshot` does.
    """
    check_name(name)
    mark = store.read_mark()
    if mark is None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are not consistent: the last process did not close the embedding. "
            "Load a snapshot with `tierbed snapshot load`, or open and close the embedding, which goes back to the "
            "snapshot that it saved or loaded last"
        )
    description = {field: value for field, value in mark.items() if field not in OF_THE_MARK}
    with live_rows(store, mark) as chunks:
        return write_based_snapshot(store, name, description, chunks, progress)


def write_based_snapshot(
    store: StoreFolder, name: str, description: dict[str, Any], chunks: Chunks, progress: Progress | None = None
) -> Manifest:
    """`write_snapshot` of the live rows as `name`: once it is there, they go back to it after a kill."""
    place = store.snapshots / name
    if not os.path.lexists(place):
        store.expect_base(name)
    return write_snapshot(place, description, chunks, progress)


def load_live(store: StoreFolder, snapshot: Snapshot, progress: Progress | None = None) -> None:
    """Make the rows of a snapshot the live rows, so that the next training run resumes from it; checked while copied.

    Raises SnapshotError, with live rows that carry a mark as they were, if the snapshot is damaged or of another table.
    A process killed here leaves the old live rows or the new ones.
    """
    mark = store.read_mark()
    for field in ("key_type", "dtype", "columns"):
        if mark is not None and mark.get(field) != snapshot.description[field]:
            raise SnapshotError(
                f"snapshot {snapshot.name!r} is of another table than the rows in {str(store.path)!r}: its {field} "
                f"is {snapshot.description[field]!r}, theirs {mark.get(field)!r}. Load it in the store it came from"
            )
    if mark is None:
        store.discard_live()  # makes room: no run uses these rows again
    write_snapshot(store.incoming, snapshot.description, snapshot.chunks(), progress)
    description = {**snapshot.description, "live": "rows", "rows": snapshot.manifest.rows}
    store.replace_live(store.incoming, description)
    store.set_base(snapshot.name)


@contextmanager
def live_rows(store: StoreFolder, mark: dict[str, Any]) -> Iterator[Chunks]:
    """The live rows that a mark describes, as `Tier.scan` yields them. Raises SnapshotError, StoreError."""
    if mark.get("live") == "rows":
        yield Snapshot.open(store.live).chunks()
    elif mark.get("live") == "rocksdb":
        from ..engine.store.rocksdb import RocksDB  # only where it holds the rows

        # a file says how it is read; merging files is for a run that has the options they were made with
        as_is = "disable_auto_compactions=true"
        with closing(RocksDB(store.live, mark["width"], mark["shards"], options=as_is)) as tier:
            yield tier.scan()
    else:
        raise StoreError(f"the mark of {str(store.path)!r} has an unknown live={mark.get('live')!r}: upgrade tierbed")


def existing_store(path: Path) -> Path:
    """The path, if there is a store. Raises StoreError otherwise: a mistyped path must not become one."""
    if not (os.path.isfile(path / "LOCK") or os.path.isdir(path / "snapshots")):
        raise StoreError(f"{str(path)!r} is no store folder: give <persistent_path>/<embedding name>")
    return path
