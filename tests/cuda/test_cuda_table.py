from __future__ import annotations

import numpy as np
import pytest

from support.cuda_tables import DeviceTable, array, on_devices
from support.rows import SPECIAL_KEYS, Table, same_bits
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.ops.cuda.step import count_written, initialise_missing

NO_ROOM = 1


@on_devices
@pytest.mark.parametrize(
    ("columns", "state_widths"), [([1], [1, 1]), ([5], [5, 5]), ([17, 23], [40, 1]), ([128], [128, 128])], ids=str
)
def test_missing_rows_are_inserted_with_initial_values_and_found_again(
    device: Device, columns: list[int], state_widths: list[int]
) -> None:
    host = Table(columns, [0.5, 0.25], state_widths=state_widths)
    table = DeviceTable(device, host)
    keys, tables = SPECIAL_KEYS * 3, np.repeat(np.arange(3), len(SPECIAL_KEYS)).tolist()
    batch = table.batch([(keys, tables, None)])
    ranks = table.store.find(batch)
    assert int(ranks[-1]) == batch.unique == 3 * len(SPECIAL_KEYS)
    assert not batch.lines[: batch.unique].any()
    assert int(count_written(table.layout, batch, batch.lines).sum()) == 0
    table.store.insert_missing(batch, ranks)
    table.store.count(batch, ranks)
    assert len(set(batch.lines.tolist())) == batch.unique
    floats, records = table.read(batch.lines)
    same_bits(floats, host.initial(array(batch.tables, np.uint32), array(batch.keys, np.uint64)))
    assert not records.any()
    again = table.batch([(keys[::-1], tables[::-1], None)])
    assert int(table.store.find(again)[-1]) == 0
    where = dict(zip(table.identities(batch), batch.lines.tolist(), strict=True))
    assert [where[row] for row in table.identities(again)] == again.lines.tolist()
    assert table.store.counts() == {"resident_rows": len(keys), "hits": 0, "misses": len(keys), "insertions": len(keys)}


@on_devices
def test_a_table_grows_and_loses_nothing(device: Device) -> None:
    host = Table([3])
    table = DeviceTable(device, host)
    rng = np.random.default_rng(0)
    where: dict[tuple[int, int], int] = {}
    for _ in range(12):
        keys, tables = rng.integers(0, 3000, 400, np.uint64), rng.integers(0, host.tables, 400)
        batch = table.pinned([(keys.tolist(), tables.tolist(), None)])
        for row, line in zip(table.identities(batch), batch.lines.tolist(), strict=False):
            assert where.setdefault(row, line) == line
    assert len(set(where.values())) == len(where) == table.store.counts()["resident_rows"]
    hashes, tables_, lines, updates = table.store.rows()
    assert sorted(lines.tolist()) == sorted(where.values())
    assert not updates.any()
    floats, _ = table.read(lines)
    keys_of = {line: row for row, line in where.items()}
    rows = [keys_of[line] for line in lines.tolist()]
    assert [table for table, _ in rows] == tables_.tolist()
    initial = host.initial(np.array([t for t, _ in rows], np.uint32), np.array([k for _, k in rows], np.uint64))
    same_bits(floats, initial)
    assert len(hashes) == len(rows)


@on_devices
@pytest.mark.parametrize("capacity", [1, 3, 64, 100])
def test_a_full_table_takes_nothing_of_a_batch_that_does_not_fit(device: Device, capacity: int) -> None:
    table = DeviceTable(device, Table([5], tables=1), capacity)
    size = table.store.bytes
    table.pinned([(list(range(capacity)), None, None)])
    assert int(table.faults) == 0
    batch = table.pinned([(list(range(1, capacity + 1)), None, None)])
    assert int(table.faults) == NO_ROOM
    assert table.read(batch.lines)[0].any(axis=1).tolist() == [True] * (capacity - 1) + [False]
    assert table.store.counts()["resident_rows"] == capacity
    table.faults.zero_()  # raised
    table.pinned([(list(range(capacity)), None, None)])
    assert int(table.faults) == 0
    assert table.store.bytes == size


@on_devices
def test_unknown_rows_are_served_from_memory_of_the_batch(device: Device) -> None:
    host = Table([3, 2])
    table = DeviceTable(device, host)
    table.pinned([([1, 2], [0, 0], None)])
    batch = table.batch([([1, 3, 2, 4], [0, 0, 0, 1], None)])
    table.store.find(batch)
    assert batch.lines.ne(0).tolist() == [True, False, True, False]
    initialise_missing(batch, table.layout)
    floats, _ = table.read(batch.lines)
    same_bits(floats, host.initial(array(batch.tables, np.uint32), array(batch.keys, np.uint64)))
    assert table.store.counts()["resident_rows"] == 2


@on_devices
def test_an_empty_batch_changes_nothing(device: Device) -> None:
    table = DeviceTable(device, Table([5]))
    for segments in ([], [([], [], None)]):
        batch = table.pinned(segments)
        assert int(count_written(table.layout, batch, batch.lines).sum()) == 0
    assert table.store.counts() == {"resident_rows": 0, "hits": 0, "misses": 0, "insertions": 0}


@on_devices
def test_erased_rows_are_gone_and_their_lines_serve_new_rows(device: Device) -> None:
    host = Table([3])
    table = DeviceTable(device, host, 512)
    rng = np.random.default_rng(3)
    resident: set[tuple[int, int]] = set()
    inserted = 0
    for round in range(8):
        keys, tables = rng.integers(0, 300, 250, np.uint64), rng.integers(0, 2, 250)
        batch = table.pinned([(keys.tolist(), tables.tolist(), None)])
        rows = table.identities(batch)
        inserted += len(set(rows) - resident)
        resident |= set(rows)
        assert int(table.faults) == 0
        same_bits(
            table.read(batch.lines[: len(rows)])[0],
            host.initial(np.array([t for t, _ in rows], np.uint32), np.array([k for _, k in rows], np.uint64)),
        )
        keys, tables = rng.integers(0, 300, 20 if round % 2 else 400, np.uint64), rng.integers(0, 2, 20)
        batch = table.batch([(keys.tolist(), np.resize(tables, len(keys)).tolist(), None)])
        table.store.find(batch)
        table.store.erase(batch, batch.lines)
        resident -= set(table.identities(batch))
        lines = table.store.rows()[2]
        there = lines != 0
        assert len(set(lines[there].tolist())) == there.sum() == len(resident)
        counts = table.store.counts()
        assert (counts["resident_rows"], counts["insertions"]) == (len(resident), inserted)
        every = [(t, k) for t in range(2) for k in range(300)]
        batch = table.batch([([k for _, k in every], [t for t, _ in every], None)])
        table.store.find(batch)
        found = {row for row, line in zip(table.identities(batch), batch.lines.tolist(), strict=True) if line}
        assert found == resident
