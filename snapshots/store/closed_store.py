"""Saves, loads and compacts closed stores, of one process or of ranks, for `tierbed snapshot` and `tierbed store`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...engine.durable import remove_folder, temporary_path
from ...engine.errors import SnapshotError, StoreError
from ...engine.row_format import Chunks, RowForm
from ...engine.store.table_counts import FIELD
from ..files.format import FILES, LIVE, MARKER_FIELDS, SHARE, Manifest, check_name, snapshot_id
from ..files.merging import merge_sorted
from ..files.reader import Snapshot
from ..files.writer import NewSnapshots, ProgressCallback, finish, write_snapshot
from .folder import StoreFolder
from .folder_state import RANKS, FolderState, clean_markers, shard_folder, shards_in, stores_recorded_for
from .group import Member, loading, open_store, saved
from .mark import live_version
from .recovery_rule import EMPTY
from .retention import drop_replaced
from .save import SaveSource, begin_save, check_save, write_part
from .selection import ALL, LoadReport, Selection, types_of

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB

# files store how to read them, but only a run with the options of the store should merge them
_AS_IS = "disable_auto_compactions=true"


def merged_clean_marker(state: FolderState) -> dict[str, Any] | None:
    """The clean marker of all shards of ranks, as for one table with all their rows; None if they are not all clean.

    It lacks `rows` if other hosts have some of the shards. Raises StoreError.
    """
    markers = clean_markers(state.path, state.ranks)
    found = [marker for marker in markers.values() if marker is not None]
    if len(found) < len(markers) or len({live_version(marker) for marker in found}) != 1:
        return None
    common = {field: value for field, value in found[0].items() if field not in (SHARE, "rows", "shards", FIELD, FILES)}
    return common | ({"rows": sum(marker["rows"] for marker in found)} if len(found) == state.ranks else {})


def _locked_shards(store: StoreFolder, locks: ExitStack) -> tuple[dict[str, Any], Chunks]:
    """The merged clean marker of the shards, which are locked, and their rows. StoreError."""
    ranks = store.ranks
    shards = [locks.enter_context(StoreFolder(shard.path)) for shard in shards_in(store.path, ranks).values()]
    marker = merged_clean_marker(store)
    if marker is None or "rows" not in marker:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are shards of {ranks} ranks, which were not all closed "
            "or are not all on this host. Open the embedding with that many ranks, or load a snapshot with "
            "`tierbed snapshot load`"
        )
    rows = [locks.enter_context(scan_live_rows(shard, shard.clean_marker or {})) for shard in shards]
    return marker, merge_sorted(rows)


def save_closed_stores(
    stores: Sequence[StoreFolder],
    name: str,
    progress: ProgressCallback | None = None,
    kind: str = "full",
    overwrite: bool = False,
) -> list[Manifest]:
    """Write the live rows of closed stores, also of ranks, as snapshot `name` of each. The live rows are unchanged.

    An incremental one of several is full in a store that has no parent for it. Raises StoreError if a store has no
    clean marker, SnapshotError and OptionError as `check_save` and `begin_save`.
    """
    check_name(name)
    manifests, new_ids = [], {}
    with ExitStack() as closing_all, NewSnapshots() as new:
        for store in stores:
            member = open_store(store, "resume")
            closing_all.callback(member.leave)
            source = _source(store, member, new.new_id(), closing_all)
            its_kind = kind
            if kind == "incremental" and len(stores) > 1 and source.parent == EMPTY:
                its_kind = "full"
            capture = member.capture()
            check_save(store.snapshot_store, name, its_kind, source, overwrite)
            folder, parent = begin_save(store.snapshot_store, name, its_kind, source, overwrite, new)
            part = write_part(folder, its_kind, source, parent, progress)
            place = temporary_path(folder)
            manifests.append(finish(place, source.description, *part, parent=parent, id=source.id))
            new_ids[capture] = manifests[-1].id
        new.then(lambda: saved(new_ids))
        new.put_in_place()
    for store in stores:
        drop_replaced(store.snapshot_store)
    return manifests


def _source(store: StoreFolder, member: Member, id: str, reading: ExitStack) -> SaveSource:
    """The live rows of a store that was closed cleanly, to be saved. Raises StoreError if it has no clean marker."""
    if store.path.parent.name == RANKS:
        place = str(store.path.parent.parent)
        raise StoreError(f"{str(store.path)!r} has only the shard of one rank: give the store folder, {place!r}")
    if store.ranks:
        marker, chunks = _locked_shards(store, reading)
        scan, tier = (lambda: chunks), None
    else:
        marker = require_clean_marker(store)
        scan, tier = reading.enter_context(_live(store, marker))
    if member.entry.live is None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are later than those of embeddings that are trained together "
            "with it, and recovery rolls back to its snapshot: load that, or open and close the embeddings"
        )
    return SaveSource(described(marker), marker["rows"], scan, member.group.record, member.id, tier, id=id)


def load_into_stores(
    stores: Sequence[StoreFolder],
    snapshots: Sequence[Snapshot],
    progress: ProgressCallback | None = None,
    selection: Selection = ALL,
) -> list[tuple[Manifest, LoadReport]]:
    """Verify the rows of snapshots and make them the live rows, from which the next training run resumes.

    Recovery rolls back to these snapshots, unless only a selection of rows or converted numbers are loaded. Returns the
    manifests of the new live rows. A kill leaves the old live rows of all stores, or the new ones. Raises SnapshotError
    if a snapshot is damaged, of another table, or of another dtype without `convert`; clean live rows are unchanged
    then. Raises StoreError for a folder that has only the snapshots of other store folders.
    """
    both = [*zip(stores, snapshots, strict=True)]
    selections = [check_load(store, snapshot, selection) for store, snapshot in both]
    made = []
    with ExitStack() as ending:
        members = []
        for store in stores:
            members.append(open_store(store, "resume", for_load=True))
            ending.callback(members[-1].leave)
        for (store, snapshot), selected in zip(both, selections, strict=True):
            if store.clean_marker is None:
                store.discard_live()  # frees space: no run uses these rows again
            ending.callback(remove_folder, store.incoming)  # missing once it has replaced the live rows
            report = LoadReport()
            chosen = selected.rows_of(snapshot, report, progress)
            description = selected.description(snapshot.description)
            made.append((write_snapshot(store.incoming, description, chosen), report))
        wholes = [m for m, one in zip(members, selections, strict=True) if one.is_whole]
        ids = {member: snapshot.manifest.id for member, snapshot in zip(members, snapshots, strict=True)}
        with loading({member: ids[member] for member in wholes}) if wholes else nullcontext():
            for store, member, (manifest, _) in zip(stores, members, made, strict=True):
                if member not in wholes:
                    member.begin_change(replaces=True)
                    member.write()
                if member.home is not store:
                    member.copy_to(store)
                version = f"{ids[member]}:0" if member in wholes else member.version
                marker = {**manifest.description, "live": "rows", "rows": manifest.rows, LIVE: version}
                store.replace_live(store.incoming, marker)
                if member in wholes:
                    member.replaced(ids[member])
                member.move_to(store)
        for member in members:
            member.closed(member.version)
    return made


def check_load(store: StoreFolder, snapshot: Snapshot, selection: Selection) -> Selection:
    """The selection that `load_into_stores` loads, with the types to convert to. Raises its errors that need no row."""
    marker = store.clean_marker
    others = [] if store.live.exists() else stores_recorded_for(store.snapshots)
    if others:
        raise StoreError(
            f"{str(store.path)!r} has only the snapshots of other store folders, and no live rows: give the store "
            f"folder, {' or '.join(repr(str(other)) for other in others)}, on the host that has it"
        )
    if marker is None:
        if selection.convert:
            raise SnapshotError(
                f"convert=True: {str(store.path)!r} has no clean live rows, so their dtype is unknown; load the "
                "snapshot without it"
            )
        return selection
    for field in ("key_type", "columns"):
        if marker.get(field) != snapshot.description[field]:
            raise SnapshotError(
                f"snapshot {snapshot.name!r} is of another table than the rows in {str(store.path)!r}: its {field} "
                f"is {snapshot.description[field]!r} instead of {marker.get(field)!r}. Load it into the store that it "
                "was saved from"
            )
    ours, theirs = types_of(marker), types_of(selection.description(snapshot.description))
    of_states = theirs[1] if None in (ours[1], theirs[1]) else ours[1]  # rows without states accept any
    if (ours[0], of_states) == theirs:
        return selection
    if not selection.convert:
        raise SnapshotError(
            f"snapshot {snapshot.name!r} is of rows of dtype {_describe_types(theirs)}, and the rows in "
            f"{str(store.path)!r} are of {_describe_types(ours)}. Convert them: convert=True (--convert in a shell), "
            "load_snapshot(name, convert=True) of the embedding, or import_snapshot with dtype= (--dtype in a shell)"
        )
    return replace(selection, types=(ours[0], of_states or "float32"))


def _describe_types(types: tuple[str, str | None]) -> str:
    dtype, of_states = types
    return dtype if of_states is None else f"{dtype} with states of {of_states}"


def compact_live(store: StoreFolder, options: str = "") -> tuple[int, int] | None:
    """Merge the RocksDB files of a closed store. Returns their bytes before and after; None if it has none.

    options: the store's `rocksdb_options`. A kill loses no row. Raises StoreError, OptionError.
    """
    marker = require_clean_marker(store)
    if marker["live"] != "rocksdb":
        return None
    from ...engine.options.rocksdb_options import options_text  # only if it has the rows
    from ...engine.store.rocksdb import RocksDB  # only if it has the rows

    def file_bytes() -> int:
        return sum(file.stat().st_size for file in store.live.glob("shard-*/*.sst"))

    before = file_bytes()
    with closing(RocksDB(store.live, marker["width"], marker["shards"], options=options_text(options))) as tier:
        check_live(store, marker, tier)
        tier.compact()
    return before, file_bytes()


@contextmanager
def scan_live_rows(store: StoreFolder, marker: dict[str, Any]) -> Iterator[Chunks]:
    """The live rows of a clean marker, as `Tier.scan` yields them. Raises SnapshotError, StoreError."""
    with _live(store, marker) as (scan, _):
        yield scan()


@contextmanager
def _live(store: StoreFolder, marker: dict[str, Any]) -> Iterator[tuple[Callable[[], Chunks], RocksDB | None]]:
    """A scan of the live rows, and their RocksDB if they have one."""
    if marker.get("live") == "rows":
        snapshot = Snapshot.open(store.live)
        check_live(store, marker)
        yield snapshot.chunks, None
    elif marker.get("live") == "rocksdb":
        from ...engine.store.rocksdb import RocksDB  # only if it has the rows

        with closing(RocksDB(store.live, marker["width"], marker["shards"], options=_AS_IS)) as tier:
            check_live(store, marker, tier)
            yield lambda: RowForm.described(marker).of_words(tier.scan()), tier
    else:
        raise StoreError(f"MARK of {str(store.path)!r} has an unknown live={marker.get('live')!r}: upgrade tierbed")


def check_live(store: FolderState, marker: Mapping[str, Any], tier: RocksDB | None = None) -> None:
    """Raises StoreError if the live rows are not those of the last close: a file was cut or replaced.

    RocksDB opens such files without an error. Stores that an earlier version closed are not checked.
    """
    noted, found = marker.get(FILES), snapshot_id(store.live) if tier is None else tier.versions()
    if noted in (None, found):
        return
    wrong = [""]
    if isinstance(noted, list) and isinstance(found, list):
        wrong = [f"/shard-{shard}" for shard, version in enumerate(found) if version not in noted[shard : shard + 1]]
    raise StoreError(
        f"{store.live}{wrong[0]} does not have the rows of the last close: a file in it was cut, or is of another "
        "time; load the last snapshot"
    )


def described(marker: dict[str, Any]) -> dict[str, Any]:
    """The description in a clean marker, as a snapshot has it."""
    return {field: value for field, value in marker.items() if field not in MARKER_FIELDS}


def require_clean_marker(store: StoreFolder) -> dict[str, Any]:
    """The clean marker of a store. Raises StoreError if it has none."""
    marker = store.clean_marker
    if store.ranks:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are shards of {store.ranks} ranks, each in its own store folder: "
            f"give {str(shard_folder(store.path, 0, store.ranks))!r} or another, or a snapshot"
        )
    if marker is None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are not clean: the last process did not close the embedding. Load "
            "a snapshot with `tierbed snapshot load`, or open and close the embedding, which recovers from the "
            "snapshot that was saved or loaded last"
        )
    return marker
