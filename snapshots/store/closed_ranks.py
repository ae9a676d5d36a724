"""The live rows of ranks that closed a store, as those of one table: for commands on the store folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

from ...engine.errors import StoreError
from ...engine.row_format import BUCKETS, Chunks, Rows
from ...engine.store.table_counts import FIELD
from ..files.format import SHARE, Manifest, check_name
from ..files.merged import merged
from ..files.writer import Progress
from .all_or_none import OfAll
from .closed_store import described, held_live, live_rows, together_with
from .folder import StoreFolder
from .folder_state import FolderState, Live, live_in, live_of, live_together, marks_in, share_folder
from .saving import Held, save_held


def mark_of_ranks(state: FolderState) -> dict[str, Any] | None:
    """One mark for the shares of ranks, as of a table that has all their rows; None where they are not whole.

    It lacks `rows` where other hosts have some of the shares. Raises StoreError.
    """
    record = state.keeper.of_ranks
    if record is None:
        return None
    marks = marks_in(state.path, record.ranks)
    if live_together(record, live_of(marks, record.ranks).values()) is None:
        return None
    found = [mark for mark in marks.values() if mark is not None]
    common = {field: value for field, value in found[0].items() if field not in (SHARE, "rows", "shards", FIELD)}
    return common | ({"rows": sum(mark["rows"] for mark in found)} if len(found) == record.ranks else {})


@contextmanager
def held_ranks(store: StoreFolder) -> Iterator[tuple[Live, dict[str, Any], Chunks]]:
    """What the shares have in common, one mark for them, and their rows in order, while this process holds them all.

    Raises StoreError where they are not whole, or not all here.
    """
    record = store.keeper.of_ranks
    assert record is not None
    with ExitStack() as holding:
        places = (share_folder(store.path, rank, record.ranks) for rank in range(record.ranks))
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
        yield live, mark, _in_order(rows)


def _in_order(parts: list[Chunks]) -> Chunks:
    """The rows of all parts, by bucket."""
    groups = [_Buckets(part) for part in parts]
    for bucket in range(BUCKETS):
        for rows in merged([group.rows_of(bucket) for group in groups]):
            yield bucket, rows


class _Buckets:
    """Chunks in the order of buckets, taken a bucket at a time."""

    def __init__(self, chunks: Chunks) -> None:
        self._groups = groupby(chunks, key=itemgetter(0))
        self._next = next(self._groups, None)

    def rows_of(self, bucket: int) -> Iterator[Rows]:
        if self._next is None or self._next[0] != bucket:
            return
        yield from (rows for _, rows in self._next[1])
        self._next = next(self._groups, None)


def save_closed(
    store: StoreFolder,
    name: str,
    progress: Progress | None = None,
    kind: str = "full",
    overwrite: bool = False,
    of_all: OfAll | None = None,
) -> Manifest:
    """Write the live rows of a closed store, also those of ranks, as snapshot `name`. The live rows stay as they are.

    Raises StoreError if the store carries no mark, SnapshotError and OptionError as `save_held` does.
    """
    check_name(name)
    if store.read_mark() is not None or store.keeper.of_ranks is None:
        with held_live(store, of_all) as held:
            return save_held(store, name, kind, held, progress, overwrite)
    with held_ranks(store) as (live, mark, chunks):
        together, record = together_with(store, of_all)
        held = Held(described(mark), mark["rows"], lambda: chunks, together=together, record=record)
        manifest = save_held(store.keeper, name, kind, held, progress, overwrite)
        store.keeper.note_saved(live.writes)
    return manifest
