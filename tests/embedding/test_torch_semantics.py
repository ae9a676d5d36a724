"""`tierbed.Embedding` and `tierbed.EmbeddingBag` compute what torch's modules compute: results, gradients, states."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tierbed
from support.graphs import graph_of
from support.refusals import check_refusal

ROWS, DIM = 7, 3
IDS = st.integers(0, ROWS - 1)
WEIGHTS = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
SHAPES = st.sampled_from([(), (0,), (1,), (4,), (2, 3), (2, 0), (1, 2, 3)])


def test_weights_of_a_bag_get_the_gradient_of_torch() -> None:
    ids, offsets = torch.tensor([1, 2, 3, 2]), torch.tensor([0, 1])
    for padding in (None, 2):
        found = []
        for layers in (nn, tierbed):
            bag = layers.EmbeddingBag.from_pretrained(WEIGHTS, mode="sum", padding_idx=padding)
            weights = torch.tensor([1.0, 2, 3, 4], requires_grad=True)
            bag(ids, offsets, weights)[:, 0].sum().backward()
            found.append(weights.grad)
        torch.testing.assert_close(*found)


def filled(module: Any, draw: Any) -> Any:
    """The module with drawn rows: whole numbers, so that sums in another order are equal."""
    numbers = draw(st.lists(st.integers(-4, 4), min_size=ROWS * DIM, max_size=ROWS * DIM))
    module.load_state_dict({"weight": torch.tensor(numbers, dtype=torch.float32).view(ROWS, DIM)})
    return module


def check_step(theirs: nn.Module, ours: Any, call: Callable[[Any], Tensor]) -> None:
    """The results of a call of both, and their rows after a step of SGD, which shows the gradient."""
    optimizers = [
        torch.optim.SGD(theirs.parameters(), lr=1.0),
        tierbed.EagerOptimizer(torch.optim.SGD(ours.parameters(), lr=1.0), ours),
    ]
    results = [call(theirs), call(ours)]
    torch.testing.assert_close(results[1].detach().as_subclass(Tensor), results[0].detach(), rtol=1e-6, atol=1e-6)
    for result, optimizer in zip(results, optimizers, strict=True):
        (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum().backward()
        optimizer.step()
    weight = ours.to_dense_state_dict()["weight"]
    torch.testing.assert_close(weight, theirs.state_dict()["weight"], rtol=1e-6, atol=1e-6)


@st.composite
def embedding_calls(draw: st.DrawFn) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    padding = draw(st.none() | st.integers(-ROWS, ROWS - 1))
    theirs = filled(nn.Embedding(ROWS, DIM, padding), draw)
    ours = tierbed.Embedding(ROWS, DIM, padding)
    ours.load_state_dict(theirs.state_dict())
    shape = draw(SHAPES)
    count = torch.Size(shape).numel()
    ids = torch.tensor(draw(st.lists(IDS, min_size=count, max_size=count)), dtype=torch.int64).view(shape)
    head = torch.arange(DIM * 1.0)
    call = draw(
        st.sampled_from(
            [
                lambda module: module(ids),
                lambda module: module.weight[ids],
                lambda module: head @ module.weight.T,
                lambda module: module(ids).sum() + (module.weight**2).sum(),
                lambda module: nn.functional.linear(module(ids), module.weight),
            ]
        )
    )
    return theirs, ours, call


@st.composite
def bag_calls(draw: st.DrawFn) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    arguments: dict[str, Any] = {
        "mode": draw(st.sampled_from(["sum", "mean"])),
        "include_last_offset": draw(st.booleans()),
        "padding_idx": draw(st.none() | st.integers(-ROWS, ROWS - 1)),
    }
    theirs = filled(nn.EmbeddingBag(ROWS, DIM, **arguments), draw)
    ours = tierbed.EmbeddingBag(ROWS, DIM, **arguments)
    ours.load_state_dict(theirs.state_dict())
    if draw(st.booleans()):
        bags, length = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        ids, offsets = torch.tensor(draw(st.lists(IDS, min_size=bags * length, max_size=bags * length))), None
        ids = ids.to(torch.int64).view(bags, length)
    else:
        lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        ids = torch.tensor(draw(st.lists(IDS, min_size=sum(lengths), max_size=sum(lengths))), dtype=torch.int64)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        offsets = ends if arguments["include_last_offset"] else ends[:-1]
    weights = None
    if arguments["mode"] == "sum" and draw(st.booleans()):
        weights = torch.arange(1.0, ids.numel() + 1).view(ids.shape)
    if draw(st.booleans()):
        return theirs, ours, lambda module: module(ids, offsets, weights)
    return theirs, ours, lambda module: module(ids, offsets=offsets, per_sample_weights=weights)


@given(embedding_calls())
def test_an_embedding_returns_and_learns_what_that_of_torch_does(drawn) -> None:
    check_step(*drawn)


@given(bag_calls())
def test_a_bag_returns_and_learns_what_that_of_torch_does(drawn) -> None:
    check_step(*drawn)


def test_a_weight_is_read_in_inference_mode_and_guarded_there() -> None:
    rows, head = tierbed.Embedding(ROWS, DIM, seed=1), torch.ones(DIM)
    before = rows.weight
    with torch.inference_mode():
        scores = rows.weight.T.reshape(DIM, ROWS).T @ head
        for weight in (rows.weight, before, rows.weight[:2]):
            with pytest.raises(tierbed.InputError, match="load_dense"):
                weight.zero_()
    torch.testing.assert_close(scores, rows.weight.detach() @ head)


def test_transforms_and_compiled_functions_take_a_weight() -> None:
    rows = tierbed.Embedding(ROWS, DIM, seed=1)
    weight, plain = rows.weight, rows.weight.clone().detach()
    heads = torch.arange(2.0 * DIM).view(2, DIM)
    torch.testing.assert_close(torch.func.vmap(lambda head: weight @ head)(heads), heads @ plain.T)
    torch.testing.assert_close(torch.func.grad(lambda head: (weight @ head).sum())(heads[0]), plain.sum(0))
    scores = torch.compile(lambda given, head: (given @ head).norm() + given[1].sum(), backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(scores(rows.weight, heads[0]), scores(plain, heads[0]))


IN_A_TRACE = [  # whether it writes into the weight
    (lambda w: w.__imul__(0.9), True),
    (lambda w: w.T[0].copy_(w[:, 1]), True),
    (lambda w: torch._foreach_mul_([torch.ones(1), w.detach()], 0.9), True),
    (lambda w: torch.mul(w, 0.5, out=w), True),
    (nn.init.normal_, True),
    (lambda w: [w.clone().mul_(2), (w * 2).mul_(2), torch.mul(w, 2, out=torch.zeros(ROWS, DIM))], False),
]


@pytest.mark.parametrize(("use", "is_write"), IN_A_TRACE)
def test_a_write_into_a_weight_in_a_graph_raises(use, is_write) -> None:
    def writing(graph: Any, ids: Tensor) -> Tensor:
        graph.model.items(ids).mul_(2)  # as with torch, results of lookups may be written
        with torch.no_grad():
            use(graph.model.items.weight)
        return step(graph, ids)

    model = Tied(tierbed)
    graph = graph_of(writing, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    ids = torch.randint(ROWS, (4, 5))
    if not is_write:
        assert graph(ids) > 0
        return
    with pytest.raises(tierbed.InputError, match="load_dense"):
        graph(ids)


def step(graph: Any, ids: Tensor) -> Tensor:
    loss = graph.model(ids)
    loss.backward()
    return loss


def trainer(model: Tied, optimizer: torch.optim.Optimizer, way: str) -> Callable[[Tensor], Tensor]:
    """A step of a plain loop, or a graph."""
    if way == "graph":
        return graph_of(step, optimizer, model=model)
    eager = tierbed.EagerOptimizer(optimizer, model)

    def train(ids: Tensor) -> Tensor:
        loss = model(ids)
        loss.backward()
        eager.step()
        eager.zero_grad()
        return loss

    return train


class Tied(nn.Module):
    """A small sequence model: padding, weights tied to the output, and a penalty on them."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.items = layers.Embedding(ROWS, DIM, padding_idx=0)
        self.side = layers.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=1)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.out(self.items(ids).mean(1) + self.side(ids))
        penalty = 0.01 * (self.items.weight**2).sum()
        return nn.functional.cross_entropy(hidden @ self.items.weight.T, ids[:, 0]) + penalty


@pytest.mark.parametrize("way", ["loop", "graph"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_tied_model_with_a_padding_row_trains_as_with_torch(kind, way) -> None:
    torch.manual_seed(0)
    theirs, ours = Tied(nn), Tied(tierbed)
    nn.init.normal_(theirs.items.weight)  # also the row of padding
    ours.load_state_dict(theirs.state_dict())
    optimizer, train = kind(theirs.parameters(), lr=0.1), trainer(ours, kind(ours.parameters(), lr=0.1), way)
    for _ in range(10):
        ids = torch.randint(ROWS, (4, 5))
        expected = theirs(ids)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(train(ids), expected, rtol=1e-6, atol=1e-6)
    dense = tierbed.to_dense_state_dict(ours)
    assert list(dense) == list(theirs.state_dict())
    torch.testing.assert_close(dense, OrderedDict(theirs.state_dict()), rtol=1e-5, atol=1e-6)
    theirs.load_state_dict(dense)


def test_a_row_of_padding_stays_through_stores_states_and_snapshots(tmp_path) -> None:
    def made() -> tuple[tierbed.Embedding, tierbed.EagerOptimizer]:
        store = tierbed.make_host_mem_store_options(persistent_path=str(tmp_path))
        one = tierbed.Embedding(ROWS, DIM, padding_idx=1, store=store, name="e")
        return one, tierbed.EagerOptimizer(torch.optim.Adagrad(one.parameters(), lr=0.1), one)

    first, optimizer = made()
    assert not first(torch.tensor([1])).any()
    first.load_dense(WEIGHTS)
    for _ in range(3):
        first(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = first.weight.detach().clone()
    assert torch.equal(rows[1], WEIGHTS[1])
    assert not torch.equal(rows[2], WEIGHTS[2])
    first.save_snapshot("one")
    first.close()
    second, _ = made()
    assert torch.equal(second.weight, rows)
    second.load_dense(torch.zeros(ROWS, DIM))
    second.load_snapshot("one")
    assert torch.equal(second(torch.tensor([1]))[0], rows[1])
    second.reset_parameters()
    assert not second.weight[1].any()
    assert second.weight[2].any()
    fresh = tierbed.Embedding(ROWS, DIM, padding_idx=1)
    fresh.load_dense(WEIGHTS)
    kept = copy.deepcopy(fresh.state_dict())
    fresh.load_state_dict(tierbed.Embedding(ROWS, DIM, padding_idx=1).state_dict())  # which has no rows
    assert not fresh(torch.tensor([1])).any()
    fresh.load_state_dict(kept)
    assert torch.equal(fresh.weight, WEIGHTS)


def weigh(weights: Any, _: Any) -> None:
    tierbed.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=0)(torch.tensor([[1, 2]]), None, weights)


def of_ids(tables: Any = None, **more: Any) -> tierbed.MultiTableEmbedding:
    store = tierbed.make_host_mem_store_options()
    return tierbed.MultiTableEmbedding("e", DIM, torch.float32, torch.int64, tables, store, **more)


NO_WEIGHTS = [torch.ones(1, 1), torch.ones(1, 2, dtype=torch.int64), [[1.0, 1.0]]]
NO_TABLES = [torch.tensor([0]), torch.tensor([0, 2]), torch.tensor([0, 1, 2])]  # offsets in the place of table_ids
REFUSED = [
    (lambda e: nn.init.normal_(e.weight), "load_dense"),
    (lambda e: e.weight.data.copy_(WEIGHTS), "load_dense"),
    (lambda e: e.weight.data.set_(WEIGHTS.clone()), "load_dense"),
    (lambda e: setattr(e.weight, "data", WEIGHTS), "load_dense"),
    (lambda e: setattr(e, "weight", nn.Parameter(WEIGHTS)), "load_dense"),
    (lambda e: setattr(e, "weight", WEIGHTS), "load_dense"),
    (lambda e: nn.Parameter(e.weight), "load_dense"),
    (lambda e: nn.Sequential(e).apply(lambda module: module.weight.data.normal_()), "load_dense"),
    (lambda e: tierbed.EmbeddingBag(ROWS, DIM).weight.data.normal_(), "load_dense"),
    (lambda e: torch.optim.swa_utils.AveragedModel(nn.Sequential(e)), "to_dense_state_dict"),
    (lambda e: e.weight.requires_grad_(False), "requires_grad_"),
    (lambda e: e.weight.grad, "gradient is with the rows"),
    (lambda e: e.weight.register_hook(lambda grad: grad * 0), "register hooks on what a lookup returns"),
    (lambda e: e(torch.tensor([ROWS])), "ids"),
    (lambda e: e.load_dense(WEIGHTS[:3]), "3 rows"),
    (lambda e: e.load_state_dict({"weight": WEIGHTS[:3]}), "3 rows"),
    (lambda e: tierbed.Embedding(2**20, 128).weight, "emb(torch.arange(n))"),
    (lambda e: tierbed.Embedding(None, 3).weight, "takes any id"),
    (lambda e: tierbed.Embedding(5, 3, padding_idx=5), "padding_idx=5"),
    (lambda e: tierbed.Embedding(0, 3), "num_embeddings"),
    (lambda e: tierbed.Embedding(5, 3, max_norm=1.0), "max_row_norm"),
    (lambda e: tierbed.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    (lambda e: tierbed.Embedding(5, 3, dtype=torch.float64), "float64"),
    (lambda e: tierbed.EmbeddingBag(5, 3, mode="max"), "mode='max'"),
    (lambda e: tierbed.EmbeddingBag(5, 3)(torch.tensor([1])), "offsets"),
    (lambda e: tierbed.EmbeddingBag(5, 3)(torch.tensor([[1]]), torch.tensor([0])), "offsets"),
    (lambda e: tierbed.EmbeddingBag(5, 3)(torch.tensor([[1]]), None, torch.ones(1, 1)), "mode='sum'"),
    *((partial(weigh, weights), "give floats of the same shape as input, (1, 2)") for weights in NO_WEIGHTS),
    *((lambda e, offsets=offsets: of_ids()(torch.tensor([1, 2, 3]), offsets), "offsets") for offsets in NO_TABLES),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_cannot_be_had_raises_and_names_the_remedy(call, said) -> None:
    embedding = tierbed.Embedding(ROWS, DIM)
    embedding.load_dense(WEIGHTS)
    check_refusal((lambda: call(embedding), (tierbed.TierbedError, RuntimeError), said))
    embedding.keep_rows()  # after a load that failed
    assert torch.equal(embedding.weight, WEIGHTS)


@pytest.mark.parametrize("way", ["loop", "graph"])
def test_a_weight_that_was_read_before_a_step_is_not_taken_for_the_present_one(way) -> None:
    model = Tied(tierbed)
    model.load_state_dict(Tied(nn).state_dict())
    train = trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), way)
    early = model.items.weight
    parts, before = [early, early[1:], early.T, early.detach(), early.data], early.clone()
    assert (early @ torch.ones(DIM)).shape == (ROWS,)
    train(torch.randint(2, ROWS, (4, 5)))
    uses = [lambda w: w + 1, lambda w: torch.cat([w, w]), lambda w: w.detach().numpy(), lambda w: torch.ones(1) * w.T]
    for part, use in product(parts, uses):
        with pytest.raises(tierbed.InputError, match=r"'items' was read before a training step.*clone\(\)"):
            use(part)
    with pytest.raises(tierbed.InputError, match=r"'items' was read before a training step.*clone\(\)"):
        nn.functional.linear(torch.ones(DIM), early)
    assert early.shape == (ROWS, DIM)
    assert "grad_fn" in repr(early) or "requires_grad" in repr(early)
    assert not torch.equal(before, model.items.weight)


def test_arguments_of_torch_are_taken(tmp_path) -> None:
    (tmp_path / "stores.toml").write_text('[items]\nstore = "host_mem"\ncapacity = 100\n')
    made = tierbed.Embedding(ROWS, DIM, sparse=True, dtype=torch.bfloat16, device="cpu", store=tmp_path / "stores.toml")
    assert (made.num_embeddings, made.embedding_dim, made.padding_idx) == (ROWS, DIM, None)
    assert made(torch.tensor([1])).dtype == made.weight.dtype == torch.bfloat16
    assert made.store_options.capacity == 100
    assert repr(made) == "Embedding(7, 3, store=host_mem)"
    frozen = tierbed.Embedding.from_pretrained(WEIGHTS)
    assert not frozen(torch.tensor([1])).requires_grad
    assert torch.equal(frozen.weight, WEIGHTS)
    grows = tierbed.Embedding(None, DIM, padding_idx=-1)
    assert grows(torch.tensor([-1, 2**40])).shape == (2, DIM)
    rows = tierbed.Embedding(1000, 16).weight.detach()
    assert abs(float(rows.mean())) < 0.05
    assert abs(float(rows.std()) - 1) < 0.05


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_the_unported_model_loads_or_names_load_dense(strict) -> None:
    old = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    new = nn.Sequential(of_ids(), nn.Linear(DIM, 1))
    new.load_state_dict(old.double().state_dict(), strict=strict)  # rounds, as torch's own does
    old.float()
    torch.testing.assert_close(new(torch.arange(ROWS)), old(torch.arange(ROWS)))
    for refused, said in (
        (of_ids(padding_idx=0), "tierbed.Embedding"),
        (of_ids([tierbed.make_normal_initializer(0.0, 1.0)] * 2), "load_dense"),
    ):
        with pytest.raises(RuntimeError, match=said):
            nn.Sequential(refused, nn.Linear(DIM, 1)).load_state_dict(old.state_dict(), strict=strict)


def test_narrow_ids_are_no_padding_by_their_low_bits_and_announced_bags_serve_the_step() -> None:
    store = tierbed.make_cached_host_mem_store_options(cache_budget_mb=1)
    for padding in (300, -1):
        low, count = padding % 256, None if padding < 0 else 1000
        rows = tierbed.Embedding(count, 2, padding, seed=1)
        bag = tierbed.EmbeddingBag(count, 2, mode="sum", padding_idx=padding, seed=1, store=store)
        ids = torch.tensor([[low, 1]], dtype=torch.uint8)
        assert torch.equal(bag(ids), rows(ids).sum(1))
        before = rows(ids).detach()
        for module in (rows, bag):
            optimizer = tierbed.EagerOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), module)
            module.prefetch(ids)
            module(ids).sum().backward()
            optimizer.step()
        torch.testing.assert_close(before - rows(ids), torch.ones(1, 2, 2))
        assert bag.metrics()["table"]["prefetch_hits"] == 1
