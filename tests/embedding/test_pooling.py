"""Pooled and jagged lookups through the embedding: what they return, on every store, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import tierbed
from support.embeddings import DIM, contents, make
from support.graphs import embedding as one_of_four
from support.graphs import graph_of
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import EagerOptimizer, GraphError, InputError, MultiTableEmbedding
from tierbed.embedding.autograd import lookup_op as ops
from tierbed.engine.options.lookup import Lookup

pytestmark = pytest.mark.op

OP_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
JAGGED = torch.tensor([0, 3, 3, 4, 8, 10])
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("store", STORES)
def test_no_bag_gives_no_row_and_a_step_that_moves_none(tmp_path, store) -> None:
    with make(options(store, tmp_path)) as rows:
        optimizer = EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=0.1), rows)
        for tables, pooling, weighted in ((NONE, "sum", False), (NONE, "mean", True), (0, "sum", True)):
            rows.prefetch(NONE, tables, ZERO, pooling)
            out = rows(NONE, tables, ZERO, pooling, torch.empty(0, requires_grad=True) if weighted else None)
            assert out.shape == (0, DIM)
            out.sum().backward()
            optimizer.step()
            with torch.no_grad():
                assert rows(NONE, tables, ZERO, pooling).shape == (0, DIM)
        assert rows.size() == 0


def one_table(**more: Any) -> MultiTableEmbedding:
    return make(options("device"), tables=1, padding_idx=-1, **more)


def frozen(**more: Any) -> MultiTableEmbedding:
    embedding = one_table(**more)
    embedding.requires_grad_(False)
    return embedding


def drawn(*shape: int, first: int = -1, seed: int = 1) -> Tensor:
    return torch.randint(first, 9, shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from(["sum", "mean"]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_jagged_bags_equal_embedding_bag(lengths, pooling, weighted, seed) -> None:
    embedding = frozen()
    ids, offsets = drawn(sum(lengths), first=0, seed=seed), torch.tensor([0, *lengths]).cumsum(0)
    padded = torch.where(ids == 0, -1, ids)
    ours, theirs = (torch.linspace(-2, 3, len(ids)).requires_grad_() for _ in range(2))
    given = (ours, theirs) if weighted and pooling == "sum" else (None, None)
    expected = F.embedding_bag(
        ids,
        embedding.get(torch.arange(9)),
        offsets,
        mode=pooling,
        per_sample_weights=given[1],
        padding_idx=0,
        include_last_offset=True,
    )
    out = embedding(padded, offsets=offsets, pooling=pooling, weights=given[0])
    torch.testing.assert_close(out, expected)
    assert torch.equal(embedding(padded, offsets=offsets.to(torch.int32), pooling=pooling, weights=given[0]), out)
    if given[0] is not None:
        slope = torch.linspace(-1, 1, out.numel()).view_as(out)
        for result in (out, expected):
            (result * slope).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert ours.grad is not None
        assert not ours.grad[ids == 0].any()


def test_the_weights_of_a_mean_have_the_gradient_of_its_formula() -> None:
    embedding = frozen()
    ids = torch.tensor([[1, 2, -1], [3, 3, 4], [-1, -1, -1]])
    ours, theirs = (torch.linspace(-2, 3, 9).view(3, 3).requires_grad_() for _ in range(2))
    out = embedding(ids, pooling="mean", weights=ours)
    expected = (embedding(ids) * theirs[..., None]).sum(1) / torch.tensor([[2.0], [3.0], [1.0]])
    torch.testing.assert_close(out, expected)
    assert torch.autograd.gradcheck(
        lambda w: embedding(ids, pooling="mean", weights=w.float()).double(), ours.double(), eps=1e-2, atol=1e-3
    )
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_bag_is_of_one_table() -> None:
    embedding = make(options("device"), padding_idx=-1)
    for shape in [(4, 3, 5), (2, 3, 3, 2), (0, 3, 2), (2, 3, 0)]:
        ids = drawn(*shape)
        expected = embedding(ids, torch.tensor([0, 1, 2])[:, None]).sum(-2)
        torch.testing.assert_close(embedding(ids, pooling="sum"), expected)
        torch.testing.assert_close(embedding(ids, torch.tensor([0, 1, 2]), pooling="sum"), expected)
        torch.testing.assert_close(embedding(ids, 2, pooling="sum")[..., 2, :], expected[..., 2, :])
        means = expected / (ids != -1).sum(-1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(embedding(ids, pooling="mean"), means)
    ids, tables = drawn(4, 5), torch.tensor([2, 0, 1, 2])
    jagged = embedding(ids.flatten(), tables.tolist(), torch.arange(0, 21, 5), "sum")
    torch.testing.assert_close(jagged, embedding(ids, tables[:, None]).sum(1))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_output_dtype_is_float32_rounded_once_and_no_part_of_what_is_stored(dtype, tmp_path) -> None:
    full, half = frozen(), frozen(output_dtype=dtype)
    ids = drawn(6, 4)
    for pooling in (None, "sum", "mean"):
        out = half(ids, pooling=pooling)
        assert out.dtype == dtype
        assert torch.equal(out, full(ids, pooling=pooling).to(dtype))
    assert torch.equal(half.get(ids), full.get(ids))  # rows themselves stay float32
    weights = torch.ones(6, 4, requires_grad=True)
    half(ids, pooling="sum", weights=weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32
    with make(options("host", tmp_path), tables=1, output_dtype=dtype) as embedding:
        embedding.put([1], torch.full((1, DIM), 1.001))
    with make(options("host", tmp_path), tables=1) as embedding:
        assert torch.equal(embedding(torch.tensor([1])), torch.full((1, DIM), 1.001))


@pytest.mark.parametrize("store", STORES)
def test_training_on_bags_is_bit_identical_on_every_store(store, tmp_path) -> None:
    def run(name: str, path: Path) -> bytes:
        generator = torch.Generator().manual_seed(4)
        with make(options(name, path), "adam", padding_idx=-1) as embedding:
            for _ in range(4):
                ids = torch.randint(-1, 60, (10, 3, 4), generator=generator)
                weights = torch.randn(10, generator=generator)
                jagged = Lookup(ids[:, 0, 0].contiguous(), torch.arange(5) % 3, JAGGED, "mean")
                pinned = embedding.pin([Lookup(ids, None, None, "sum"), jagged, Lookup(ids[..., 1])])
                rows = [pinned.gather(0), pinned.gather(1, weights), pinned.gather(2)]
                assert torch.equal(pinned.weights_grad(1, rows[1]), embedding.read_weights_grad(jagged, rows[1]))
                pinned.update([row.sin() for row in rows], [None, weights, None])
            return contents(embedding).tobytes()

    assert run(store, tmp_path / "ours") == run("device", tmp_path / "expected")


NONE, ZERO = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def test_a_mean_over_no_bags_names_its_line_and_a_division_of_builds_own_keeps_its_type() -> None:
    rows, net = one_of_four(), nn.Linear(4, 1)

    def build(graph: Any, ids: Tensor, offsets: Tensor, own: bool) -> Tensor:
        out = graph.net(graph.rows(ids, offsets=offsets, pooling="sum"))
        loss = out.sum() * (1 / len(out)) if own else F.mse_loss(out, torch.ones_like(out))
        loss.backward()
        return loss

    graph = graph_of(build, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.1), rows=rows, net=net)
    with pytest.raises(GraphError, match=r"test_pooling\.py.*in build: `loss\.backward\(\)` makes torch divide by"):
        graph(NONE, ZERO, False)
    with pytest.raises(ZeroDivisionError):
        graph(NONE, ZERO, True)
    graph(torch.tensor([1]), torch.tensor([0, 1]), False)
    assert rows.size() == 1


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


BAGS = {"pooling": "sum"}
MISTAKES = [
    ({"pooling": "max"}, "pooling", "got 'max'", "'sum' or 'mean'"),
    ({"offsets": ints(3)}, "offsets", "pooling=None", "pooling='sum'"),
    (BAGS | {"ids": ints()}, "ids", "pooling='sum' pools over the last dimension"),
    (BAGS | {"offsets": [0, 4]}, "offsets", "got list", "1-D torch.Tensor of int64 or int32"),
    (BAGS | {"offsets": ints(2, 2)}, "offsets", "got torch.int64 (2, 2)", "1-D"),
    (BAGS | {"offsets": ints(0)}, "offsets", "shape (0,)", "bags + 1 offsets"),
    (BAGS | {"offsets": ints(2).to_sparse()}, "offsets", "torch.sparse_coo", "to_dense"),
    (BAGS | {"offsets": ints(2).to("meta")}, "offsets", "on meta", "offsets.to(ids.device)"),
    (BAGS | {"ids": ints(2, 2), "offsets": ints(2)}, "ids", "shape (2, 2) with offsets", "ids.flatten"),
    (BAGS | {"table_ids": None, "offsets": ints(2)}, "ids", "which of 3 tables", "give table_ids, one for"),
    (BAGS | {"ids": ints(3, 4), "table_ids": None}, "shape (3, 4) is not (..., 3, L)", "the table of each bag"),
    (BAGS | {"ids": ints(5, 4), "table_ids": ints(4)}, "table_ids", "(4,)", "bags, (5,)"),
    (BAGS | {"offsets": torch.tensor([1, 4])}, "offsets", "first is 1"),
    (BAGS | {"offsets": torch.tensor([0, 3])}, "offsets", "last is 3", "4, the number of ids"),
    (BAGS | {"offsets": torch.tensor([0, 3, 2, 4])}, "offsets", "3 at position 1 is followed by 2"),
    ({"weights": torch.ones(4)}, "weights", "pooling=None", "pooling='sum'"),
    (BAGS | {"weights": [1.0] * 4}, "weights", "got list; give torch.float32", "(4,)"),
    (BAGS | {"weights": torch.ones(4).double()}, "weights", "got torch.float64 (4,)"),
    (BAGS | {"weights": torch.ones(4).to_sparse()}, "weights", "torch.sparse_coo", "to_dense"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_named_and_change_nothing(mistake) -> None:
    arguments, *named = mistake
    embedding = make(options("device"))
    good: dict[str, Any] = {"ids": ints(4), "table_ids": 0}
    check_refusal((lambda: embedding(**{**good, **arguments}), InputError, "of embedding 'rows'", *named))
    assert embedding(**good).shape == (4, DIM)


def test_bad_offsets_and_table_ids_pin_nothing() -> None:
    with make(options("cached_host"), "sgd") as embedding:
        good = Lookup(ints(4), ints(4))
        for bad in (
            Lookup(ints(4), ints(1), torch.tensor([0, 3]), "sum"),
            Lookup(ints(4), ints(1) + 3, torch.tensor([0, 4]), "sum"),
        ):
            pinned = embedding.pin([good])
            with pytest.raises(InputError):
                embedding.pin([good, bad])
            with pytest.raises(tierbed.StoreError, match="no longer pinned"):
                pinned.gather(0)
            assert embedding.size() == 0
        embedding.pin([good]).update([torch.ones(4, DIM)])
        assert embedding.size() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.rotated("dtype")
def test_ops_are_as_their_fakes_say(dtype, weighted) -> None:
    embedding, weights = frozen(output_dtype=dtype), torch.rand(10, requires_grad=True) if weighted else None
    shadow, number = embedding.shadow, embedding.embedding_id
    for offsets, features in ((None, None), (JAGGED, None), (JAGGED.to(torch.int32), [1, -1, -1, 0, -1])):
        pooled = (ints(10), None, offsets, "mean", features)
        torch.library.opcheck(ops.lookup, (shadow, *pooled, weights, number), test_utils=OP_CHECKS)
        bags = JAGGED[1:].shape if offsets is not None else ()
        if weighted and features is None:
            grads = torch.ones(*bags, DIM, dtype=dtype)
            torch.library.opcheck(ops.lookup_weights_grad, (grads, *pooled, shadow, number), test_utils=OP_CHECKS)
