"""A batch that another table's ids were taken from changes when work is done, never a row or a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from support.cuda_tables import on_devices, on_processors, tables_on
from support.embeddings import DIM, TABLES, attach, contents
from support.examples import examples
from support.stores import STORES, options
from tierbed import CapacityError, InputError, MultiTableEmbedding
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.table.table import PinnedBatch

CPU = torch.device("cpu")
PADDING = 3


class Part(NamedTuple):
    """A lookup as lists: ids, the table of each row of the result; bags by their length or offsets."""

    ids: list[int]
    tables: list[int]
    bags: int | list[int] | None
    pooling: str | None

    def lookup(self, place: torch.device) -> Lookup:
        ids, tables = (torch.tensor(values, dtype=torch.int64, device=place) for values in self[:2])
        if isinstance(self.bags, int):
            return Lookup(ids.view(-1, self.bags), tables, None, self.pooling)
        return Lookup(ids, tables, None if self.bags is None else torch.tensor(self.bags, device=place), self.pooling)

    def weights(self, place: torch.device) -> Tensor | None:
        if self.pooling is None:
            return None
        return 0.25 + torch.arange(len(self.ids), device=place).view(self.lookup(place).ids.shape) / 8


@st.composite
def parts(draw: st.DrawFn) -> Part:
    ids = draw(st.lists(st.integers(0, 40) | st.sampled_from([-1, 2**63 - 1, -(2**63)]), max_size=24))
    kind = draw(st.sampled_from(["plain", "bags", "jagged"]))
    bags: int | list[int] | None = None
    count = len(ids)
    if kind == "bags":
        bags = draw(st.integers(1, 4))
        ids = ids[: len(ids) // bags * bags]
        count = len(ids) // bags
    elif kind == "jagged":
        bags = [0, *sorted(draw(st.lists(st.integers(0, len(ids)), max_size=4))), len(ids)]
        count = len(bags) - 1
    tables = draw(st.lists(st.integers(0, len(TABLES) - 1), min_size=count, max_size=count))
    return Part(ids, tables, bags, None if kind == "plain" else draw(st.sampled_from(["sum", "mean"])))


steps = st.lists(st.lists(parts(), min_size=1, max_size=3), min_size=1, max_size=4)


class Pair:
    """Two embeddings of other widths and rules, each with options of its own."""

    def __init__(
        self, shared: bool, where: Callable[[str], Any] = lambda _: options("device"), place: torch.device = CPU
    ) -> None:
        """where: the store options by the name of an embedding."""
        self.shared, self.place = shared, place
        self.both: list[MultiTableEmbedding] = []
        for dim, optimizer in ((1, "adam"), (DIM, "catch-up")):
            name = f"{optimizer}{shared}"
            rows = MultiTableEmbedding(
                name, dim, torch.float32, torch.int64, TABLES, where(name), padding_idx=PADDING, seed=0
            ).to(place)
            attach(rows, optimizer)
            self.both.append(rows)

    def pin(self, given: list[Part]) -> list[PinnedBatch]:
        narrow, wide = self.both
        lookups = [part.lookup(self.place) for part in given]
        first = narrow.pin(lookups)
        return [first, wide.pin(lookups, first if self.shared else None)]

    def step(self, given: list[Part]) -> list[bytes]:
        """The bits of all that a step may compute of rows."""
        weights = [part.weights(self.place) for part in given]
        seen: list[Tensor] = []
        for batch in self.pin(given):
            rows = [batch.gather(i, scale) for i, scale in enumerate(weights)]
            grads = [row.cpu().sin().to(self.place) + row / 8 + 0.5 for row in rows]  # a GPU's sine has other bits
            seen += rows + [batch.weights_grad(i, grads[i]) for i, scale in enumerate(weights) if scale is not None]
            seen.append(torch.tensor(batch.compute_squared_norm(grads, weights)))
            batch.update(grads, weights, 0.5)
        return [value.cpu().numpy().tobytes() for value in seen]

    def contents(self) -> list[bytes]:
        return [contents(rows).tobytes() for rows in self.both]

    def close(self) -> None:
        for rows in self.both:
            rows.close()


def check(given: list[list[Part]], *pairs: Pair) -> None:
    """Steps of all pairs give the same."""
    try:
        for step in given:
            expected, *others = (pair.step(step) for pair in pairs)
            assert all(other == expected for other in others)
        expected, *others = (pair.contents() for pair in pairs)
        assert all(other == expected for other in others)
    finally:
        for pair in pairs:
            pair.close()


@on_processors
@pytest.mark.parametrize("store", STORES)
@examples(0.1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=steps)
@pytest.mark.rotated("store")
def test_steps_are_those_without_sharing(
    tmp_path_factory: pytest.TempPathFactory, place: torch.device, store: str, given: list[list[Part]]
) -> None:
    path = tmp_path_factory.mktemp("rows")
    check(given, Pair(True, lambda name: options(store, path / name), place), Pair(False, place=place))


def large(seed: int) -> list[Part]:
    """More positions than a native task has."""
    rng = np.random.default_rng(seed)
    ids, tables = rng.integers(0, 3000, 9000).tolist(), rng.integers(0, 3, 9000).tolist()
    return [Part(ids, tables, None, None), Part(ids[:9000], tables[:3000], 3, "mean")]


def test_any_number_of_threads_gives_the_same(native_threads: Callable[[int], None]) -> None:
    pairs = [Pair(shared) for shared in (True, True, False)]
    for seed in range(2):
        seen = []
        for threads, pair in zip((1, 16, 2), pairs, strict=True):
            native_threads(threads)
            seen.append(pair.step(large(seed)))
        assert seen[0] == seen[1] == seen[2]
    assert pairs[0].contents() == pairs[1].contents() == pairs[2].contents()


@pytest.mark.parametrize("store", ["device", "cached_host"])
@pytest.mark.parametrize(
    ("rule", "limits"), [("adam", {"admission": 0.5}), ("catch-up", {"capacity": 95, "eviction": "lru"})]
)
def test_rows_that_one_table_keeps_out_are_in_the_other(store: str, rule: str, limits: dict[str, Any]) -> None:
    def where(name: str) -> Any:
        return options(store, **(limits if name.startswith(rule) else {}))

    ids = [list(range(step, 90, step + 1)) for step in range(5)]
    check([[Part(part, [0] * len(part), None, None)] for part in ids], Pair(True, where), Pair(False, where))


@pytest.mark.parametrize("end", ["update", "release", "drop"])
def test_the_batch_may_be_over_before_it_is_taken(end: str) -> None:
    seen = []
    for shared in (True, False):
        pair = Pair(shared)
        narrow, wide = pair.both
        lookups = [part.lookup(CPU) for part in large(0)]
        first = narrow.pin(lookups)
        if end == "update":
            first.update([torch.ones(*lookup.shape, 1) for lookup in lookups])
        elif end == "release":
            first.unpin_rows()
        second = wide.pin(lookups, first if shared else None)
        if end == "drop":
            del first
            narrow.close()
        rows = [second.gather(index) for index in range(2)]
        second.update(rows)
        seen.append([*(row.numpy().tobytes() for row in rows), contents(wide).tobytes()])
    assert seen[0] == seen[1]


def test_a_batch_made_ahead_comes_first() -> None:
    pair, plain = Pair(True), Pair(False)
    wide = pair.both[1]
    for seed in range(3):
        wide.announce([part.lookup(CPU) for part in large(seed)])
        assert pair.step(large(seed)) == plain.step(large(seed))
    assert wide.metrics()["table"]["prefetch_hits"] == 3
    assert pair.contents() == plain.contents()
    wide.forget_announced()


@on_devices
@pytest.mark.parametrize("store", ["device", "cached_host"])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part([1, 2], [0, 3], None, None), "table_ids of embedding '{}': one is not from 0 to 2"),
        (Part([1, 2], [0], [0, 1], "sum"), "offsets of embedding '{}': they do not ascend"),
    ],
)
def test_bad_ids_are_refused_by_both_tables(device: Device, store: str, part: Part, message: str) -> None:
    good = [Part([1, 2, 9], [0, 1, 2], None, None)]
    with tables_on(device) as place:
        pair = Pair(True, lambda _: options(store), place)
        pair.step(good)
        before = pair.contents()
        pair.step([part])
        if place.type == "cuda":
            torch.cuda.synchronize(place)  # so that what it found has arrived
        for rows in pair.both:
            with pytest.raises(InputError, match=message.format(rows.name)):
                pair.step(good)
        assert pair.contents() == before


@on_devices
def test_a_table_without_room_stops_no_other(device: Device) -> None:
    good, more = [Part([1, 2], [0, 1], None, None)], [Part([1, 2, 9], [0, 1, 2], None, None)]
    expected = Pair(False)
    expected.step(good)
    expected.step(more)
    with tables_on(device) as place:
        pair = Pair(True, lambda name: options("device", capacity=2 if name.startswith("adam") else 9), place)
        pair.step(good)
        pair.step(more)
        narrow, wide = pair.both
        assert contents(wide).tobytes() == contents(expected.both[1]).tobytes()
        with pytest.raises(CapacityError, match="capacity of embedding 'adamTrue'"):
            narrow.get([1], 0)
