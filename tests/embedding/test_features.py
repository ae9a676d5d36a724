"""Lookups of some features of feature-major offsets depart from plain lookups of the same bags."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tierbed
from support.cuda_tables import on_devices, tables_on
from support.embeddings import DIM, contents, make
from support.graphs import graph_of
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import EagerOptimizer, InputError


def build(graph: Any, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """A weighted lookup of three of four features, trained."""
    out = graph.rows(ids, [0, 2, 0], offsets, "mean", weights, features=[3, 0, 2], num_features=4)
    (out.square() / 2 + out).sum().backward()
    return out


@dataclass
class Jagged:
    """Ids of features [features * batch bags], some of which are looked up."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    features: list[int]
    tables: list[int]
    count: int  # of all features
    pooling: str

    @property
    def batch(self) -> int:
        return (len(self.offsets) - 1) // self.count

    def rows(self, embedding: Any, weights: Tensor | None) -> Tensor:
        return embedding(
            self.ids, self.tables, self.offsets, self.pooling, weights, features=self.features, num_features=self.count
        )

    def plainly(self, embedding: Any, weights: Tensor | None) -> Tensor:
        """The same by a plain lookup of the listed features' ids, in their order in memory."""
        ends = self.offsets.tolist()
        parts = [feature * self.batch + b for feature in sorted(self.features) for b in range(self.batch)]
        bags = [slice(*pair) for pair in pairwise(ends)]
        ids = torch.cat([self.ids[:0], *(self.ids[bags[part]] for part in parts)])
        chosen = None if weights is None else torch.cat([weights[:0], *(weights[bags[part]] for part in parts)])
        offsets = torch.tensor([0, *(ends[part + 1] - ends[part] for part in parts)]).cumsum(0).to(ids.device)
        table_of = dict(zip(self.features, self.tables, strict=True))
        owners = torch.tensor([table_of[part // self.batch] for part in parts], dtype=torch.int64, device=ids.device)
        out = embedding(ids, owners, offsets, self.pooling, chosen)
        columns = [sorted(self.features).index(feature) for feature in self.features]
        return out.view(len(self.features), self.batch, DIM)[columns].transpose(0, 1)


@st.composite
def jagged(draw: Any) -> Jagged:
    count, batch = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    features = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
    lengths = draw(st.lists(st.integers(0, 4), min_size=count * batch, max_size=count * batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    ids = torch.randint(-1, 7, (sum(lengths),), generator=generator)
    weights = torch.randn(len(ids), generator=generator) if draw(st.booleans()) else None
    tables = [draw(st.integers(0, 2)) for _ in features]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Jagged(ids, offsets, weights, list(features), tables, count, draw(st.sampled_from(["sum", "mean"])))


def step(out: Tensor, optimizer: EagerOptimizer) -> None:
    (out.float().square() / 2 + out.float()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(batch: Jagged, lookup: str, place: torch.device, dtype: torch.dtype) -> list[bytes]:
    """Two steps: results, gradients of weights, and in the end all rows."""
    with make(options("device"), padding_idx=-1, output_dtype=dtype, name=lookup).to(place) as embedding:
        optimizer = EagerOptimizer(tierbed.optim.RowWiseAdagrad(embedding.parameters(), lr=0.1), embedding)
        seen = []
        for _ in range(2):
            weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
            out = getattr(batch, lookup)(embedding, weights)
            step(out, optimizer)
            seen += [out.detach(), *([] if weights is None else [weights.grad])]
        return [value.cpu().contiguous().view(torch.uint8).numpy().tobytes() for value in seen] + [
            contents(embedding).tobytes()
        ]


@given(batch=jagged(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_features_have_the_bits_of_plain_bags(batch, dtype) -> None:
    place = torch.device("cpu")
    assert trained(batch, "rows", place, dtype) == trained(batch, "plainly", place, dtype)


@on_devices
def test_features_on_a_gpu_have_the_bits_of_the_cpu(device) -> None:
    batch = sample()
    expected = trained(batch, "rows", torch.device("cpu"), torch.float32)
    with tables_on(device) as place:
        there = Jagged(*(part.to(place) if isinstance(part, Tensor) else part for part in vars(batch).values()))
        assert trained(there, "rows", place, torch.float32) == expected


@on_devices
@pytest.mark.parametrize("offsets", [[0], [0, 9, -3, 2, 5], [0, 2**40, 2**33, -(2**50), 5]])
def test_bad_offsets_of_features_are_found_on_a_gpu(device, offsets) -> None:
    with tables_on(device) as place, make(options("device")).to(place) as embedding, torch.no_grad():
        ids, ends = torch.arange(5, device=place), torch.tensor(offsets, device=place)
        embedding(ids, [0, 1], ends, "sum", features=[1, 0])
        with pytest.raises(InputError, match="offsets of embedding 'rows': they do not ascend"):
            embedding.size()


def sample(seed: int = 0) -> Jagged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (4 * 6,), generator=generator)
    ids = torch.randint(50, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Jagged(ids, offsets, torch.randn(len(ids), generator=generator), [3, 0, 2], [0, 2, 0], 4, "mean")


@pytest.mark.parametrize("store", STORES)
def test_a_graph_trains_features_as_a_plain_loop_does_and_knows_them_ahead(store, tmp_path) -> None:
    batches = [sample(seed) for seed in range(4)]
    with make(options("device"), padding_idx=-1, name="eager") as eager:
        optimizer = EagerOptimizer(tierbed.optim.RowWiseAdagrad(eager.parameters(), lr=0.1), eager)
        expected = []
        for batch in batches:
            out = batch.rows(eager, batch.weights)
            step(out, optimizer)
            expected.append(out.detach())
        rows = contents(eager).tobytes()
    with make(options(store, tmp_path), padding_idx=-1) as embedding:
        graph = graph_of(build, tierbed.optim.RowWiseAdagrad(embedding.parameters(), lr=0.1), rows=embedding)
        given = ((batch.ids, batch.offsets, batch.weights) for batch in batches)
        outputs = list(graph.run(given, ahead=8))
        assert all(map(torch.equal, outputs, expected))
        assert contents(embedding).tobytes() == rows
        before = embedding.metrics()["table"]
        assert before["prefetch_misses"] == 0
        assert before["prefetch_hits"] >= len(batches) - 1  # the first compiles the step
        assert "(1, -1, 2, 0)" in repr(graph)
        batch = batches[0]  # announced with other features, it is not taken
        embedding.prefetch(batch.ids, batch.tables, batch.offsets, "mean", features=[0, 3, 2], num_features=4)
        plain = batch.rows(embedding, batch.weights)
        assert torch.equal(graph(batch.ids, batch.offsets, batch.weights), plain)
        assert embedding.metrics()["table"]["prefetch_misses"] == 1


TABLES_OF_FEATURES = "does not broadcast to the shape of the features"
MISTAKES = [
    ({"features": [0, 4]}, "features", "4 at position 1", "from 0 to 3, each once"),
    ({"features": [1, 1]}, "features", "1 at position 1", "from 0 to 3, each once"),
    ({"features": []}, "features", "got []"),
    ({"features": None}, "num_features", "got 4 without features"),
    ({"num_features": 0}, "num_features", "got 0"),
    ({"num_features": 5, "features": [0, 1]}, "offsets", "shape (25,) is not"),
    ({"offsets": None, "pooling": None}, "features", "a feature is a range of offsets"),
    ({"table_ids": [0, 1]}, f"shape (2,) {TABLES_OF_FEATURES}, (3,)"),
    ({"table_ids": None, "features": [0, 1]}, "give table_ids, one for each feature"),
    ({"table_ids": [0.0, 1.0, 2.0]}, "give whole numbers, or names of tables"),
    ({"table_ids": [0, 3, 0]}, "table id 3 at position 1", "from 0 to 2"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_wrong_features_are_told(mistake) -> None:
    batch, (arguments, *named) = sample(), mistake
    given = {"table_ids": 0, "offsets": batch.offsets, "pooling": "sum", "features": [3, 0, 2], "num_features": 4}
    embedding = make(options("device"))
    check_refusal((lambda: embedding(batch.ids, **{**given, **arguments}), InputError, "of embedding 'rows'", *named))


def test_tables_in_order_and_one_table_need_no_table_ids() -> None:
    batch = sample()
    several, one = make(options("device")), make(options("device"), tables=1)
    given = {"offsets": batch.offsets, "pooling": "sum", "features": [3, 0, 2], "num_features": 4}
    assert torch.equal(several(batch.ids, **given), several(batch.ids, table_ids=[0, 1, 2], **given))
    assert torch.equal(one(batch.ids, **given), several(batch.ids, table_ids=0, **given))
    assert several(batch.ids, **given).shape == (6, 3, DIM)
