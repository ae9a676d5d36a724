"""Publishes snapshots as a version of a serving folder. docs/serving.md says what is read and written when."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from torch import Tensor

from ..engine.checks import check_choice, check_flags, check_int
from ..engine.errors import OptionError, ServingError, SnapshotError
from ..engine.signals import defer_signals
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.group_file import check_one_moment
from .folder import ServingFolder
from .served import ServedVersion
from .source import RowSource, SnapshotSource
from .table_files import NewFiles, merge_base, write_bases, write_deltas
from .version import ENCODINGS, Current, Pending, RowFileEntry, ServedEmbedding, ServedTable, Version

log = logging.getLogger("tierbed")

SnapshotLike = Snapshot | str | os.PathLike[str]
Check = Callable[[ServedVersion], object] | Literal[False] | None
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
        tensors: Dense weights by name. If the last version has some, they are required; {} ends that.
        keep: How many versions to keep. The version that readers take is also kept.
        check: Called with the opened version, a `ServedVersion`, before readers can see it: for example `lambda served:
            served["items"](ids)`. If it raises, readers never see the version. False skips the comparison of row counts
            with the last version.
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
    if isinstance(snapshots, (Snapshot, str, os.PathLike)):
        snapshots = [snapshots]
    if not isinstance(snapshots, Sequence) or not snapshots:
        raise OptionError(f"snapshots={snapshots!r:.80}: give a snapshot, its path, or a list with one per embedding")
    opened = [each if isinstance(each, Snapshot) else Snapshot.open(Path(each)) for each in snapshots]
    check_one_moment([snapshot.description["name"] for snapshot in opened], opened)
    sources = [SnapshotSource(snapshot) for snapshot in opened]
    return publish_sources(ServingFolder(folder), sources, encoding, tensors, keep, check, rebase, allow_older)


def publish_sources(
    target: ServingFolder,
    sources: Sequence[RowSource],
    encoding: str,
    tensors: Mapping[str, Tensor] | None,
    keep: int,
    check: Check,
    rebase: bool = False,
    allow_older: bool = False,
    is_locked: bool = False,
) -> Version:
    """As `publish`, for rows from anywhere. is_locked: True if the caller has locked the folder."""
    check_arguments(encoding, keep, check, rebase=rebase, allow_older=allow_older)
    sources = sorted(sources, key=lambda source: str(source.description["name"]))
    names = [source.description["name"] for source in sources]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"snapshots: there are two of embedding {doubled.pop()!r}; give one of each embedding")
    with nullcontext() if is_locked else target.lock("a publish", create=True):
        latest, current = target.read_latest(), target.find_current()
        if latest is not None:
            _check_same_model(latest, sources)
            if tensors is None and latest.tensors is not None:
                raise OptionError(
                    f"tensors=None, and version {latest.version} has dense weights, which readers need: pass the "
                    "weights of the same step, or tensors={} to serve rows alone from now on"
                )
            _check_progress(latest, sources, allow_older, counts_rows=check is not False)
        number = 1 + max(current.version, latest.version if latest else 0)
        with NewFiles(target, encoding) as files:
            embeddings = _write_embeddings(files, None if rebase else latest, sources)
            dense = files.write_tensors(tensors) if tensors else None
            step = max(source.origin.step for source in sources)
            version = Version(number, encoding, step, time.time_ns(), dense, embeddings)
            if check:
                check(ServedVersion(target, version))
            files.sync()
            with defer_signals():  # a version must not exist without its files
                target.write_version(version)
                files.keep()
        if not current.hold:
            target.write_current(Current(number, created=version.created))
        try:
            target.write_pending(_write_next_bases(target, version, sources))
            target.remove_old(keep)
        except ServingError as error:  # the version is complete
            log.warning("%r is published, but older versions could not be removed: %s", version, error)
    return version


def check_arguments(encoding: str, keep: int, check: Check, **flags: bool) -> None:
    """Raises OptionError for arguments of `publish` that are invalid whatever the folder has."""
    check_flags(OptionError, **flags)
    check_choice("encoding", encoding, ENCODINGS)
    check_int("keep", keep, "how many versions to keep, 1 or more", 1)
    if check not in (None, False) and not callable(check):
        raise OptionError(f"check={check!r:.80}: give a function that is called with the opened version, None or False")


def find_reusable(latest: Version | None, encoding: str) -> dict[str, ServedEmbedding]:
    """Returns by name the embeddings whose files a new version in this encoding can use again."""
    return {old.name: old for old in latest.embeddings} if latest and latest.encoding == encoding else {}


def _write_embeddings(
    files: NewFiles, latest: Version | None, sources: Sequence[RowSource]
) -> tuple[ServedEmbedding, ...]:
    """Write deltas to the files of the last version, or bases where the source does not know the changes since."""
    pending, embeddings = files.folder.read_pending(), []
    previous = find_reusable(latest, files.encoding)
    for source in sources:
        name, num_tables = source.description["name"], len(source.description["tables"])
        old = previous.get(name)
        changes = source.read_since(old.snapshot.id) if old and len(old.tables) == num_tables else None
        if old and changes is not None:
            old_tables = old.tables
            if latest and pending.version == latest.version and pending.snapshots.get(name) == old.snapshot.id:
                pairs = zip(old.tables, pending.bases[name], strict=True)
                old_tables = tuple(ServedTable(base, None) if base else table for table, base in pairs)
            tables = write_deltas(files, source, changes, old_tables)
        else:
            if latest is not None:
                is_other_run = old is not None and source.origin.run != old.snapshot.run
                if old is None:
                    reason = f"version {latest.version} has the encoding {latest.encoding}"
                elif is_other_run:
                    reason = f"{source.label} is of another run than version {latest.version}"
                else:
                    reason = f"{source.label} is no increment of version {latest.version}"
                level = logging.WARNING if is_other_run else logging.INFO
                log.log(level, "%r: all rows are written again, because %s", str(files.folder.path), reason)
            tables = [ServedTable(base, None) for base in write_bases(files, source)]
        embeddings.append(ServedEmbedding(name, tuple(tables), source.origin, source.description))
    return tuple(embeddings)


def _write_next_bases(folder: ServingFolder, version: Version, sources: Sequence[RowSource]) -> Pending:
    """Write new bases where deltas had as many rows as the base. Readers can already see the version.

    The version is complete without these bases. So if they cannot be written, this logs why, and the next publish
    tries again.
    """
    pending = Pending(version.version)
    for embedding, source in zip(version.embeddings, sources, strict=True):
        is_due = [table.delta is not None and table.written >= table.base.rows for table in embedding.tables]
        if not any(is_due):
            continue
        try:
            with NewFiles(folder, version.encoding) as files:
                bases: list[RowFileEntry | None]
                if source.catches_up:
                    bases = [*write_bases(files, source)]
                else:
                    pairs = enumerate(zip(embedding.tables, is_due, strict=True))
                    bases = [merge_base(files, embedding, n, table) if due else None for n, (table, due) in pairs]
                files.sync()
        except (ServingError, SnapshotError) as error:
            log.warning("%r is published, but without new bases for the next version: %s", version, error)
        else:
            pending.snapshots[embedding.name], pending.bases[embedding.name] = embedding.snapshot.id, tuple(bases)
    return pending


def _check_same_model(latest: Version, sources: Sequence[RowSource]) -> None:
    """Raises ServingError if the folder is of other embeddings."""
    remedy = f"publish the model of version {latest.version} there, and this one in another folder"
    names, served = [source.description["name"] for source in sources], [old.name for old in latest.embeddings]
    if names != served:
        raise ServingError(f"there are rows of embeddings {names}, and the serving folder has {served}: {remedy}")
    for source, embedding in zip(sources, latest.embeddings, strict=True):
        new, old = source.description, embedding.description
        fields = {name: (new[name], old[name]) for name in _FIXED_FIELDS}
        fields["tables"] = new["tables"][: len(old["tables"])], old["tables"]
        for name, (value, expected) in fields.items():
            if value != expected:
                raise ServingError(
                    f"embedding {new['name']!r} has {name}={value!r:.80} in {source.label}, and {expected!r:.80} in "
                    f"the serving folder: {remedy}"
                )


def _check_progress(latest: Version, sources: Sequence[RowSource], allow_older: bool, counts_rows: bool) -> None:
    """Raises SnapshotError if rows are older than the last version's, and both are of one run.

    Raises ServingError if most of an embedding's rows are gone, unless the trainer went back to an earlier step.
    """
    for source, embedding in zip(sources, latest.embeddings, strict=True):
        new, old = source.origin, embedding.snapshot
        went_back = bool(new.run) and new.run == old.run and new.step < old.step
        if went_back and not allow_older:
            raise SnapshotError(
                f"{source.label} is of step {new.step}, and the last version has step {old.step} of the same run: "
                "publish a later snapshot, or pass allow_older=True"
            )
        if counts_rows and new.rows < _MIN_ROWS_LEFT * old.rows and not went_back:
            raise ServingError(
                f"embedding {embedding.name!r} has {new.rows:,} rows, and had {old.rows:,}: if you removed that many "
                "rows, publish with check=False; if this is another model, publish it to another folder"
            )
