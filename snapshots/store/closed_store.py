"""Saves and loads the live rows of a closed store, of one process or of ranks: `tierbed snapshot save` and `load`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...engine.durable import remove_folder
from ...engine.errors import SnapshotError, StoreError
from ...engine.row_format import Chunks, RowForm
from ...engine.store.table_counts import FIELD
from ..files.format import OF_THE_MARK, SHARE, Manifest, check_name
from ..files.merging import merge_sorted
from ..files.reader import Snapshot
from ..files.versions import GroupRecord, Instant
from ..files.writer import Progress, Together, write_snapshot
from .all_or_none import OfAll
from .folder import StoreFolder
from .folder_state import (
    RANKS,
    FolderState,
    ShardVersion,
    clean_markers,
    common_version,
    live_in,
    live_of,
    shard_folder,
    stores_recorded_for,
)
from .instants import ClosedStore, rows_of
from .save import SaveSource, save_snapshot_of
from .selection import ALL, LoadReport, Selection, types_of

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB

# files tell how they are read; only a run with the options of their making should merge them
_AS_IS = "disable_auto_compactions=true"


def mark_of_ranks(state: FolderState) -> dict[str, Any] | None:
    """One mark for the shares of ranks, as of a table that has all their rows; None where they are not whole.

    It lacks `rows` where other hosts have some of the shares. Raises StoreError.
    """
    record = state.keeper.of_ranks
    if record is None:
        return None
    marks = clean_markers(state.path, record.ranks)
    if common_version(record, live_of(marks, record.ranks).values()) is None:
        return None
    found = [mark for mark in marks.values() if mark is not None]
    common = {field: value for field, value in found[0].items() if field not in (SHARE, "rows", "shards", FIELD)}
    return common | ({"rows": sum(mark["rows"] for mark in found)} if len(found) == record.ranks else {})


@contextmanager
def held_ranks(store: StoreFolder) -> Iterator[tuple[ShardVersion, dict[str, Any], Chunks]]:
    """What the shares have in common, one mark for them, and their rows in order, while this process holds them all.

    Raises StoreError where they are not whole, or not all here.
    """
    record = store.keeper.of_ranks
    assert record is not None
    with ExitStack() as holding:
        places = (shard_folder(store.path, rank, record.ranks) for rank in range(record.ranks))
        shares = [holding.enter_context(StoreFolder(place)) for place in places if place.is_dir()]
        mark = mark_of_ranks(store)
        if mark is None or "rows" not in mark:
            raise StoreError(
                f"the live rows of {str(store.path)!r} are those of {record.ranks} ranks, which did not all close "
                "them, or are not all on this host. Open the embedding with as many ranks, or load a snapshot with "
                "`tierbed snapshot load`"
            )
        marks = [share.read_mark() or {} for share in shares]
        live = live_in(marks[0], 0, record.ranks)
        assert live is not None
        rows = [holding.enter_context(live_rows(*pair)) for pair in zip(shares, marks, strict=True)]
        yield live, mark, merge_sorted(rows)


def save_closed(
    store: StoreFolder,
    name: str,
    progress: Progress | None = None,
    kind: str = "full",
    overwrite: bool = False,
    of_all: OfAll | None = None,
) -> Manifest:
    """Write the live rows of a closed store, also those of ranks, as snapshot `name`. The live rows stay as they are.

    Raises StoreError if the store carries no mark, SnapshotError and OptionError as `save_snapshot_of` does.
    """
    check_name(name)
    if store.read_mark() is not None or store.keeper.of_ranks is None:
        with held_live(store, of_all) as held:
            return save_snapshot_of(store, name, kind, held, progress, overwrite)
    with held_ranks(store) as (live, mark, chunks):
        together, record = together_with(store, of_all)
        held = SaveSource(described(mark), mark["rows"], lambda: chunks, together=together, record=record)
        manifest = save_snapshot_of(store.keeper, name, kind, held, progress, overwrite)
        store.keeper.note_saved(live.writes)
    return manifest


@contextmanager
def held_live(store: StoreFolder, of_all: OfAll | None) -> Iterator[SaveSource]:
    """The live rows of a store that was closed cleanly, to be saved. Raises StoreError if it carries no mark."""
    _check_whole(store)
    mark = marked(store)
    together, record = together_with(store, of_all)
    with _live(store, mark) as (scan, tier):
        yield SaveSource(described(mark), mark["rows"], scan, tier, together=together, record=record)


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
    from ...engine.options.store_options import options_text  # only where it holds the rows
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
    others = [] if store.live.exists() else stores_recorded_for(store.snapshots)
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
            f"its own: give {str(shard_folder(store.path, 0, record.ranks))!r} or another, or a snapshot"
        )
    if mark is None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are not consistent: the last process did not close the embedding. "
            "Load a snapshot with `tierbed snapshot load`, or open and close the embedding, which goes back to the "
            "snapshot that it saved or loaded last"
        )
    return mark
