"""Folds snapshots that nobody asks for any more into one, so that chains stay short and take little disk space.

A prune lets snapshots go that only later snapshots still need. A *run* is a sequence of such snapshots, each the parent
of the next one. Folding merges a run into the run's last snapshot, which keeps its name and id. So its child still
finds its parent. Sizes decide what is merged, as in an LSM tree's size-tiered compaction: a row is written again only
when the rows merged with it have about doubled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from ...engine.durable import atomic_folder, check_exchange
from ..files.format import HashShard, Kind, make_deleted_name
from ..files.reader import Snapshot, read_changes
from ..files.writer import ProgressCallback, RowFiles, write_manifest_file, write_rows
from .linking import remove_snapshot

Run = list[Snapshot]  # from oldest to latest
MAX_UNFOLDED = 7  # how many increments a run may keep
log = logging.getLogger("tierbed")


def plan_folds(retained: list[Snapshot], pinned: Collection[str], final: Collection[str]) -> list[Run]:
    """Choose the runs to fold.

    Args:
        retained: The snapshots that stay after a prune, including the parents of all of them.
        pinned: Names of snapshots that must stay unchanged.
        final: Names of pinned snapshots whose runs will not grow.
    """
    by_name = {snapshot.name: snapshot for snapshot in retained}
    children = Counter(snapshot.manifest.parent.name for snapshot in retained if snapshot.manifest.parent)
    released = {name for name, count in children.items() if count == 1 and name not in pinned}
    folds = []
    for child in retained:
        run, link = Run(), child.manifest.parent
        while child.name not in released and link is not None and link.name in released:
            run.insert(0, by_name[link.name])
            link = run[0].manifest.parent
        folds.append(_choose_members(run, child.name in final))
    return [run for run in folds if len(run) > 1]


def _choose_members(run: Run, is_final: bool) -> Run:
    """Choose the snapshots of a run to fold now. Fewer than two mean that none are folded."""
    sizes = [snapshot.manifest.total_bytes for snapshot in run]
    first = int(bool(run) and run[0].manifest.parent is None)
    if first and 2 * sum(sizes[1:]) >= sizes[0]:
        return run  # merges the full snapshot too
    if is_final:
        return run[first:]
    if len(run) - first <= MAX_UNFOLDED:
        return []
    begin = min(len(run) - 2, first + MAX_UNFOLDED - 1)
    while begin > first and sizes[begin - 1] <= sum(sizes[begin:]):
        begin -= 1
    return run[begin:]


def fold(run: Run, progress: ProgressCallback | None = None) -> bool:
    """Fold a run, and remove all its snapshots except the last one. Returns False and logs why if that is impossible.

    At any moment, each snapshot that is based on the last one has its parents, and reads the same rows. Raises
    SnapshotError if a file is damaged or a snapshot cannot be removed.
    """
    names = ", ".join(repr(snapshot.name) for snapshot in run[:-1])
    try:
        _merge_into_last(run, progress)
    except OSError as error:
        log.warning("snapshots %s stay, because they cannot be folded into %r: %s", names, run[-1].name, error)
        return False
    for snapshot in reversed(run[:-1]):  # after a kill, no snapshot lacks its parent
        remove_snapshot(snapshot.folder)
    log.info("folded snapshots %s into %r", names, run[-1].name)
    return True


def _merge_into_last(run: Run, progress: ProgressCallback | None) -> None:
    """Replace a run's last snapshot by one that holds the whole run's changes. Raises SnapshotError, OSError."""
    last, description, parent = run[-1].manifest, run[-1].description, run[0].manifest.parent
    has_deletions = parent is not None and any(snapshot.manifest.deleted for snapshot in run)
    num_shards = last.num_shards
    shards = [None] if num_shards is None else [HashShard(index, num_shards) for index in range(num_shards)]
    check_exchange(run[-1].folder)
    with atomic_folder(run[-1].folder, overwrite=True) as folder:
        rows, deletions = RowFiles(), RowFiles()
        for shard in shards:
            parts = [Snapshot(snapshot.folder, snapshot.manifest, shard) for snapshot in run]
            written = ((bucket, part) for bucket, part, _ in read_changes(parts) if len(part))
            rows |= write_rows(folder, description, written, progress, shard)
            if has_deletions:  # reads the files again, because memory may not have room for all deleted keys
                keys = ((bucket, part) for bucket, _, part in read_changes(parts))
                deletions |= write_rows(folder, description, keys, progress, shard, make_deleted_name)
        if parent is None:
            run[-1].check_count(sum(file.rows for file in rows.values()))
        kind: Kind = "full" if parent is None else "incremental"
        deleted = sum(file.rows for file in deletions.values())
        files = {**rows, **deletions}
        write_manifest_file(folder, replace(last, kind=kind, parent=parent, deleted=deleted, files=files))
