"""Calls that change rows, and a check of the changes that a table notes beside all its rows before and after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from support import naive
from support.embeddings import contents, make, train
from tierbed import CapacityError, MultiTableEmbedding
from tierbed.engine.row_format import ROW_KEY_DTYPE, Change, row_dtype
from tierbed.engine.table import change_observers
from tierbed.snapshots import Snapshot

Row = tuple[int, int]  # table, key as 64 bits without sign
FIRST, SECOND = "1" * 32, "2" * 32
some_rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=25)
calls = st.lists(st.tuples(st.sampled_from(["train", "put", "delete"]), some_rows), max_size=8)


def in_order(names: Iterable[Row]) -> list[tuple[int, int, int]]:
    return sorted((naive.hash_row(table, key) >> 58, table, key) for table, key in set(names))


def by_name(rows: Iterable[Any]) -> dict[Row, bytes]:
    return {(int(row["table"]), int(row["key"])): row.tobytes() for row in rows}


def applied(before: dict[Row, bytes], found: Iterable[Change]) -> tuple[dict[Row, bytes], set[Row]]:
    """The rows after the changes, whose order is checked, and the names of all that they name."""
    after, names, last = dict(before), set(), (-1, -1, -1)
    for bucket, rows, gone in found:
        assert gone.dtype == ROW_KEY_DTYPE
        here = {(int(t), int(k)) for t, k in zip(gone["table"], gone["key"], strict=True)}
        assert not here & by_name(rows).keys()
        for part in (rows, gone):
            tables, keys = part["table"].tolist(), part["key"].tolist()
            assert list(zip(tables, keys, strict=True)) == sorted(set(zip(tables, keys, strict=True)))
        ordered = in_order([*here, *by_name(rows)])
        assert {b for b, _, _ in ordered} <= {bucket}
        if ordered:
            assert last < ordered[0]
            last = ordered[-1]
        names |= here | by_name(rows).keys()
        for name in here:
            after.pop(name, None)
        after.update(by_name(rows))
    return after, names


def call(embedding: MultiTableEmbedding, kind: str, rows: list[Row]) -> None:
    ids, tables = torch.tensor([key for _, key in rows]), torch.tensor([table for table, _ in rows])
    if kind == "delete":
        embedding.delete(ids, tables)
    elif kind == "put":
        embedding.put(ids, torch.rand(len(rows), embedding.dim), tables)
    else:
        train(embedding, ids, tables)


@contextlib.contextmanager
def in_small_chunks(rows: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change_observers, "CHUNK_BYTES", rows * row_dtype(10).itemsize)
        yield


Calls = list[tuple[str, list[Row]]]


def check_noted(how: Any, before: Calls, during: Calls, after: Calls, chunk: int, place: Any = "cpu") -> None:
    """Rows change, are saved, and change again, in a table with these store options; chunks are of that many rows."""
    with make(how, "adagrad").to(place) as embedding, in_small_chunks(chunk):
        table = embedding.table_handle().table

        def go(steps: Calls) -> set[Row]:
            there = by_name(contents(embedding)).keys()
            for kind, rows in steps:
                with contextlib.suppress(CapacityError):
                    call(embedding, kind, rows)
            left = there - by_name(contents(embedding)).keys()
            return {row for _, rows in steps for row in rows} | left

        def changes_since(id: str) -> Iterator[Change]:
            found = table.observers.read_changes(id)
            assert found is not None
            return iter(found)

        def check(kept: dict[Row, bytes], id: str, touched: set[Row]) -> dict[Row, bytes]:
            now, names = applied(kept, changes_since(id))
            assert now == by_name(contents(embedding))
            assert names <= touched
            return now

        go(before)
        table.observers.track_changes(FIRST)
        kept = by_name(contents(embedding))
        touched = go(during)
        assert table.observers.read_changes(SECOND) is None
        next(changes_since(FIRST), None)  # the save fails here: nothing is forgotten
        kept = check(kept, FIRST, touched | go(after))
        table.observers.record_save(SECOND)
        touched = go(during)
        assert table.observers.read_changes(FIRST) is None
        check(kept, SECOND, touched)


def read_snapshot(embedding: Any, name: str) -> dict[Row, bytes]:
    snapshot = Snapshot.open(embedding.table_handle().store.snapshots_path / name)
    return by_name(row for _, part in snapshot.chunks() for row in part)


def check_saved(embedding: Any, name: str) -> None:
    """A snapshot in the store folder has all rows, bit for bit."""
    assert read_snapshot(embedding, name) == by_name(contents(embedding))
