"""Publishes snapshots as a version of a serving folder. docs/serving.md says what is read and written when."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from torch import Tensor

from ..engine.checks import check_choice, check_flags, check_int
from ..engine.errors import OptionError, ServingError, SnapshotError
from ..engine.optim.rule import needs_catch_up
from ..engine.options.table_spec import RUN_ID_FIELD
from ..engine.signals import defer_signals
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.group_file import check_one_moment
from ..snapshots.store.selection import Selection
from .folder import MissingVersionError, ServingFolder
from .table_files import NewFiles, merge_base, write_bases, write_deltas
from .version import ENCODINGS, Current, Pending, RowFileEntry, ServedEmbedding, ServedTable, SnapshotEntry, Version

log = logging.getLogger("tierbed")

SnapshotLike = Snapshot | str | os.PathLike[str]
Check = Callable[[Version], object] | Literal[False] | None
_FIXED_FIELDS = ("key_type", "columns", "seed", "padding_idx")  # descriptions in one serving folder agree in these
_MIN_ROWS_LEFT = 0.5  # the smallest share of an embedding's rows that a new version may have


def publish(
    folder: str | os.PathLike[str],
    snapshots: SnapshotLike | Sequence[SnapshotLike],
    encoding: str = "int8",
    tensors: Mapping[str, Tensor] | None = None,
    keep: int = 3,
    check: Check = None,
    rebase: bool = False,
    allow_older: bool = False,
) -> Version:
    """Publish the rows of snapshots, and dense weights, as a new version of a serving folder.

    Readers see the whole version or nothing of it. If a snapshot descends from the last version's, only the increments
    after it are read. A failed publish leaves the last version as it is.

    Args:
        folder: The serving folder. It is created if it does not exist.
        snapshots: A snapshot or the path of its folder; or a list with a snapshot of each embedding, all of one step.
        encoding: How rows are stored: "int8", "float32", "bfloat16" or "float16".
        tensors: Dense weights by name.
        keep: How many versions to keep. The version that readers take is also kept.
        check: Called with the version before readers can see it. If it raises, readers never see the version. False
            skips the comparison of row counts with the last version.
        rebase: True to write all rows again.
        allow_older: True to accept snapshots that are older than the last version's. A trainer that may have gone back
            after a crash needs this.

    Returns:
        The version. After a rollback, readers take it only once the rollback is released.

    Raises:
        OptionError: If an argument is invalid.
        SnapshotError: If a snapshot is damaged, missing or older than the last version's.
        InputError: If a row is not finite or overflows the encoding. The message names table and id.
        ServingError: If the folder is locked, damaged, unwritable or of another model, or a check fails.
    """
    check_choice("encoding", encoding, ENCODINGS)
    check_int("keep", keep, "how many versions to keep, 1 or more", 1)
    check_flags(OptionError, rebase=rebase, allow_older=allow_older)
    opened = _open_snapshots(snapshots)
    target = ServingFolder(folder)
    with target.lock("a publish", create=True):
        target.remove_unnamed()
        latest, current = target.read_latest(), Current(0)
        with suppress(MissingVersionError):
            current = target.read_current()
        _check_same_model(latest, opened)
        if not allow_older:
            _check_not_older(latest, opened)
        number = 1 + max(current.version, latest.version if latest else 0)
        with NewFiles(target, encoding) as files:
            publisher = _Publisher(files, None if rebase else latest, target.read_pending())
            embeddings = tuple(publisher.write_embedding(snapshot) for snapshot in opened)
            dense = None if tensors is None else files.write_tensors(tensors)
            step = max(embedding.snapshot.step for embedding in embeddings)
            version = Version(number, encoding, step, time.time_ns(), dense, embeddings)
            if check is not False:
                _check_row_counts(latest, version)
            if check:
                check(version)
            files.sync()
            with defer_signals():  # a version must not exist without its files
                target.write_version(version)
                files.keep()
        if not current.hold:
            target.write_current(Current(number))
        target.write_pending(_write_bases_of_next(target, version, opened))
        target.remove_old(keep)
    return version


class _Publisher:
    """Writes the row files of a version. latest: the version whose files it may use again."""

    def __init__(self, files: NewFiles, latest: Version | None, pending: Pending) -> None:
        self._files, self._pending = files, pending
        reusable = latest is not None and latest.encoding == files.encoding
        self._latest = {each.name: each for each in latest.embeddings} if latest and reusable else {}
        self._label = f"version {latest.version + 1} of {str(files.folder.path)!r}" if latest else ""

    def write_embedding(self, snapshot: Snapshot) -> ServedEmbedding:
        description = Selection(includes_state=False).describe(dict(snapshot.description))
        chain, old = snapshot.chain, self._latest.get(description["name"])
        ids = [each.manifest.id for each in chain]
        if old and old.snapshot.id in ids and len(old.tables) == len(description["tables"]):
            increments = chain[ids.index(old.snapshot.id) + 1 :]
            tables = write_deltas(self._files, snapshot, increments, self._choose_bases(old))
        else:
            if self._label:
                log.info(
                    "%s has a new base of embedding %r: snapshot %r is no increment of the last version's snapshot",
                    self._label, description["name"], snapshot.name,
                )  # fmt: skip
            tables = [ServedTable(base, None) for base in write_bases(self._files, snapshot)]
        return ServedEmbedding(description["name"], tuple(tables), _describe_snapshot(snapshot), description)

    def _choose_bases(self, old: ServedEmbedding) -> list[ServedTable]:
        """Returns each table's files in the last version, or the base that was written for this version."""
        if self._pending.snapshots.get(old.name) != old.snapshot.id:
            return [*old.tables]
        bases = self._pending.bases[old.name]
        return [old if base is None else ServedTable(base, None) for old, base in zip(old.tables, bases, strict=True)]


def _write_bases_of_next(folder: ServingFolder, version: Version, snapshots: Sequence[Snapshot]) -> Pending:
    """Merge bases and deltas where deltas had as many rows as the base. Readers can already see the version.

    The version is complete without new bases. So if they cannot be written, this logs why, and the next publish tries
    again.
    """
    pending = Pending()
    for embedding, snapshot in zip(version.embeddings, snapshots, strict=True):
        is_due = [table.delta is not None and table.written >= table.base.rows for table in embedding.tables]
        if not any(is_due):
            continue
        bases: list[RowFileEntry | None]
        try:
            with NewFiles(folder, version.encoding) as files:
                if needs_catch_up(
                    snapshot.description["optimizer"]
                ):  # rows that are not in the delta must catch up too
                    bases = [*write_bases(files, snapshot)]
                else:
                    pairs = enumerate(zip(embedding.tables, is_due, strict=True))
                    bases = [merge_base(files, embedding, n, table) if due else None for n, (table, due) in pairs]
                files.sync()
        except (ServingError, SnapshotError) as error:
            log.warning("%r is published, but without new bases for the next version: %s", version, error)
            continue
        pending.snapshots[embedding.name], pending.bases[embedding.name] = embedding.snapshot.id, tuple(bases)
    return pending


def _open_snapshots(snapshots: SnapshotLike | Sequence[SnapshotLike]) -> list[Snapshot]:
    """Open the snapshots, sorted by the embeddings' names. Raises OptionError, SnapshotError."""
    if isinstance(snapshots, (Snapshot, str, os.PathLike)):
        snapshots = [snapshots]
    if not isinstance(snapshots, Sequence) or not snapshots:
        raise OptionError(f"snapshots={snapshots!r:.80}: give a snapshot, its path, or a list with one per embedding")
    opened = [each if isinstance(each, Snapshot) else Snapshot.open(Path(each)) for each in snapshots]
    opened.sort(key=lambda snapshot: str(snapshot.description["name"]))
    names = [snapshot.description["name"] for snapshot in opened]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"snapshots: there are two of embedding {doubled.pop()!r}; give one of each embedding")
    check_one_moment(names, opened)
    return opened


def _check_same_model(latest: Version | None, snapshots: Sequence[Snapshot]) -> None:
    """Raises ServingError if the folder is of other embeddings."""
    if latest is None:
        return
    remedy = f"give snapshots of the model in version {latest.version}, or another folder"
    served = {embedding.name: embedding.description for embedding in latest.embeddings}
    names = [snapshot.description["name"] for snapshot in snapshots]
    if names != [*served]:
        raise ServingError(f"snapshots are of embeddings {names}, and the serving folder has {[*served]}: {remedy}")
    for snapshot in snapshots:
        new, old = snapshot.description, served[snapshot.description["name"]]
        fields = {name: (new[name], old[name]) for name in _FIXED_FIELDS}
        fields["tables"] = new["tables"][: len(old["tables"])], old["tables"]
        for name, (value, expected) in fields.items():
            if value != expected:
                raise ServingError(
                    f"embedding {new['name']!r} has {name}={value!r:.80} in snapshot {snapshot.name!r}, and "
                    f"{expected!r:.80} in the serving folder: {remedy}"
                )


def _check_not_older(latest: Version | None, snapshots: Sequence[Snapshot]) -> None:
    """Raises SnapshotError if a snapshot is older than the last version's, and both are of one run."""
    for snapshot, old in zip(snapshots, latest.embeddings if latest else (), strict=bool(latest)):
        new = _describe_snapshot(snapshot)
        if new.run and new.run == old.snapshot.run and new.step < old.snapshot.step:
            raise SnapshotError(
                f"snapshot {snapshot.name!r} is of step {new.step}, and version {latest and latest.version} has step "
                f"{old.snapshot.step} of the same run: publish a later snapshot, or pass allow_older=True"
            )


def _check_row_counts(latest: Version | None, version: Version) -> None:
    for new, old in zip(version.embeddings, latest.embeddings if latest else (), strict=bool(latest)):
        if new.snapshot.rows < _MIN_ROWS_LEFT * old.snapshot.rows:
            raise ServingError(
                f"embedding {new.name!r} has {new.snapshot.rows:,} rows, and had {old.snapshot.rows:,}: if you removed "
                "that many rows, publish with check=False"
            )


def _describe_snapshot(snapshot: Snapshot) -> SnapshotEntry:
    run = str(snapshot.description.get(RUN_ID_FIELD, ""))
    return SnapshotEntry(snapshot.manifest.id, run, snapshot.description["step"], snapshot.manifest.rows)
