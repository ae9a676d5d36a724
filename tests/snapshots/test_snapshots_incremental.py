"""Snapshots that hold what changed since another: chains of them read as the whole table, or refused."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.docs import reader_of_the_docs
from support.examples import examples
from support.small_snapshots import Chunk, description, flip_bit, key_in
from support.snapshot_parts import in_parts
from tierbed.engine.errors import SnapshotError
from tierbed.engine.row_format import KEY, row_dtype
from tierbed.snapshots import Snapshot, list_snapshots, write_incremental, write_snapshot
from tierbed.snapshots.files import reader
from tierbed.snapshots.files.merging import NEW, join_tables
from tierbed.snapshots.files.verify import chains_of, verify_all

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
    none, no_keys = np.empty(0, row_dtype(2)), np.empty(0, KEY)
    both = [(b, r, no_keys) for b, r in written]
    both += [(b, none, np.array([(row["table"], row["key"]) for row in r], KEY)) for b, r in gone]
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


def save_chain(folder: Path, versions: list[Table], size: int = 3) -> Snapshot:
    """Snapshot s0 in full, and s1.. over the one before."""
    write_snapshot(folder / "s0", description(2), chunks_of(versions[0], size))
    for number, (before, after) in enumerate(itertools.pairwise(versions), 1):
        parent = Snapshot.open(folder / f"s{number - 1}")
        changes = changes_of(before, after, size)
        write_incremental(folder / f"s{number}", parent, description(2), len(after), changes)
    return Snapshot.open(folder / f"s{len(versions) - 1}")


@examples(0.5)
@given(versions=st.lists(tables, min_size=1, max_size=4), size=st.integers(1, 4), max_rows=st.integers(1, 4))
def test_a_chain_reads_as_the_table_it_ends_with(
    tmp_path_factory: pytest.TempPathFactory, versions: list[Table], size: int, max_rows: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "chain"
    shutil.rmtree(folder, ignore_errors=True)
    snapshot = save_chain(folder, versions, size)
    snapshot.verify()
    assert table_of(snapshot, max_rows) == versions[-1]
    assert snapshot.manifest.rows == len(versions[-1])
    whole = write_snapshot(folder / "whole", snapshot.description, snapshot.chunks())
    assert whole.rows == len(versions[-1])
    assert table_of(Snapshot.open(folder / "whole")) == versions[-1]


@pytest.mark.parametrize("longest", [10, pytest.param(reader.MAX_CHAIN, marks=pytest.mark.slow)])
def test_the_longest_chain_is_read_and_a_longer_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    monkeypatch.setattr(reader, "MAX_CHAIN", longest)
    versions: list[Table] = [{row(0, 0, 0): float(number)} for number in range(longest + 1)]
    longer = save_chain(tmp_path, versions)
    parent = longer.parent
    assert parent is not None
    assert table_of(parent) == versions[-2]
    for read in (longer.verify, longer.chunks):
        problem = f"'s{longest}' has a chain of {longest} parents, and at most {longest - 1} can be read"
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
        for number, flags in enumerate((gone > 0, state == NEW)):
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
    assert deleted.dtype == KEY
    found = [(0, int(k["table"]), int(k["key"])) for k in deleted]
    assert found == sorted(row for row in version(0) if row[0] == 0 and row not in version(1))
    parent, changes = Snapshot.open(chain / "s2"), changes_of({}, version(0), 3)
    with pytest.raises(SnapshotError, match=r'other optimizer state or another dtype.*kind="full"'):
        write_incremental(chain / "s3", parent, description(4), 0, [])
    with pytest.raises(SnapshotError, match="ascend"):
        write_incremental(chain / "s3", parent, description(2), 20, changes[::-1])
    assert sorted(path.name for path in chain.iterdir()) == ["s0", "s1", "s2"]


def test_each_file_of_a_chain_is_verified_and_damage_after_a_snapshot_that_is_wrong_is_found_as_well(
    chain: Path,
) -> None:
    def damaged() -> dict[str, str]:
        found = verify_all(*chains_of(list_snapshots(chain).snapshots), progress=lambda rows: None)
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
