"""Chains of snapshots that hold what changed since another, and snapshots in parts: as one of the table, or refused."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.docs import reader_of_the_docs
from support.embeddings import contents, make, train
from support.examples import examples
from support.forged import command, is_sound
from support.small_snapshots import Chunk, chunked, description, flip_bit, joined, key_in, make_buckets, save
from support.snapshot_parts import in_parts, save_changes_in_parts, save_in_parts
from support.stores import options
from tierbed.engine import _core
from tierbed.engine.errors import SnapshotError
from tierbed.engine.row_format import ROW_KEY_DTYPE, RowArray, row_dtype
from tierbed.engine.store.merging import STATUS_NEW, join_tables
from tierbed.snapshots import Snapshot, list_snapshots, write_incremental, write_snapshot
from tierbed.snapshots.exchange import export_snapshot
from tierbed.snapshots.files import reader
from tierbed.snapshots.files.format import MAX_SHARDS, HashShard, parse_shard_index
from tierbed.snapshots.files.verify import find_chains, verify_all
from tierbed.snapshots.files.writer import find_children, new_snapshot, write_rows
from tierbed.snapshots.inspection.row import read_snapshot_row

Folders = pytest.TempPathFactory
Row = tuple[int, int, int]  # bucket, table, key; in the order of snapshots
Table = dict[Row, float]


def row(bucket: int, table: int, number: int) -> Row:
    return bucket, table, key_in(bucket, table, number)


rows = st.builds(row, st.sampled_from([0, 1, 63]), st.integers(0, 2), st.sampled_from([0, 1, 255, 256, 2**58 - 1]))
tables = st.dictionaries(rows, st.floats(0, 9, width=32))


def chunks_of(table: Table, size: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    for bucket in sorted({row[0] for row in table}):
        present = sorted(row for row in table if row[0] == bucket)
        for begin in range(0, len(present), size):
            part = present[begin : begin + size]
            array = np.zeros(len(part), row_dtype(2))
            array["table"], array["key"] = [row[1] for row in part], [row[2] for row in part]
            array["values"][:, 0] = [table[row] for row in part]
            array["updates"] = 1
            chunks.append((bucket, array))
    return chunks


def changes_of(before: Table, after: Table, size: int) -> list[tuple[int, Any, Any]]:
    written = chunks_of({row: value for row, value in after.items() if before.get(row) != value}, size)
    gone = chunks_of({row: 0.0 for row in before if row not in after}, size)
    none, no_keys = np.empty(0, row_dtype(2)), np.empty(0, ROW_KEY_DTYPE)
    both = [(b, r, no_keys) for b, r in written]
    both += [(b, none, np.array([(row["table"], row["key"]) for row in r], ROW_KEY_DTYPE)) for b, r in gone]
    return sorted(both, key=lambda change: change[0])


def table_of(snapshot: Snapshot, max_rows: int = 65536) -> Table:
    table: Table = {}
    last = (-1, 0, 0)
    for bucket, part in snapshot.chunks(max_rows):
        for row in part:
            place = (bucket, int(row["table"]), int(row["key"]))
            assert place > last
            last = place
            table[place] = float(row["values"][0])
    return table


def save_chain(folder: Path, versions: list[Table], size: int = 3, parts: Sequence[int | None] = ()) -> Snapshot:
    """Snapshot s0 in full, and s1.. over the one before; each in its number of parts, if it has one."""
    for number, after in enumerate(versions):
        place, of = folder / f"s{number}", parts[number] if parts else None
        if number == 0:
            full: Any = place, description(2), chunks_of(after, size)
            write_snapshot(*full) if of is None else save_in_parts(*full, of)
        else:
            changes = changes_of(versions[number - 1], after, size)
            over: Any = place, Snapshot.open(folder / f"s{number - 1}"), description(2), len(after), changes
            write_incremental(*over) if of is None else save_changes_in_parts(*over, of)
    return Snapshot.open(place)


@examples(0.5)
@given(
    versions=st.lists(tables, min_size=1, max_size=4),
    parts=st.lists(st.sampled_from([None, 1, 2, 3, 5]), min_size=4, max_size=4),
    size=st.integers(1, 4),
    max_rows=st.integers(1, 4),
    readers=st.integers(1, 4),
)
def test_a_chain_over_any_numbers_of_parts_reads_as_the_table_it_ends_with(
    tmp_path_factory: Folders, versions: list[Table], parts: list[int | None], size: int, max_rows: int, readers: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "chain"
    shutil.rmtree(folder, ignore_errors=True)
    snapshot, last = save_chain(folder, versions, size, parts), versions[-1]
    snapshot.verify()
    assert table_of(snapshot, max_rows) == last
    assert snapshot.manifest.rows == len(last)
    assert write_snapshot(folder / "whole", snapshot.description, snapshot.chunks()).rows == len(last)
    assert table_of(Snapshot.open(folder / "whole")) == last
    shares = [snapshot.restrict_to_shard(HashShard(number, readers)) for number in range(readers)]
    assert sum(len(rows) for share in shares for _, rows in share.chunks(max_rows)) == len(last)
    for link in snapshot.chain:
        assert sum(share.shard_rows[link.name] for share in shares) == link.manifest.rows
    assert find_children(folder / "s0") == ["s1"][: len(versions) - 1]
    for bucket, table, key in set().union(*versions):
        found = read_snapshot_row(snapshot, table, int(np.uint64(key).astype(np.int64)))
        assert (None if found is None else found["values"].ravel()[0]) == last.get((bucket, table, key))


@pytest.mark.parametrize("longest", [10, pytest.param(reader.MAX_CHAIN, marks=pytest.mark.slow)])
def test_a_chain_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(reader, "MAX_CHAIN", longest)
    versions: list[Table] = [{row(0, 0, 0): float(number)} for number in range(longest + 1)]
    longer = save_chain(tmp_path, versions)
    parent = longer.parent
    assert parent is not None
    assert table_of(parent) == versions[-2]
    for read in (longer.verify, longer.chunks):
        problem = f"'s{longest}' has a chain of {longest} parents, but at most {longest - 1} can be read"
        with pytest.raises(SnapshotError, match=problem):
            read()


@given(left=tables, right=tables, sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_joined_pieces_cover_one_range_of_both(left: Table, right: Table, sizes: tuple[int, int]) -> None:
    last: Row = (-1, 0, 0)
    seen: list[list[Row]] = [[], []]
    lacking: list[list[Row]] = [[], []]
    for bucket, *parts, gone, state in join_tables(iter(chunks_of(left, sizes[0])), iter(chunks_of(right, sizes[1]))):
        sides = [[(bucket, int(row["table"]), int(row["key"])) for row in part] for part in parts]
        keys = sides[0] + sides[1]
        assert min(keys) > last
        last = max(keys)
        for number, flags in enumerate((gone > 0, state == STATUS_NEW)):
            seen[number] += sides[number]
            lacking[number] += [key for key, flag in zip(sides[number], flags, strict=True) if flag]
    assert seen == [sorted(left), sorted(right)]
    assert lacking == [sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys())]


def version(step: int) -> Table:
    numbers = [(bucket, number) for bucket in (0, 5) for number in range(10) if (bucket + number) % (step + 1) == 0]
    return {row(bucket, 0, number): float(step) for bucket, number in numbers}


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    save_chain(tmp_path, [version(0), version(1), version(2)])
    return tmp_path


def test_files_of_an_incremental_snapshot_are_numpys_and_a_wrong_one_is_not_written(chain: Path) -> None:
    manifest = Snapshot.open(chain / "s1").manifest
    assert manifest.kind == "incremental"
    assert manifest.deleted > 0
    deleted = np.load(chain / "s1" / "deleted-00.npy", allow_pickle=False)
    assert deleted.dtype == ROW_KEY_DTYPE
    found = [(0, int(k["table"]), int(k["key"])) for k in deleted]
    assert found == sorted(row for row in version(0) if row[0] == 0 and row not in version(1))
    parent, changes = Snapshot.open(chain / "s2"), changes_of({}, version(0), 3)
    with pytest.raises(SnapshotError, match=r'other optimizer state or another dtype.*kind="full"'):
        write_incremental(chain / "s3", parent, description(4), 0, [])
    with pytest.raises(SnapshotError, match="ascend"):
        write_incremental(chain / "s3", parent, description(2), 20, changes[::-1])
    assert sorted(path.name for path in chain.iterdir()) == ["s0", "s1", "s2"]


def test_each_file_of_a_chain_is_verified_and_damage_behind_damage_is_found(chain: Path) -> None:
    def damaged() -> dict[str, str]:
        found = verify_all(*find_chains(list_snapshots(chain).snapshots), progress=lambda rows: None)
        return {name: str(error) for name, error in found.items()}

    assert damaged() == {}
    for file in chain.rglob("*.npy"):
        wrong, before = file.parent.name, file.read_bytes()
        flip_bit(file, 8 * 260)
        for read in (lambda: Snapshot.open(chain / "s2").verify(), lambda: list(Snapshot.open(chain / "s2").chunks())):
            with pytest.raises(SnapshotError, match=f"{wrong}/{file.name}"):
                read()
        found = damaged()
        assert list(found) == [name for name in ("s0", "s1", "s2") if name >= wrong]
        assert "its checksum does not match" in found.pop(wrong)
        assert set(found.values()) <= {f"its parent {wrong!r} is damaged"}
        if wrong != "s2":
            last = next((chain / "s2").glob("*.npy"))
            flip_bit(last, 8 * 260)
            assert "its checksum does not match" in damaged()["s2"]
            flip_bit(last, 8 * 260)
        file.write_bytes(before)


def test_a_parent_that_is_gone_or_another_is_named(chain: Path) -> None:
    (chain / "s1").rename(chain / "elsewhere")
    with pytest.raises(SnapshotError, match=r"'s2' lacks its parent: there is no snapshot 's1'.*put 's1' back"):
        list(Snapshot.open(chain / "s2").chunks())
    write_snapshot(chain / "s1", description(2), chunks_of(version(1), 3))
    with pytest.raises(SnapshotError, match=r"the parent 's1' of snapshot 's2' was replaced by another snapshot"):
        Snapshot.open(chain / "s2").verify()
    shutil.rmtree(chain / "s1")
    (chain / "elsewhere").rename(chain / "s1")
    assert table_of(Snapshot.open(chain / "s2")) == version(2)


def test_the_reader_of_the_docs_reads_a_chain(chain: Path) -> None:
    read = reader_of_the_docs()
    for step in range(3):
        found = {key: float(values[0]) for key, values in read(chain / f"s{step}").items()}
        assert found == {row[1:]: value for row, value in version(step).items()}
    in_parts(Snapshot.open(chain / "s2"), chain / "parts", 2)
    assert read(chain / "parts").keys() == read(chain / "s2").keys()
    flip_bit(chain / "s1" / "deleted-00.npy", 8 * 260)
    with pytest.raises(AssertionError, match=r"deleted-00.npy is damaged"):
        read(chain / "s2")


COUNTS = {0: 10, 5: 1, 17: 20, 63: 5}


@examples(0.5)
@given(
    width=st.integers(1, 6),
    parts=st.sampled_from([1, 2, 3, 4, 7, 64, MAX_SHARDS]),
    readers=st.integers(1, 5),
    max_rows=st.integers(1, 50),
    counts=st.sampled_from([COUNTS, {}]),
)
@example(width=6, parts=2, readers=3, max_rows=1, counts=COUNTS)
@example(width=2, parts=3, readers=2, max_rows=9, counts={})
def test_parts_are_read_as_one_snapshot_of_the_same_rows_and_each_row_by_its_owner(
    tmp_path_factory: Folders, width: int, parts: int, readers: int, max_rows: int, counts: dict[int, int]
) -> None:
    def owners(rows: RowArray, count: int) -> set[int]:
        return set(_core.find_owners(rows["table"].copy(), rows["key"].copy(), count).tolist())

    folder = tmp_path_factory.mktemp("parts")
    buckets = make_buckets(width, counts)
    write_snapshot(folder / "one", description(width), chunked(buckets))
    save_in_parts(folder / "parts", description(width), chunked(buckets), parts)
    one, other = Snapshot.open(folder / "one"), Snapshot.open(folder / "parts")
    assert (one.manifest.num_shards, other.manifest.num_shards) == (None, parts)
    assert other.manifest.rows == other.manifest.num_entries == one.manifest.rows
    for name in other.manifest.files:
        assert owners(np.load(other.folder / name), parts) == {parse_shard_index(name)}
    other.verify()
    assert joined(other.chunks(max_rows)) == joined(one.chunks())
    assert max((len(rows) for _, rows in other.chunks(max_rows)), default=0) <= max_rows
    none = np.empty(0, row_dtype(width))
    for snapshot in (one, other):
        found = [none]
        for number in range(readers):
            reader = snapshot.restrict_to_shard(HashShard(number, readers))
            found.append(np.concatenate([none, *(rows for _, rows in reader.chunks(max_rows))]))
            assert reader.shard_rows == {snapshot.name: len(found[-1])}
            assert owners(found[-1], readers) <= {number}
        whole = np.concatenate([none, *(rows for _, rows in snapshot.chunks())])
        by_key = [np.sort(rows, order=["table", "key"]).tobytes() for rows in (np.concatenate(found), whole)]
        assert by_key[0] == by_key[1]


def test_a_reader_of_a_part_opens_the_files_of_parts_that_meet_it(tmp_path: Path) -> None:
    save_in_parts(tmp_path / "s", description(2), chunked(make_buckets(2, {9: 200})), 3)
    (tmp_path / "s" / "bucket-09-0002.npy").unlink()
    snapshot = Snapshot.open(tmp_path / "s")
    for (number, parts), meets in {(0, 3): False, (1, 3): False, (0, 2): False, (2, 4): True}.items():
        part = HashShard(number, parts)
        assert part.overlaps(HashShard(2, 3)) == meets
        lacks = pytest.raises(SnapshotError, match=r"bucket-09-0002.npy")
        with lacks if meets else contextlib.nullcontext():
            list(snapshot.restrict_to_shard(part).chunks())


@given(a=st.integers(1, MAX_SHARDS), b=st.integers(1, MAX_SHARDS), keys=st.lists(st.integers(0, 2**64 - 1)))
def test_the_parts_of_a_row_meet(a: int, b: int, keys: list[int]) -> None:
    tables, ids = np.zeros(len(keys), np.uint32), np.array(keys, np.uint64)
    for x, y in zip(*(_core.find_owners(tables, ids, n).tolist() for n in (a, b)), strict=True):
        assert HashShard(x, a).overlaps(HashShard(y, b))
    assert [HashShard(0, a).hash_range.start, HashShard(a - 1, a).hash_range.stop] == [0, 1 << 16]


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
    assert made[0] == made[1] != []
    if format == "parquet":  # groups are bounded, and larger than a chunk
        groups = pyarrow.parquet.read_metadata(path)
        assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [17, 17, 2]


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
    assert (after.manifest.num_shards, after.manifest.parent and after.manifest.parent.name) == (None, "three")
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


ROWS = make_buckets(6, {3: 50, 5: 50})


@pytest.mark.parametrize("case", ["it has rows of another part", "buckets must ascend", "snapshot 's' was not written"])
def test_a_part_that_fails_leaves_nothing_and_spoils_nothing(tmp_path: Path, case: str) -> None:
    save(tmp_path / "before")
    wrong = HashShard("another" not in case, 2)
    chunks = [(bucket, wrong.select_rows(ROWS[bucket])) for bucket in ((5, 3) if "ascend" in case else (3,))]

    def write() -> None:
        with new_snapshot(tmp_path / "s", description()) as place:
            write_rows(place, description(), [(3, HashShard(0, 2).select_rows(ROWS[3]))], None, HashShard(0, 2))
            elsewhere = tmp_path / "elsewhere" if "not written" in case else place
            write_rows(elsewhere, description(), chunks, None, HashShard(1, 2))

    with pytest.raises(SnapshotError, match=case):
        write()
    assert os.listdir(tmp_path) == ["before"]
    Snapshot.open(tmp_path / "before").verify()
