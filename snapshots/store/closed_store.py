"""Between the live rows of a closed store and its snapshots: what `tierbed snapshot save` and `load` do."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...engine.durable import remove_folder
from ...engine.errors import SnapshotError, StoreError
from ...engine.row_format import Chunks, RowForm
from ..files.format import OF_THE_MARK, Manifest
from ..files.reader import Snapshot
from ..files.versions import GroupRecord, Instant
from ..files.writer import Progress, Together, write_snapshot
from .all_or_none import OfAll
from .converted import types_of
from .folder import StoreFolder
from .folder_state import RANKS, noted, share_folder
from .instants import ClosedStore, rows_of
from .saving import Held
from .selection import ALL, LoadReport, Selection

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB


@contextmanager
def held_live(store: StoreFolder, of_all: OfAll | None) -> Iterator[Held]:
    """The live rows of a store that was closed cleanly, to be saved. Raises StoreError if it carries no mark."""
    _check_whole(store)
    mark = marked(store)
    together, record = together_with(store, of_all)
    with _live(store, mark) as (scan, tier):
        yield Held(described(mark), mark["rows"], scan, tier, together=together, record=record)


def together_with(store: StoreFolder, of_all: OfAll | None) -> tuple[Together | None, GroupRecord | None]:
    """What a snapshot of a closed store's live rows, and its MARK, have of the stores that are trained with it."""
    closed = ClosedStore(store)
    if closed.record is None and of_all is None:
        return None, None
    id, first = (secrets.token_hex(16), None) if of_all is None else of_all.of(store.path)
    return Together(id, closed.saved(id, first), None if of_all is None else of_all.commit), closed.record


def load_live(
    store: StoreFolder,
    snapshot: Snapshot,
    progress: Progress | None = None,
    selection: Selection = ALL,
    together: Instant | None = None,
) -> tuple[Manifest, LoadReport]:
    """Make the rows of a snapshot the live rows, so that the next training run resumes from it. They are checked.

    After a kill, rows go back to the snapshot; a selection of its rows, and one that converts numbers to the dtype of
    the live rows, goes back to the snapshot of before. together: of a load of several stores, the instant to which all
    go. Returns what the live rows are now. A process killed here leaves the old live rows or the new ones. Raises
    SnapshotError if the snapshot is damaged, of another table or, where they are not converted, of other numbers; live
    rows with a mark stay as they were. StoreError for a folder that has the snapshots of other store folders, and no
    live rows.
    """
    selection = check_load(store, snapshot, selection)
    if store.read_mark() is None:
        store.discard_live()  # this makes room: no run uses these rows again
    report = LoadReport()
    chosen = selection.rows_of(snapshot, report, progress)
    description = selection.description(snapshot.description)
    try:
        manifest = write_snapshot(store.incoming, description, chosen)
        base = snapshot.name if selection.is_whole else store.noting.base
        closed = ClosedStore(store)
        rows = rows_of(snapshot) if selection.is_whole else closed.written()
        of_rows, of_group = closed.loaded(rows, together)
        live = {**description, "live": "rows", "rows": manifest.rows, **of_rows}
        store.replace_live(store.incoming, live, base, of_group=of_group)
        store.keeper.end_ranks()
    finally:
        remove_folder(store.incoming)  # not there where the rows were replaced
    return manifest, report


def check_load(store: StoreFolder, snapshot: Snapshot, selection: Selection = ALL) -> Selection:
    """What `load_live` selects of a snapshot, with the types that it converts to. Raises what it raises at once."""
    mark = store.read_mark()
    _check_for_rows(store)
    theirs = snapshot.description
    for field in ("key_type", "columns"):
        if mark is not None and mark.get(field) != theirs[field]:
            raise SnapshotError(
                f"snapshot {snapshot.name!r} is of another table than the rows in {str(store.path)!r}: its {field} "
                f"is {theirs[field]!r}, theirs {mark.get(field)!r}. Load it in the store it came from"
            )
    return _fitting(store, mark, snapshot, selection)


def _fitting(store: StoreFolder, mark: Mapping[str, Any] | None, snapshot: Snapshot, selection: Selection) -> Selection:
    """The selection, with the types of the live rows where numbers are converted. Raises SnapshotError."""
    if mark is None:
        if selection.convert:
            raise SnapshotError(
                f"convert=True: the live rows of {str(store.path)!r} are not there, or not consistent, and do not tell "
                "their dtype; load the snapshot as it is"
            )
        return selection
    ours, theirs = types_of(mark), types_of(selection.description(snapshot.description))
    of_states = theirs[1] if None in (ours[1], theirs[1]) else ours[1]  # rows without states take any
    if (ours[0], of_states) == theirs:
        return selection
    if not selection.convert:
        raise SnapshotError(
            f"snapshot {snapshot.name!r} is of rows of dtype {_said(theirs)}, and the rows in {str(store.path)!r} are "
            f"of {_said(ours)}. Convert them: convert=True (--convert in a shell), load_snapshot(name, convert=True) "
            "of the embedding, or import_snapshot with dtype= (--dtype in a shell)"
        )
    return replace(selection, types=(ours[0], of_states or "float32"))


def _said(types: tuple[str, str | None]) -> str:
    dtype, of_states = types
    return dtype if of_states is None else f"{dtype} with states of {of_states}"


def compact_live(store: StoreFolder, options: str = "") -> tuple[int, int] | None:
    """Merge the RocksDB files of a closed store. Returns their bytes before and after; None for a store without any.

    options: the store's `rocksdb_options`, with which files are written. A kill leaves every row. Raises StoreError,
    OptionError.
    """
    mark = marked(store)
    if mark["live"] != "rocksdb":
        return None
    from ...engine.options.rocksdb_options import options_text  # only where it holds the rows
    from ...engine.store.rocksdb import RocksDB  # only where it holds the rows

    def held() -> int:
        return sum(file.stat().st_size for file in store.live.glob("shard-*/*.sst"))

    before = held()
    with closing(RocksDB(store.live, mark["width"], mark["shards"], options=options_text(options))) as tier:
        tier.compact()
    return before, held()


@contextmanager
def live_rows(store: StoreFolder, mark: dict[str, Any]) -> Iterator[Chunks]:
    """The live rows that a mark describes, as `Tier.scan` yields them. Raises SnapshotError, StoreError."""
    with _live(store, mark) as (scan, _):
        yield scan()


@contextmanager
def _live(store: StoreFolder, mark: dict[str, Any]) -> Iterator[tuple[Callable[[], Chunks], RocksDB | None]]:
    """A scan of the live rows, and what holds them where that is RocksDB."""
    if mark.get("live") == "rows":
        yield Snapshot.open(store.live).chunks, None
    elif mark.get("live") == "rocksdb":
        from ...engine.store.rocksdb import RocksDB  # only where it holds the rows

        with closing(RocksDB(store.live, mark["width"], mark["shards"], options=_AS_IS)) as tier:
            yield lambda: RowForm.described(mark).of_words(tier.scan()), tier
    else:
        raise StoreError(f"the mark of {str(store.path)!r} has an unknown live={mark.get('live')!r}: upgrade tierbed")


def _check_whole(store: StoreFolder) -> None:
    """Raises StoreError for the folder of a rank's share, which has not all rows."""
    if store.path.parent.name == RANKS:
        raise StoreError(
            f"{str(store.path)!r} has the share of one rank alone: give the store folder, "
            f"{str(store.path.parent.parent)!r}"
        )


def _check_for_rows(store: StoreFolder) -> None:
    """Raises StoreError for a folder where no run looks for live rows."""
    others = [] if store.live.exists() else noted(store.snapshots)
    if others:
        raise StoreError(
            f"{str(store.path)!r} has the snapshots of other store folders, and no run looks there for live rows: give "
            f"the store folder, {' or '.join(repr(str(other)) for other in others)}, on the host that has it"
        )


def described(mark: dict[str, Any]) -> dict[str, Any]:
    """The description of the rows in a mark, as a snapshot has it."""
    return {field: value for field, value in mark.items() if field not in OF_THE_MARK}


def marked(store: StoreFolder) -> dict[str, Any]:
    """The mark of a store. Raises StoreError where the live rows carry none."""
    mark = store.read_mark()
    if mark is None and (record := store.keeper.of_ranks) is not None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are in shares of {record.ranks} ranks, each in a store folder of "
            f"its own: give {str(share_folder(store.path, 0, record.ranks))!r} or another, or a snapshot"
        )
    if mark is None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are not consistent: the last process did not close the embedding. "
            "Load a snapshot with `tierbed snapshot load`, or open and close the embedding, which goes back to the "
            "snapshot that it saved or loaded last"
        )
    return mark


# files tell how they are read; only a run with the options of their making should merge them
_AS_IS = "disable_auto_compactions=true"
