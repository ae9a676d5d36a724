"""Pooled and jagged lookups through the embedding: what they return, on every store, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import tierbed
from support.embeddings import DIM, contents, make
from support.stores import STORES, options
from tierbed import GraphError, InputError, MultiTableEmbedding, OptionError
from tierbed.embedding.autograd import lookup_op as ops
from tierbed.engine.options.lookup import Lookup

pytestmark = pytest.mark.op

OP_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
JAGGED = torch.tensor([0, 3, 3, 4, 8, 10])


def one_table(**more: Any) -> MultiTableEmbedding:
    return make(options("device"), tables=1, padding_idx=-1, **more)


def frozen(**more: Any) -> MultiTableEmbedding:
    embedding = one_table(**more)
    embedding.requires_grad_(False)
    return embedding


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(["sum", "mean"]), st.integers(0, 2**32))
def test_jagged_bags_equal_embedding_bag(lengths: list[int], pooling: str, seed: int) -> None:
    embedding = one_table()
    ids = torch.randint(0, 9, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    expected = F.embedding_bag(
        ids, embedding.get(torch.arange(9)), offsets, mode=pooling, padding_idx=0, include_last_offset=True
    )
    padded = torch.where(ids == 0, -1, ids)
    torch.testing.assert_close(embedding(padded, offsets=offsets, pooling=pooling), expected)
    assert torch.equal(
        embedding(padded, offsets=offsets.to(torch.int32), pooling=pooling),
        embedding(padded, offsets=offsets, pooling=pooling),
    )


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (7,), (3, 1), (2, 0), (0, 3), (0,)])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_of_one_length_are_the_last_dimension(shape: tuple[int, ...], pooling: str) -> None:
    embedding = one_table()
    ids = torch.randint(-1, 9, shape, generator=torch.Generator().manual_seed(1))
    rows = embedding(ids)
    expected = rows.sum(-2)
    if pooling == "mean":
        expected = expected / (ids != -1).sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(embedding(ids, pooling=pooling), expected)
    assert expected.shape == (*shape[:-1], DIM)


def test_weighted_sums_and_their_gradients_equal_embedding_bag() -> None:
    embedding = frozen()
    ids = torch.randint(0, 9, (10,), generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.linspace(-2, 3, 10).requires_grad_() for _ in range(2))
    expected = F.embedding_bag(
        ids,
        embedding.get(torch.arange(9)),
        JAGGED,
        mode="sum",
        per_sample_weights=theirs,
        padding_idx=0,
        include_last_offset=True,
    )
    out = embedding(torch.where(ids == 0, -1, ids), offsets=JAGGED, pooling="sum", weights=ours)
    torch.testing.assert_close(out, expected)
    slope = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * slope).sum().backward()
    (expected * slope).sum().backward()
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
    ids = torch.randint(-1, 9, (4, 3, 5), generator=torch.Generator().manual_seed(1))
    expected = embedding(ids, torch.tensor([0, 1, 2])[:, None]).sum(2)
    torch.testing.assert_close(embedding(ids, pooling="sum"), expected)
    torch.testing.assert_close(embedding(ids, torch.tensor([0, 1, 2]), pooling="sum"), expected)
    torch.testing.assert_close(embedding(ids, 2, pooling="sum")[:, 2], expected[:, 2])
    jagged = embedding(ids[:, 0].flatten(), [2, 0, 1, 2], torch.arange(0, 21, 5), "sum")
    tables = torch.tensor([2, 0, 1, 2])[:, None]
    torch.testing.assert_close(jagged, embedding(ids[:, 0], tables).sum(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_output_dtype_is_float32_rounded_once(dtype: torch.dtype) -> None:
    full, half = frozen(), frozen(output_dtype=dtype)
    ids = torch.randint(-1, 9, (6, 4), generator=torch.Generator().manual_seed(1))
    for pooling in (None, "sum", "mean"):
        out = half(ids, pooling=pooling)
        assert out.dtype == dtype
        assert torch.equal(out, full(ids, pooling=pooling).to(dtype))
    assert torch.equal(half.get(ids), full.get(ids))  # rows themselves stay float32
    weights = torch.ones(6, 4, requires_grad=True)
    half(ids, pooling="sum", weights=weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32


@pytest.mark.parametrize("store", STORES)
def test_training_on_bags_is_bit_identical_on_every_store(store: str, tmp_path: Path) -> None:
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


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooling": "max"}, r"pooling of embedding 'rows': got 'max'; give 'sum' or 'mean', or None"),
        ({"pooling": torch.ones(2)}, r"pooling of embedding 'rows': got tensor"),
        ({"offsets": ints(3)}, r"offsets of embedding 'rows': .* pooling=None.*give pooling='sum'"),
        ({"ids": ints(), "pooling": "sum"}, r"ids of embedding 'rows': pooling='sum' pools over the last dimension"),
        ({"offsets": [0, 4], "pooling": "sum"}, r"offsets.*: got list; give a 1-D torch\.Tensor of int64 or int32"),
        ({"offsets": torch.zeros(3), "pooling": "sum"}, r"offsets.*: got torch\.float32 \(3,\)"),
        ({"offsets": ints(2, 2), "pooling": "sum"}, r"offsets.*: got torch\.int64 \(2, 2\); give a 1-D"),
        ({"offsets": ints(0), "pooling": "sum"}, r"offsets.*: shape \(0,\); give bags \+ 1 offsets"),
        ({"offsets": ints(2).to_sparse(), "pooling": "sum"}, r"offsets.*torch\.sparse_coo.*to_dense"),
        (
            {"offsets": ints(2, dtype=torch.int64).to("meta"), "pooling": "sum"},
            r"offsets.*on meta.*offsets\.to\(ids\.device\)",
        ),
        ({"ids": ints(2, 2), "offsets": ints(2), "pooling": "sum"}, r"ids.*shape \(2, 2\) with offsets.*ids\.flatten"),
        ({"table_ids": None, "offsets": ints(2), "pooling": "sum"}, r"ids.*which of 3 tables.*give table_ids, one for"),
        ({"ids": ints(3, 4), "table_ids": None, "pooling": "sum"}, r"shape \(3, 4\) is not \(\.\.\., 3, L\)"),
        (
            {"ids": ints(2, 2, 3), "table_ids": None, "pooling": "sum"},
            r"is not \(\.\.\., 3, L\).*the table of each bag",
        ),
        (
            {"ids": ints(5, 4), "table_ids": ints(4), "pooling": "sum"},
            r"table_ids.*\(4,\).* bags, \(5,\); give one",
        ),
        ({"offsets": torch.tensor([1, 4]), "pooling": "sum"}, r"offsets.*from 1 to 4; give bags"),
        ({"offsets": torch.tensor([0, 3]), "pooling": "sum"}, r"offsets.*from 0 to 3; .*number of ids, 4"),
        ({"offsets": torch.tensor([0, 5]), "pooling": "sum"}, r"offsets.*from 0 to 5"),
        ({"offsets": torch.tensor([0, 3, 2, 4]), "pooling": "sum"}, r"offsets.*3 at position 1 is followed by 2"),
        ({"weights": torch.ones(4)}, r"weights of embedding 'rows': .* pooling=None.*give pooling='sum'"),
        ({"weights": [1.0] * 4, "pooling": "sum"}, r"weights.*got list; give torch\.float32 in the shape .*, \(4,\)"),
        ({"weights": torch.ones(3), "pooling": "sum"}, r"weights.*got torch\.float32 \(3,\); give"),
        ({"weights": torch.ones(4).double(), "pooling": "sum"}, r"weights.*got torch\.float64 \(4,\)"),
        ({"weights": torch.ones(4).to_sparse(), "pooling": "sum"}, r"weights.*torch\.sparse_coo.*to_dense"),
    ],
)
def test_mistakes_are_named_and_change_nothing(arguments: dict[str, Any], message: str) -> None:
    embedding = make(options("device"))
    good: dict[str, Any] = {"ids": ints(4), "table_ids": 0}
    with pytest.raises(InputError, match=message):
        embedding(**{**good, **arguments})
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


def test_an_output_dtype_that_lookups_cannot_have_is_refused() -> None:
    for dtype in (torch.float64, torch.int32, "float16", []):
        with pytest.raises(OptionError, match=r"output_dtype=.*give torch\.float32, torch\.float16"):
            one_table(output_dtype=dtype)


def test_backward_outside_a_graph_reaches_weights_and_refuses_rows() -> None:
    weights = torch.ones(2, 3, requires_grad=True)
    trained = one_table()
    with pytest.raises(GraphError, match=r"backward\(\) outside a graph"):
        trained(ints(2, 3), pooling="sum", weights=weights).sum().backward()
    embedding = frozen()
    embedding(ints(2, 3), pooling="sum", weights=weights).sum().backward()
    torch.testing.assert_close(weights.grad, embedding(ints(2, 3)).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.rotated("dtype")
def test_ops_are_as_their_fakes_say(dtype: torch.dtype, weighted: bool) -> None:
    embedding = frozen(output_dtype=dtype)
    weights = torch.rand(10, requires_grad=True) if weighted else None
    for offsets, features in ((None, None), (JAGGED, None), (JAGGED.to(torch.int32), [1, -1, -1, 0, -1])):
        pooled = (ints(10), None, offsets, "mean", features)
        torch.library.opcheck(ops.lookup, (embedding.shadow, *pooled, weights, embedding.handle), test_utils=OP_CHECKS)
        bags = JAGGED[1:].shape if offsets is not None else ()
        if weighted and features is None:
            grads = torch.ones(*bags, DIM, dtype=dtype)
            torch.library.opcheck(
                ops.lookup_weights_grad, (grads, *pooled, embedding.shadow, embedding.handle), test_utils=OP_CHECKS
            )


def test_the_output_dtype_is_no_part_of_what_is_stored(tmp_path: Path) -> None:
    with one_table_at(tmp_path, torch.bfloat16) as embedding:
        embedding.put([1], torch.full((1, DIM), 1.001))
    with one_table_at(tmp_path, torch.float32) as embedding:
        assert torch.equal(embedding(torch.tensor([1])), torch.full((1, DIM), 1.001))


def one_table_at(path: Path, dtype: torch.dtype) -> MultiTableEmbedding:
    return make(options("host", path), tables=1, output_dtype=dtype)
