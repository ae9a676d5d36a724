"""Snapshots in parts, format 3: as a snapshot of one writer for every reader, and each part for one reader."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.embeddings import contents, make, train
from support.examples import examples
from support.forged import command, is_sound
from support.small_snapshots import Chunk, chunked, description, joined, make_buckets, save
from support.snapshot_parts import in_parts, save_changes_in_parts, save_in_parts
from support.stores import options
from tierbed import SnapshotError
from tierbed.engine import _core
from tierbed.engine.row_format import KEY, RowArray, keys_of, row_dtype
from tierbed.snapshots import Snapshot, write_incremental, write_snapshot
from tierbed.snapshots.exchange import export_snapshot
from tierbed.snapshots.files.format import MAX_SHARDS, HashShard, shard_number
from tierbed.snapshots.files.merging import merge_sorted
from tierbed.snapshots.files.writer import children_of, new_snapshot, write_rows
from tierbed.snapshots.inspection.row import snapshot_row

COUNTS = {0: 10, 5: 1, 17: 20, 63: 5}
parts_of = st.sampled_from([1, 2, 3, 4, 7, 64, MAX_SHARDS])


@examples(0.3)
@given(width=st.integers(1, 6), parts=parts_of, max_rows=st.integers(1, 50), counts=st.sampled_from([COUNTS, {}]))
@example(width=6, parts=2, max_rows=1, counts=COUNTS)
@example(width=2, parts=3, max_rows=9, counts={})
def test_parts_are_read_as_one_snapshot_of_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, width: int, parts: int, max_rows: int, counts: dict[int, int]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    buckets = make_buckets(width, counts)
    write_snapshot(folder / "one", description(width), chunked(buckets))
    save_in_parts(folder / "parts", description(width), chunked(buckets), parts)
    one, other = Snapshot.open(folder / "one"), Snapshot.open(folder / "parts")
    assert (one.manifest.parts, other.manifest.parts) == (None, parts)
    assert other.manifest.rows == other.manifest.own_rows == one.manifest.rows
    for name in other.manifest.files:
        rows = np.load(other.folder / name)
        assert set(_core.owners(rows["table"].copy(), rows["key"].copy(), parts).tolist()) == {shard_number(name)}
    other.verify()
    assert joined(other.chunks(max_rows)) == joined(one.chunks())
    assert max((len(rows) for _, rows in other.chunks(max_rows)), default=0) <= max_rows


@examples(0.3)
@given(parts=parts_of, readers=st.integers(1, 5), max_rows=st.integers(1, 50))
def test_each_row_is_of_one_reader_and_of_its_owner(
    tmp_path_factory: pytest.TempPathFactory, parts: int, readers: int, max_rows: int
) -> None:
    folder = tmp_path_factory.mktemp("readers")
    save_in_parts(folder / "s", description(2), chunked(make_buckets(2, COUNTS)), parts)
    save(folder / "one", COUNTS, 2)
    for snapshot in (Snapshot.open(folder / "s"), Snapshot.open(folder / "one")):
        found: list[RowArray] = []
        for number in range(readers):
            reader = snapshot.restrict_to_shard(HashShard(number, readers))
            rows = np.concatenate([np.empty(0, row_dtype(2)), *(rows for _, rows in reader.chunks(max_rows))])
            assert reader.shard_rows == {snapshot.name: len(rows)}
            owners = _core.owners(rows["table"].copy(), rows["key"].copy(), readers)
            assert set(owners.tolist()) <= {number}
            found.append(rows)
        whole = np.concatenate([rows for _, rows in snapshot.chunks()])
        order = ["table", "key"]
        assert np.sort(np.concatenate(found), order=order).tobytes() == np.sort(whole, order=order).tobytes()


def test_a_reader_of_a_part_opens_the_files_of_parts_that_meet_it(tmp_path: Path) -> None:
    save_in_parts(tmp_path / "s", description(2), chunked(make_buckets(2, {9: 200})), 3)
    (tmp_path / "s" / "bucket-09-0002.npy").unlink()
    snapshot = Snapshot.open(tmp_path / "s")
    for part, meets in ((HashShard(0, 3), 0), (HashShard(1, 3), 0), (HashShard(0, 2), 0), (HashShard(2, 4), 1)):
        assert part.meets(HashShard(2, 3)) == meets
        if meets:
            with pytest.raises(SnapshotError, match=r"bucket-09-0002.npy"):
                list(snapshot.restrict_to_shard(part).chunks())
        else:
            list(snapshot.restrict_to_shard(part).chunks())


@given(a=st.integers(1, MAX_SHARDS), b=st.integers(1, MAX_SHARDS), keys=st.lists(st.integers(0, 2**64 - 1)))
def test_the_parts_of_a_row_meet(a: int, b: int, keys: list[int]) -> None:
    tables, ids = np.zeros(len(keys), np.uint32), np.array(keys, np.uint64)
    for x, y in zip(_core.owners(tables, ids, a).tolist(), _core.owners(tables, ids, b).tolist(), strict=True):
        assert HashShard(x, a).meets(HashShard(y, b))
    assert [HashShard(0, a).slots.start, HashShard(a - 1, a).slots.stop] == [0, 1 << 16]


PIECES = st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=4)


@given(parts=st.lists(st.lists(st.tuples(st.integers(0, 3), PIECES), max_size=3, unique_by=lambda x: x[0]), max_size=5))
def test_streams_are_merged_in_order(parts: list[list[tuple[int, list[list[int]]]]]) -> None:
    seen: set[tuple[int, int]] = set()
    streams: list[list[tuple[int, RowArray]]] = []
    for part in parts:
        chunks: list[tuple[int, RowArray]] = []
        for bucket, pieces in sorted(part):
            own = sorted({key for piece in pieces for key in piece if (bucket, key) not in seen})
            seen |= {(bucket, key) for key in own}
            for size in (*map(len, pieces), len(own)):
                chunks.append((bucket, np.array([(0, key) for key in own[:size]], KEY)))
                own = own[size:]
        streams.append(chunks)
    found = list(merge_sorted([iter(stream) for stream in streams]))
    assert all(len(rows) for _, rows in found)
    assert [(bucket, int(row["key"])) for bucket, rows in found for row in rows] == sorted(seen)


def versions() -> list[dict[int, RowArray]]:
    """Three tables: rows change, come and go."""
    first = make_buckets(2, COUNTS)
    second = {bucket: rows[::2].copy() for bucket, rows in first.items()} | make_buckets(2, {40: 12})
    third = {bucket: rows.copy() for bucket, rows in second.items()} | {17: first[17]}
    for rows in third.values():
        rows["updates"][::3] += 1
    return [first, second, third]


def changes(before: dict[int, RowArray], after: dict[int, RowArray]) -> Iterator[tuple[int, RowArray, RowArray]]:
    for bucket in sorted({*before, *after}):
        old, new = (table.get(bucket, np.empty(0, row_dtype(2))) for table in (before, after))
        names = {row.tobytes() for row in keys_of(new)}
        gone = np.array([name.tobytes() not in names for name in keys_of(old)], bool)
        present = {row.tobytes() for row in old}
        yield bucket, new[[row.tobytes() not in present for row in new]], keys_of(old)[gone]


def save_chain(folder: Path, parts: list[int | None]) -> list[dict[int, RowArray]]:
    tables = versions()
    if parts[0] is None:
        write_snapshot(folder / "s0", description(2), chunked(tables[0]))
    else:
        save_in_parts(folder / "s0", description(2), chunked(tables[0]), parts[0])
    for number, (before, after) in enumerate(itertools.pairwise(tables), 1):
        parent, of = Snapshot.open(folder / f"s{number - 1}"), parts[number]
        rows = sum(len(rows) for rows in after.values())
        made: Any = changes(before, after)
        if of is None:
            write_incremental(folder / f"s{number}", parent, description(2), rows, made)
        else:
            save_changes_in_parts(folder / f"s{number}", parent, description(2), rows, made, of)
    return tables


@examples(0.2)
@given(parts=st.lists(st.sampled_from([None, 1, 2, 3, 5]), min_size=3, max_size=3), readers=st.integers(1, 4))
@example(parts=[None, 3, 2], readers=4)
@example(parts=[3, None, 2], readers=3)
def test_a_chain_over_any_numbers_of_parts_is_the_table(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int | None], readers: int
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    tables = save_chain(folder, parts)
    for number, table in enumerate(tables):
        snapshot = Snapshot.open(folder / f"s{number}")
        snapshot.verify()
        assert joined(snapshot.chunks(7)) == {bucket: rows.tobytes() for bucket, rows in table.items()}
    last = Snapshot.open(folder / "s2")
    shares = [last.restrict_to_shard(HashShard(number, readers)) for number in range(readers)]
    rows = sum(len(rows) for share in shares for _, rows in share.chunks(7))
    assert rows == last.manifest.rows
    for link in last.chain:
        assert sum(share.shard_rows[link.name] for share in shares) == link.manifest.rows
    assert children_of(folder / "s1") == ["s2"]
    for bucket, table in tables[2].items():
        for row in table[:: len(table)]:
            name = int(row["table"]), int(row["key"].astype(np.int64))
            assert snapshot_row(last, *name) == row
        for row in tables[1].get(bucket, table)[:3]:
            there = keys_of(table).tolist()
            found = snapshot_row(last, int(row["table"]), int(row["key"].astype(np.int64)))
            assert (found is not None) == ((int(row["table"]), int(row["key"])) in there)


@pytest.mark.parametrize("format", ["parquet", "npz", "safetensors", "snapshot"])
def test_equal_rows_are_exported_as_equal_bytes(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierbed.snapshots.exchange.parquet._GROUP_ROWS", 17)
    save(tmp_path / "one", COUNTS)
    in_parts(Snapshot.open(tmp_path / "one"), tmp_path / "three", 3)
    made = []
    for name in ("one", "three"):
        path = tmp_path / f"{name}.{format}"
        export_snapshot(Snapshot.open(tmp_path / name), path, format)
        files = sorted(path.glob("*.npy")) if format == "snapshot" else [path]
        made.append([(file.name.removeprefix(name), file.read_bytes()) for file in files])
    assert made[0] == made[1]
    assert made[0]


@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_parts_load_into_any_store_and_are_gone_over(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        train(embedding, range(12))
        embedding.save_snapshot("one")
        rows = contents(embedding).tobytes()
        snapshots = tmp_path / "rows" / "snapshots"
        in_parts(Snapshot.open(snapshots / "one"), snapshots / "three", 3)
        train(embedding, range(6, 18))
        embedding.load_snapshot("three")
        assert contents(embedding).tobytes() == rows
        train(embedding, range(2, 5))
        embedding.delete([3], 0)
        embedding.save_snapshot("after", "incremental")
        rows = contents(embedding).tobytes()
    after = Snapshot.open(snapshots / "after")
    assert (after.manifest.parts, after.manifest.parent and after.manifest.parent.name) == (None, "three")
    folder = tmp_path / "rows"
    if store == "device":
        shown = [command("inspect", folder, name, "--rows", 3)[1]["first_rows"] for name in ("one", "three")]
        assert shown[0] == shown[1]
        assert command("diff", folder, "one", "three")[0] == 0
        assert is_sound(snapshots, "three")
    assert command("load", folder, "three")[0] == 0
    with make(options(store, tmp_path, open="error"), "adagrad") as embedding:
        embedding.load_snapshot("after")
        assert contents(embedding).tobytes() == rows


def test_a_snapshot_in_parts_replaces_another(tmp_path: Path) -> None:
    save(tmp_path / "s", {3: 4})
    save_in_parts(tmp_path / "s", description(), chunked(make_buckets(6, COUNTS)), 2, overwrite=True)
    assert Snapshot.open(tmp_path / "s").manifest.parts == 2
    save(tmp_path / "t", {3: 4})
    with pytest.raises(SnapshotError, match="exists: choose another name"):
        save_in_parts(tmp_path / "t", description(), [], 2)
    assert Snapshot.open(tmp_path / "t").manifest.sequence > Snapshot.open(tmp_path / "s").manifest.sequence
    assert sorted(os.listdir(tmp_path)) == ["s", "t"]


ROWS = make_buckets(6, {3: 50, 5: 50})
WRONG: dict[str, tuple[list[Chunk], str]] = {
    "another part": ([(3, HashShard(0, 2).rows(ROWS[3]))], "bucket 3 cannot be written: it has rows of another part"),
    "backwards": ([(bucket, HashShard(1, 2).rows(ROWS[bucket])) for bucket in (5, 3)], "buckets must ascend"),
    "no folder": ([(3, HashShard(1, 2).rows(ROWS[3]))], "snapshot 's' was not written"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_part_that_fails_leaves_nothing_and_spoils_nothing(tmp_path: Path, case: str) -> None:
    save(tmp_path / "before")
    chunks, problem = WRONG[case]

    def write() -> None:
        with new_snapshot(tmp_path / "s", description()) as place:
            write_rows(place, description(), [(3, HashShard(0, 2).rows(ROWS[3]))], None, HashShard(0, 2))
            elsewhere = tmp_path / "elsewhere" if case == "no folder" else place
            write_rows(elsewhere, description(), chunks, None, HashShard(1, 2))

    with pytest.raises(SnapshotError, match=problem):
        write()
    assert os.listdir(tmp_path) == ["before"]
    Snapshot.open(tmp_path / "before").verify()
