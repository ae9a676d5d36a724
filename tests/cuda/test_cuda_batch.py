from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from support.cuda_tables import DeviceTable, HostSegment, array, on_devices, tensor
from support.rows import SPECIAL_KEYS, Table
from tierbed.engine.ops.cuda.device import Device

NO_ROOM, BAD_TABLE, BAD_OFFSETS = 1, 2, 4


def positions_of(segments: list[HostSegment], num_tables: int) -> list[tuple[int, int, int]]:
    """(table, key, output row) of each position."""
    result, source = [], 0
    for keys, tables, bags in segments:
        if bags is None:
            bounds = range(len(keys) + 1)
        elif isinstance(bags, int):
            bounds = range(0, len(keys) + 1, bags)
        else:
            bounds = bags
        for bag, (begin, end) in enumerate(pairwise(bounds)):
            table = bag % num_tables if tables is None else tables[bag]
            result += [(table, keys[i], source + bag) for i in range(begin, end)]
        source += len(bounds) - 1
    return result


def check(device: Device, segments: list[HostSegment], num_tables: int, padding: int | None = None) -> None:
    """Unique rows by first occurrence, their occurrences ascending, computed by a Python dict."""
    table = DeviceTable(device, Table([2], tables=num_tables))
    batch = table.batch(segments, padding)
    positions = positions_of(segments, num_tables)
    expected: dict[tuple[int, int], list[int]] = {}
    for position, (owner, key, _) in enumerate(positions):
        if key != padding:
            expected.setdefault((owner, key), []).append(position)
    assert (batch.size, batch.unique) == (len(positions), len(expected))
    assert table.identities(batch) == list(expected)
    inverse = np.full(len(positions), -1, np.int32)
    for row, occurrences in enumerate(expected.values()):
        inverse[occurrences] = row
    np.testing.assert_array_equal(array(batch.inverse, np.int32), inverse)
    sibling = batch.sibling(table.faults)
    groups = sibling.groups
    assert batch.groups is groups
    assert batch.lines.data_ptr() != sibling.lines.data_ptr() or not positions
    offsets = array(groups.offsets, np.uint32)[: len(expected) + 1].tolist()
    order, sources = array(groups.positions, np.uint32).tolist(), array(groups.sources, np.uint32).tolist()
    grouped = [order[begin:end] for begin, end in pairwise(offsets)]
    assert grouped == list(expected.values())
    pooled = any(bags is not None for _, _, bags in segments)
    assert sources == [positions[position][2] if pooled else position for position in order]
    assert int(table.faults) == 0


@on_devices
@pytest.mark.parametrize("padding", [None, 3])
def test_random_segments(device: Device, padding: int | None) -> None:
    rng = np.random.default_rng(0)
    for num_tables in (1, 3, 1000):
        pool = np.concatenate([np.array(SPECIAL_KEYS, np.uint64), rng.integers(0, 2**64, 20, np.uint64)])
        keys = [int(key) for key in rng.choice(pool, 120)]
        tables = rng.integers(0, num_tables, 60).tolist()
        segments: list[HostSegment] = [
            (keys[:60], tables, None),
            (keys[60:90], None, None),
            (keys[:90], tables[:30], 3),
            (keys[30:], tables[:5], [0, 0, 40, 41, 90, 90]),
            ([], [], None),
        ]
        check(device, segments, num_tables, padding)


@on_devices
@pytest.mark.parametrize(
    "keys",
    [[], [5], [5] * 300, list(range(300)), SPECIAL_KEYS * 3, [2**64 - 1] * 40],
    ids=["empty", "one", "all equal", "all new", "special", "all padding"],
)
def test_extreme_batches(device: Device, keys: list[int]) -> None:
    check(device, [(keys, [0] * len(keys), None)], 1, padding=2**64 - 1)


@on_devices
def test_no_segments(device: Device) -> None:
    check(device, [], 1)
    check(device, [([], None, None), ([], [], [0]), ([], None, 4)], 4)


@on_devices
@pytest.mark.parametrize("wrong", [4, -1, 2**40])
def test_a_bad_table_id_sets_a_fault_and_is_no_row(device: Device, wrong: int) -> None:
    table = DeviceTable(device, Table([2], tables=4))
    batch = table.batch([([7, 8, 9], [0, wrong, 3], None)])
    assert table.identities(batch) == [(0, 7), (3, 9)]
    assert int(table.faults) == BAD_TABLE


@on_devices
@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 1, 2, 5], [0, -5, 2, 4], [0, 9, 4, 4]])
def test_bad_offsets_set_a_fault_and_are_safe_to_follow(device: Device, offsets: list[int]) -> None:
    table = DeviceTable(device, Table([2], tables=1))
    batch = table.batch([([7, 8, 9, 7], None, offsets)])
    assert int(table.faults) == BAD_OFFSETS
    begins = batch.lookups[0].begins
    assert begins is not None
    assert all(0 <= begin <= 4 for begin in begins.tolist())


@on_devices
def test_the_faults_of_shared_ids_are_of_each_table_and_no_others(device: Device) -> None:
    table = DeviceTable(device, Table([2], tables=4))
    others = [tensor(device, [NO_ROOM], np.uint32), tensor(device, [BAD_OFFSETS], np.uint32)]
    bad = table.batch([([7, 8, 9], [0, 4, 3], None)])
    good = table.batch([([7, 8, 9], [0, 1, 3], None)])
    for faults, batch in zip(others, (bad, good), strict=True):
        batch.sibling(faults)
    assert [int(faults) for faults in (table.faults, *others)] == [BAD_TABLE, NO_ROOM | BAD_TABLE, BAD_OFFSETS]
