"""Saves, loads and compacts stores that no process has open, for `tierbed snapshot` and `tierbed store`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...engine.durable import make_temporary_path, remove_folder
from ...engine.errors import SnapshotError, StoreError
from ...engine.row_format import Chunks, RowFormat
from ...engine.store.merging import merge_sorted
from ...engine.store.table_counts import TABLE_ROWS
from ..files.format import LIVE_FILES, LIVE_VERSION, MARKER_FIELDS, SHARD_FIELD, Manifest, check_name, read_snapshot_id
from ..files.reader import Snapshot
from ..files.writer import NewSnapshots, ProgressCallback, write_manifest, write_snapshot
from .folder import StoreFolder
from .folder_state import RANKS, FolderState, find_shards, locate_shard, read_clean_markers, read_linked_stores
from .group import Member, open_store, record_load, record_save
from .mark import read_live_version
from .recovery_rule import EMPTY_ID, make_snapshot_version
from .retention import remove_backups
from .save import SaveInputs, begin_save, check_save, write_files
from .selection import ALL, LoadReport, Selection, read_dtypes

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB

# Without the store's options, RocksDB can read the store's files, but must not compact them.
_AS_IS = "disable_auto_compactions=true"


def merge_clean_markers(store: FolderState) -> dict[str, Any] | None:
    """Merge the clean markers of a store's shards into one marker. Raises StoreError.

    Returns None if a shard is not clean. The merged marker lacks the field `rows` if some shards are on other hosts.
    """
    markers = read_clean_markers(store.path, store.num_ranks)
    clean = [marker for marker in markers.values() if marker is not None]
    if len(clean) < len(markers) or len({read_live_version(marker) for marker in clean}) != 1:
        return None
    common = {
        x: value for x, value in clean[0].items() if x not in (SHARD_FIELD, "rows", "shards", TABLE_ROWS, LIVE_FILES)
    }
    return common | ({"rows": sum(marker["rows"] for marker in clean)} if len(clean) == store.num_ranks else {})


def _lock_shards(store: StoreFolder, locks: ExitStack) -> tuple[dict[str, Any], Chunks]:
    """Lock a store's shards. Returns the shards' merged clean marker and their rows. Raises StoreError."""
    ranks = store.num_ranks
    shards = [locks.enter_context(StoreFolder(shard.path)) for shard in find_shards(store.path, ranks).values()]
    marker = merge_clean_markers(store)
    if marker is None or "rows" not in marker:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are shards of {ranks} ranks, and some shards were not closed "
            "or are not on this host. Open the embedding with that many ranks, or load a snapshot with "
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
    """Save the live rows of closed stores as snapshot `name` in each store. The live rows do not change.

    If several stores are saved incrementally, stores without a parent get a full snapshot. Raises StoreError if a
    store is not clean. Raises SnapshotError and OptionError like `check_save` and `begin_save`.
    """
    check_name(name)
    manifests, new_ids = [], {}
    with ExitStack() as open_stores, NewSnapshots() as new:
        for store in stores:
            member = open_store(store, "resume")
            open_stores.callback(member.leave)
            inputs = _make_inputs(store, member, new.make_id(), open_stores)
            lacks_parent = kind == "incremental" and len(stores) > 1 and inputs.parent == EMPTY_ID
            store_kind = "full" if lacks_parent else kind
            pending = member.capture()
            check_save(store.snapshot_store, name, store_kind, inputs, overwrite)
            folder, parent = begin_save(store.snapshot_store, name, store_kind, inputs, overwrite, new)
            written = write_files(folder, store_kind, inputs, parent, progress)
            temporary = make_temporary_path(folder)
            manifests.append(write_manifest(temporary, inputs.description, *written, parent=parent, id=inputs.id))
            new_ids[pending] = manifests[-1].id
        new.call_after_publish(lambda: record_save(new_ids))
        new.publish()
    for store in stores:
        remove_backups(store.snapshot_store)
    return manifests


def _make_inputs(store: StoreFolder, member: Member, id: str, reading: ExitStack) -> SaveInputs:
    """Returns a closed store's live rows, ready to be saved. Raises StoreError if the live rows are not clean."""
    if store.path.parent.name == RANKS:
        store_folder = str(store.path.parent.parent)
        raise StoreError(f"{str(store.path)!r} has only one rank's shard: give the store folder, {store_folder!r}")
    if store.num_ranks:
        marker, chunks = _lock_shards(store, reading)
        scan, tier = (lambda: chunks), None
    else:
        marker = require_clean_marker(store)
        scan, tier = reading.enter_context(_open_live(store, marker))
    if member.entry.live_version is None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are newer than the rows of other embeddings in its group. Recovery "
            "will use a snapshot instead. Load that snapshot, or open and close all embeddings of the group"
        )
    return SaveInputs(make_description(marker), marker["rows"], scan, member.group.record, member.id, tier, id=id)


def load_into_stores(
    stores: Sequence[StoreFolder],
    snapshots: Sequence[Snapshot],
    progress: ProgressCallback | None = None,
    selection: Selection = ALL,
) -> list[tuple[Manifest, LoadReport]]:
    """Verify snapshots, and make their rows the live rows that the next training run starts with.

    If the next run is killed, recovery returns to the loaded snapshots, except if the load selected or converted rows.
    If this call is killed, either all stores keep their old live rows or all get new rows. Returns the manifests of the
    new live rows. Raises StoreError if a folder contains only other stores' snapshots, and SnapshotError if a snapshot
    is damaged, belongs to another table, or needs `convert`. An error leaves clean live rows unchanged.
    """
    pairs = [*zip(stores, snapshots, strict=True)]
    selections = [check_load(store, snapshot, selection) for store, snapshot in pairs]
    results = []
    with ExitStack() as cleanup:
        members = []
        for store in stores:
            members.append(open_store(store, "resume", for_load=True))
            cleanup.callback(members[-1].leave)
        for (store, snapshot), choice in zip(pairs, selections, strict=True):
            if store.clean_marker is None:
                store.discard_live_rows()  # frees the space of unclean live rows, which no run would use
            cleanup.callback(remove_folder, store.incoming)  # after a successful load, the folder no longer exists
            report = LoadReport()
            rows = choice.read_rows(snapshot, report, progress)
            results.append((write_snapshot(store.incoming, choice.describe(snapshot.description), rows), report))
        whole_loads = [member for member, choice in zip(members, selections, strict=True) if choice.is_whole]
        ids = {member: snapshot.manifest.id for member, snapshot in zip(members, snapshots, strict=True)}
        with record_load({member: ids[member] for member in whole_loads}) if whole_loads else nullcontext():
            for store, member, (manifest, _) in zip(stores, members, results, strict=True):
                if member not in whole_loads:
                    member.begin_change(replaces=True)
                    member.count_write()
                if member.mark_folder is not store:
                    member.copy_to(store)
                version = make_snapshot_version(ids[member]) if member in whole_loads else member.version
                marker = {**manifest.description, "live": "rows", "rows": manifest.rows, LIVE_VERSION: version}
                store.replace_live_rows(store.incoming, marker)
                if member in whole_loads:
                    member.mark_replaced(ids[member])
                member.move_to(store)
        for member in members:
            member.mark_closed(member.version)
    return results


def check_load(store: StoreFolder, snapshot: Snapshot, selection: Selection) -> Selection:
    """Check a load, but read no rows. Adds dtypes to `selection`. Raises StoreError, SnapshotError."""
    marker = store.clean_marker
    linked_stores = [] if store.live_path.exists() else read_linked_stores(store.snapshots_path)
    if linked_stores:
        raise StoreError(
            f"{str(store.path)!r} contains only the snapshots of other store folders, and no live rows. Give a folder "
            f"with live rows: {' or '.join(repr(str(path)) for path in linked_stores)}. It may be on another host"
        )
    if marker is None:
        if selection.converts:
            raise SnapshotError(
                f"convert=True: {str(store.path)!r} has no clean live rows, so their dtype is unknown; load the "
                "snapshot without convert"
            )
        return selection
    for field in ("key_type", "columns"):
        if marker.get(field) != snapshot.description[field]:
            raise SnapshotError(
                f"snapshot {snapshot.name!r} contains rows of another table: the snapshot's {field} is "
                f"{snapshot.description[field]!r}, but the {field} in {str(store.path)!r} is {marker.get(field)!r}. "
                "Load the snapshot into the store that saved it"
            )
    store_types, snapshot_types = read_dtypes(marker), read_dtypes(selection.describe(snapshot.description))
    state_type = snapshot_types[1] and (store_types[1] or snapshot_types[1])  # rows without states accept any dtype
    if (store_types[0], state_type) == snapshot_types:
        return selection
    if not selection.converts:
        raise SnapshotError(
            f"snapshot {snapshot.name!r} has rows of dtype {_describe_types(snapshot_types)}, but the rows in "
            f"{str(store.path)!r} are of {_describe_types(store_types)}. To convert rows during a load, use "
            "load_snapshot(name, convert=True) or `tierbed snapshot load --convert`. To convert rows during an import, "
            "use import_snapshot(..., dtype=...) or `tierbed snapshot import --dtype`"
        )
    return replace(selection, target_dtypes=(store_types[0], state_type or "float32"))


def _describe_types(types: tuple[str, str | None]) -> str:
    dtype, state_type = types
    return dtype if state_type is None else f"{dtype} with states of {state_type}"


def compact_live(store: StoreFolder, options: str = "") -> tuple[int, int] | None:
    """Merge a closed store's RocksDB files. Returns the files' total size before and after, or None without files.

    options: the store's `rocksdb_options`. A kill during the merge loses no rows. Raises StoreError, OptionError.
    """
    marker = require_clean_marker(store)
    if marker["live"] != "rocksdb":
        return None
    from ...engine.options.rocksdb_options import format_options  # needs RocksDB
    from ...engine.store.rocksdb import RocksDB

    def sum_file_bytes() -> int:
        return sum(file.stat().st_size for file in store.live_path.glob("shard-*/*.sst"))

    bytes_before = sum_file_bytes()
    with closing(RocksDB(store.live_path, marker["width"], marker["shards"], options=format_options(options))) as tier:
        check_live(store, marker, tier)
        tier.compact()
    return bytes_before, sum_file_bytes()


@contextmanager
def scan_live_rows(store: StoreFolder, marker: dict[str, Any]) -> Iterator[Chunks]:
    """Yield a scan, like `Tier.scan`, of the live rows that `marker` describes. Raises SnapshotError, StoreError."""
    with _open_live(store, marker) as (scan, _):
        yield scan()


@contextmanager
def _open_live(store: StoreFolder, marker: dict[str, Any]) -> Iterator[tuple[Callable[[], Chunks], RocksDB | None]]:
    """Yield (scan, tier). `scan` reads the live rows. `tier` is their RocksDB database; None without RocksDB."""
    if marker.get("live") == "rows":
        snapshot = Snapshot.open(store.live_path)
        check_live(store, marker)
        yield snapshot.chunks, None
    elif marker.get("live") == "rocksdb":
        from ...engine.store.rocksdb import RocksDB  # needs RocksDB

        with closing(RocksDB(store.live_path, marker["width"], marker["shards"], options=_AS_IS)) as tier:
            check_live(store, marker, tier)
            yield lambda: RowFormat.from_description(marker).view_words(tier.scan()), tier
    else:
        raise StoreError(f"MARK in {str(store.path)!r} has an unknown live={marker.get('live')!r}: upgrade tierbed")


def check_live(store: FolderState, marker: Mapping[str, Any], tier: RocksDB | None = None) -> None:
    """Raises StoreError if a file of the live rows was truncated or replaced since the last close.

    RocksDB would open such a file without an error.
    """
    recorded = marker.get(LIVE_FILES)
    present = read_snapshot_id(store.live_path) if tier is None else tier.read_versions()
    if recorded == present:
        return
    suffixes = [""]
    if isinstance(recorded, list) and isinstance(present, list):
        suffixes = [
            f"/shard-{shard}" for shard, version in enumerate(present) if version not in recorded[shard : shard + 1]
        ]
    raise StoreError(
        f"{store.live_path}{suffixes[0]} does not have the rows of the last close: one of its files was truncated or "
        "replaced. Load the last snapshot"
    )


def make_description(marker: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a clean marker that a snapshot's description also has."""
    return {field: value for field, value in marker.items() if field not in MARKER_FIELDS}


def require_clean_marker(store: StoreFolder) -> dict[str, Any]:
    """Returns a store's clean marker. Raises StoreError if the live rows are not clean, or are ranks' shards."""
    marker = store.clean_marker
    if store.num_ranks:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are shards of {store.num_ranks} ranks, each in its own store folder"
            f": give a shard's folder, such as {str(locate_shard(store.path, 0, store.num_ranks))!r}, or a snapshot"
        )
    if marker is None:
        raise StoreError(
            f"the live rows of {str(store.path)!r} are not clean: the last process did not close the embedding. Load "
            "a snapshot with `tierbed snapshot load`; or open and close the embedding to recover its last snapshot"
        )
    return marker
