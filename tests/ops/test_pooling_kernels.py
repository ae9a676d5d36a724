"""What a step reads and writes of the rows of its lookups has the bits of the references, on every processor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from support import naive
from support.arithmetic import row_sum
from support.processors import (
    ON_EMULATED,
    ON_GPU,
    PROCESSORS,
    Make,
    cpu,
    instruction_set,
    instruction_sets,
    moved,
    names_of,
    on_host,
    processors,
    spec_of,
)
from support.rows import SPECIAL_KEYS, same_bits
from tierbed.engine.ops.batch import Gradients
from tierbed.engine.ops.cuda.step import MAX_OUTPUTS
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.row_format import to_float32, to_stored

pytestmark = pytest.mark.op

CHUNK = 4096  # positions of a native task
PADDING, SEED = 2, 7
FEATURES = (1, -1, 0)  # the column of each feature
TYPES = ["float32", "float16", "bfloat16"]
KINDS = ["rows", "bags", "jagged", "features"]
SGD = "sgd", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
# dim, type of rows, type of results and gradients: of a GPU few, each of which is a program to compile
SHAPES = [(17, "float32", "float32"), (64, "bfloat16", "float16"), (128, "float16", "bfloat16")]


class Part(NamedTuple):
    """A lookup, and the weights of its ids."""

    lookup: Lookup
    weights: Tensor | None = None

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Of the bags; a row is a bag of one."""
        ids, _, offsets, pooling, _ = self.lookup
        if offsets is not None:
            return offsets.numpy()
        return np.arange(self.bags + 1) * (1 if pooling is None else ids.shape[-1])

    @property
    def bags(self) -> int:
        return int(np.prod(self.lookup.shape)) if self.lookup.offsets is None else len(self.lookup.offsets) - 1

    def by_bag(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """values [*shape, dim] of the result -> [bags, dim], zeros of features that are not looked up."""
        if self.lookup.feature_columns is None:
            return values.reshape(-1, values.shape[-1])
        found = np.zeros((len(FEATURES), len(values), values.shape[-1]), np.float32)
        for feature, column in enumerate(FEATURES):
            if column >= 0:
                found[feature] = values[:, column]
        return found.reshape(-1, values.shape[-1])

    def tables(self, num_tables: int) -> NDArray[np.int64]:
        """Of each position, -1 where its feature is not looked up."""
        results = np.arange(2 if self.lookup.feature_columns else self.bags) % num_tables
        given = results if self.lookup.table_ids is None else self.lookup.table_ids.numpy().reshape(-1)
        if self.lookup.feature_columns is not None:
            of_feature = [-1 if column < 0 else given[column] for column in FEATURES]
            given = np.repeat(of_feature, self.bags // len(FEATURES))
        return given.astype(np.int64).repeat(np.diff(self.offsets))


def part(
    kind: str,
    lengths: list[int],
    seed: int = 0,
    tables: int = 3,
    named: bool = True,
    mean: bool = False,
    weighted: bool = False,
    keys: Sequence[int] = range(8),
) -> Part:
    """Bags of these lengths: of "bags" all are as long as the first; of "features" each feature has as many bags."""
    rng = np.random.default_rng(seed)
    if kind in ("rows", "bags"):
        lengths = ([1] if kind == "rows" else lengths[:1]) * len(lengths)
    elif kind == "features":
        lengths = rng.permutation(lengths * len(FEATURES)).tolist()
    ids = torch.from_numpy(rng.choice(np.array(keys, np.uint64), sum(lengths)).view(np.int64))
    owners = torch.from_numpy(rng.integers(0, tables, 2 if kind == "features" else len(lengths)))
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64) if kind in ("jagged", "features") else None
    if kind == "bags":
        ids = ids.view(len(lengths), lengths[0] if lengths else 2)
    pooling = None if kind == "rows" else "mean" if mean else "sum"
    weights = torch.from_numpy(rng.standard_normal(ids.shape, np.float32)) if weighted and pooling else None
    columns = FEATURES if kind == "features" else None
    return Part(Lookup(ids, owners if named else None, offsets, pooling, columns), weights)


@st.composite
def parts(draw: st.DrawFn, tables: int, keys: Sequence[int], kinds: Sequence[str] = KINDS) -> list[Part]:
    lengths = st.lists(st.integers(0, 5), max_size=7)
    flags = st.booleans(), st.booleans(), st.booleans()
    one = st.builds(part, st.sampled_from(kinds), lengths, st.integers(0, 99), st.just(tables), *flags, st.just(keys))
    return draw(st.lists(one, max_size=3))


def misaligned(grad: Tensor, place: torch.device) -> Tensor:
    """It begins one number behind where memory does."""
    return torch.cat([grad.new_zeros(1), grad.flatten()]).to(place)[1:].view(grad.shape)


def check(
    make: Make,
    given: list[Part],
    shape: tuple[int, str, str] = (2, "float32", "float32"),
    tables: int = 3,
    last: list[int] | None = None,
) -> None:
    """Which rows lookups have, results, gradients of weights, sums of gradients, and rows after a step.

    last: the last id of each table, if ids have numbers.
    """
    dim, stored, dtype = shape
    out = getattr(torch, dtype)
    rng = np.random.default_rng(0)
    spec = spec_of(dim, (stored, "float32"), tables, PADDING, last)
    keys = np.concatenate(
        [np.zeros(0, np.uint64)] + [one.lookup.ids.numpy().reshape(-1).view(np.uint64) for one in given]
    )
    owners = np.concatenate([np.zeros(0, np.int64)] + [one.tables(tables) for one in given])
    used = np.flatnonzero(owners >= 0)
    numbered = last is not None and sum(last) + tables <= 2**28 and all(one.lookup.feature_columns for one in given)
    unique = naive.unique(keys[used], owners[used].astype(np.uint32), PADDING, numbered)
    names = list(zip(unique.tables.tolist(), unique.keys.tolist(), strict=True))
    inverse = np.full(len(keys), -1, np.int32)
    inverse[used] = unique.inverse
    ends = np.cumsum([0] + [one.lookup.ids.numel() for one in given]).tolist()
    inverses = [inverse[begin:end] for begin, end in pairwise(ends)]
    written = rng.standard_normal((len(names), dim), np.float32)
    written[rng.random(written.shape) < 0.1] = -0.0
    rows = to_float32(to_stored(written, stored), stored)
    grads = [torch.from_numpy(rng.standard_normal((*one.lookup.shape, dim), np.float32)).to(out) for one in given]

    each = [np.zeros((0, dim), np.float32)]
    for one, grad, of_part in zip(given, grads, inverses, strict=True):
        of_bags = one.by_bag(grad.to(torch.float32).numpy())
        mean, weights = one.lookup.pooling == "mean", None if one.weights is None else one.weights.numpy().reshape(-1)
        each.append(naive.pool_grad(of_bags, of_part, one.offsets, mean, weights))
    sums = naive.reduce(np.concatenate(each), used[unique.occurrences], unique.occurrence_offsets)
    after = rows.copy()
    naive.update(after, np.ones(len(names), np.uint32), sums, *SGD)
    hashes = np.array([naive.hash_row(*name) for name in names], np.uint64)
    after = naive.trained(after, stored, naive.noise(SEED, hashes, 9, dim))

    def check_results(processor: object, batch: object, lookups: list[Lookup], rows: NDArray[np.float32]) -> None:
        for index, (one, lookup, rows_of) in enumerate(zip(given, lookups, inverses, strict=True)):
            mean, pooled, weights = lookup.pooling == "mean", lookup.pooling is not None, one.weights
            scales = None if weights is None else weights.numpy().reshape(-1)
            bags = naive.pool(rows, rows_of, one.offsets, mean, scales) if pooled else naive.gather(rows, rows_of)
            wanted = torch.from_numpy(bags).to(out).to(torch.float32)
            found = torch.full((*lookup.shape, dim), torch.nan, dtype=out, device=processor.device)
            given_weights = None if weights is None else weights.to(processor.device)
            assert processor.gather(batch, index, lookup, given_weights, out, found) is found
            same_bits(one.by_bag(found.cpu().to(torch.float32).numpy()), wanted.numpy())
            if pooled:
                slopes = processor.weights_grad(batch, index, lookup, grads[index].to(processor.device))
                of_bags = one.by_bag(grads[index].to(torch.float32).numpy())
                same_bits(on_host(slopes).reshape(-1), naive.weights_grad(rows, rows_of, one.offsets, of_bags, mean))

    def step(processor: object) -> None:
        store = processor.make_full_table("device")
        lookups = [moved(one.lookup, processor.device) for one in given]
        batch = processor.make_batch(lookups)
        order = [names.index(name) for name in names_of(processor, batch)]
        assert sorted(order) == list(range(len(names)))
        assert make is not cpu or order == sorted(order)
        found = on_host(batch.inverse)
        numbers = np.append(np.array(order, np.int32), -1)[found]  # -1 picks the last
        np.testing.assert_array_equal(numbers, inverse)
        place = processor.device
        weights = [None if one.weights is None else one.weights.to(place) for one in given]
        of_lookups = Gradients(lookups, [misaligned(grad, place) for grad in grads], weights, out)

        everything = processor.list_unique_rows(batch)
        plain = processor.make_batch([everything])
        store.pin(plain, None)
        processor.assign(plain, written[order], 3)
        store.unpin(plain, True)
        of_rest, rest = np.empty((0, dim), np.float32), None
        if last is None:  # rows of another batch, from its second on
            ids = torch.arange(2 + len(order), device=place) + 2**40
            rest = processor.make_batch([Lookup(ids, torch.zeros_like(ids))])
            given_rest = np.random.default_rng(3).standard_normal((len(ids), dim), np.float32)
            store.pin(rest, None)
            processor.assign(rest, given_rest, 3)
            of_rest = to_float32(to_stored(given_rest, stored), stored)[2:]
        store.pin(batch, None)
        check_results(processor, batch, lookups, rows)
        same_bits(on_host(processor.sum_gradients(batch, of_lookups)), sums[order])
        squares = on_host(processor.compute_squared_norms(batch, of_lookups))
        same_bits(squares[: len(order)], row_sum(sums * sums)[order, 0])
        places = np.random.default_rng(1).permutation(len(order) + 3)[: len(order)]
        target = torch.full((len(order) + 3, dim), 7.0, device=place)
        assert processor.sum_gradients(batch, of_lookups, places, target) is target
        same_bits(on_host(target)[places], sums[order])
        assert (np.delete(on_host(target), places, 0) == 7).all()

        sibling = processor.make_batch(lookups, batch)  # whose rows are those of a tensor, some of them another batch's
        assert names_of(processor, sibling) == [names[at] for at in order]
        assert not on_host(sibling.lines).any()
        here = len(order) if rest is None else len(order) // 2
        others = np.random.default_rng(2).standard_normal((here + 3, dim), np.float32)
        places = np.random.default_rng(1).permutation(here + 3 if rest is None else len(order) + 3)[: len(order)]
        wide = np.empty((len(order), dim), np.float32)
        wide[order] = np.concatenate([others, of_rest])[places]
        lines = torch.from_numpy(others).to(place, copy=True)  # the batch keeps it
        processor.set_lookup_rows(sibling, lines, places, None if rest is None else (rest, 2))
        check_results(processor, sibling, lookups, wide)

        processor.send_hyperparams(*SGD, 9)
        processor.update(batch, of_lookups, "sgd")
        assert processor.count_written(batch).sum() == len(names)
        store.unpin(batch, True)
        store.pin(plain, None)
        same_bits(on_host(processor.gather(plain, 0, everything, None, torch.float32)), after[order])

    for name in instruction_sets(make):
        with instruction_set(name):
            step(make(spec, RowState()))


@processors
@given(data=st.data(), tables=st.sampled_from([1, 3, 1000]), ids=st.sampled_from([1, 6, 30]))
def test_lookups_equal_the_references(make: Make, data: st.DataObject, tables: int, ids: int) -> None:
    types = st.sampled_from(TYPES)
    shapes = st.tuples(st.sampled_from([1, 3, 10, 17, 64, 128, 300]), types, types)
    shape = data.draw(shapes if make is cpu else st.sampled_from(SHAPES))
    check(make, data.draw(parts(tables, [*SPECIAL_KEYS, *range(20)][-ids:])), shape, tables)


@given(
    given=parts(3, range(6), ["features"]), last=st.lists(st.integers(5, 9) | st.just(2**20), min_size=3, max_size=3)
)
def test_rows_of_numbered_ids_equal_the_references(given: list[Part], last: list[int]) -> None:
    check(cpu, given, last=last)


def large(seed: int = 0) -> list[Part]:
    """Lookups of every kind, some of whose rows occur more often than a block of a sum has room."""
    keys = np.random.default_rng(seed).zipf(1.3, 3000) % 500
    lengths = np.random.default_rng(seed + 1).integers(0, 30, 60).tolist()
    return [part(kind, lengths * (10 if kind == "rows" else 1), seed, 3, True, True, True, keys) for kind in KINDS]


@processors
def test_no_lookups_no_ids_and_padding_alone(make: Make) -> None:
    for lookups in ([], [part("rows", [])], [part("jagged", [2, 0], keys=[PADDING])]):
        check(make, lookups, SHAPES[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [PROCESSORS[0], *ON_EMULATED, *ON_GPU])
@pytest.mark.rotated("shape")
def test_rows_with_many_occurrences_are_summed_in_blocks(make: Make, shape: tuple[int, str, str]) -> None:
    check(make, large(), shape)


BORDERS = {
    "a border in a bag of seven": [7] * 1300,
    "one bag over three chunks": [3, 3 * CHUNK, 1],
    "a bag that ends at the border": [CHUNK - 5, 5, 4],
    "empty bags at the border": [CHUNK, *[0] * 50, 1, 0, CHUNK, 0],
    "empty bags first and last": [*[0] * 30, CHUNK + 1, *[0] * 30],
    "empty bags on both sides of a bag over the border": [CHUNK - 1, 0, 0, 2, 0, 0, 9],
}


@pytest.mark.parametrize("named", [False, True], ids=["tables in turn", "table ids"])
@pytest.mark.parametrize("lengths", BORDERS.values(), ids=BORDERS)
@pytest.mark.rotated("threads")
def test_a_border_of_chunks_anywhere_among_bags(lengths: list[int], named: bool, threads: int) -> None:
    check(cpu, [part("jagged", lengths, named=named)])


def test_lookups_of_every_kind_are_the_same_for_any_threads(threads: int) -> None:
    check(cpu, [*large(), part("rows", [1] * CHUNK, keys=range(300))])


@pytest.mark.parametrize("most", [600, 2**27, 2**28])  # the last is too many for numbers
@pytest.mark.rotated("most")
def test_many_numbered_ids_are_the_same_for_any_threads(threads: int, most: int) -> None:
    lengths = np.random.default_rng(2).integers(0, 30, 200).tolist()
    check(cpu, [part("features", lengths, keys=range(500))], last=[500, 499, most])


@pytest.mark.parametrize("make", PROCESSORS[1:])
def test_more_lookups_than_a_kernel_takes_gradients_of(make: Make) -> None:
    check(make, [part("rows", [1] * 5, seed) for seed in range(MAX_OUTPUTS + 2)], SHAPES[0])
