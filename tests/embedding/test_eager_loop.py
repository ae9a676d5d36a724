"""A plain PyTorch loop with embeddings behaves as one of torch, and what would go wrong in silence is refused."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.embeddings import make
from support.graphs import dense_copy, embedding, graph_of, id_batches
from support.stores import options
from tierbed import (
    CapacityError,
    ClosedError,
    EagerOptimizer,
    GraphError,
    InputError,
    MultiTableEmbedding,
    OptimizerError,
    make_host_mem_store_options,
)


def sgd(rows: nn.Module, lr: float = 1.0) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=lr), rows)


IDS = torch.tensor([3, 4, 3])
TWICE = torch.tensor([[2.0], [1.0]])  # how often IDS hold 3 and 4


def moved(rows: MultiTableEmbedding, before: Tensor) -> Tensor:
    """By how much the rows of 3 and 4 went down, where all columns did alike."""
    by = before - rows.get([3, 4])
    torch.testing.assert_close(by, by[:, :1].expand(-1, 4))
    return by[:, :1]


def test_gradients_of_several_backwards_are_one_step() -> None:
    rows = embedding()
    optimizer, before = sgd(rows), rows.get([3, 4])
    ids = IDS.clone()
    for scale in (1.0, 3.0):
        (rows(ids) * scale).sum().backward()
    ids.copy_(torch.tensor([4, 4, 4]))  # a buffer that the next batch fills
    rows(ids).sum().backward()
    assert rows.size() == 0
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), 4 * TWICE + torch.tensor([[0.0], [3.0]]))
    assert rows.metrics()["table"]["step"] == 1


def test_ids_that_numpy_changed_between_lookups_are_those_of_their_lookup() -> None:
    rows = embedding()
    optimizer, before = sgd(rows), rows.get([3, 4])
    ids = IDS.clone()
    rows(ids).sum().backward()
    ids.numpy()[:] = 4  # which changes no version
    rows(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), TWICE + torch.tensor([[0.0], [3.0]]))


def test_a_closure_runs_before_the_step_and_its_loss_is_returned() -> None:
    rows = embedding()
    optimizer, before = sgd(rows), rows.get([3, 4])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = rows(IDS).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    torch.testing.assert_close(loss.detach(), before[[0, 0, 1]].sum())
    torch.testing.assert_close(moved(rows, before), TWICE)


def test_what_is_written_in_place_after_backward_does_not_reach_the_rows() -> None:
    rows, shift = embedding(), nn.Parameter(torch.zeros(3, 4))
    optimizer, before = sgd(rows), rows.get([3, 4])
    ids, weights, offsets = IDS.clone(), torch.ones(3), torch.tensor([0, 1, 2, 3])
    out = rows(ids, 0, offsets, "sum", weights)
    out.retain_grad()
    (out + shift).sum().backward()
    for tensor in (ids, weights, offsets, shift.grad, out.grad):
        assert tensor is not None
        tensor.fill_(7)
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), TWICE)


def test_ids_and_weights_that_change_before_backward_are_refused_as_by_torch() -> None:
    rows = embedding()
    optimizer = sgd(rows)
    ids, weights = IDS.clone(), torch.ones(3)
    for changed in (ids, weights):
        out = rows(ids, pooling="sum", weights=weights)
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    optimizer.step()
    assert rows.size() == 0


def test_a_gradient_that_changes_before_the_step_is_refused() -> None:
    rows = embedding()
    optimizer, before = sgd(rows), rows.get([3, 4])
    grad = torch.ones(3, 4)
    rows(IDS).backward(grad)
    grad.mul_(2)
    with pytest.raises(InputError, match=r"gradient of embedding 'rows.*grad\.clone\(\)"):
        optimizer.step()
    with pytest.raises(InputError, match="changed in place"):
        rows(IDS).sum().backward()  # of the same ids: it would be added
    optimizer.zero_grad()
    rows(IDS).backward(grad)
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), 2 * TWICE)


def test_gradients_stay_until_zero_grad_as_those_of_torch() -> None:
    rows, net = embedding(), nn.Linear(4, 1)
    dense, other = dense_copy(rows), copy.deepcopy(net)
    model = nn.ModuleList([rows, net])
    ours, theirs = sgd(model, 0.1), torch.optim.SGD([*dense.parameters(), *other.parameters()], lr=0.1)

    def both(act: Callable[[Any, nn.Module, nn.Module], Any]) -> None:
        act(ours, rows, net)
        act(theirs, dense, other)

    for clear in (
        lambda optimizer, layer, net: optimizer.zero_grad(),
        lambda optimizer, layer, net: optimizer.zero_grad(set_to_none=False),
        lambda optimizer, layer, net: nn.ModuleList([layer, net]).zero_grad(),
    ):
        both(lambda optimizer, layer, net: net(layer(IDS)).square().sum().backward())
        both(lambda optimizer, layer, net: optimizer.step())
        both(lambda optimizer, layer, net: optimizer.step())
        both(lambda optimizer, layer, net: net(layer(IDS)).square().sum().backward())
        both(lambda optimizer, layer, net: optimizer.step())
        both(clear)
        both(lambda optimizer, layer, net: optimizer.step())
    torch.testing.assert_close(rows.get(range(50)), dense.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.weight, other.weight, rtol=1e-5, atol=1e-6)


def test_a_step_without_backward_takes_no_step_of_the_rows() -> None:
    with make(options("device"), tables=1) as rows:
        optimizer = EagerOptimizer(torch.optim.Adam(rows.parameters()), rows)
        for _ in range(3):
            with torch.no_grad():
                assert not rows(IDS).requires_grad
            rows(IDS)
            optimizer.step()
        assert rows.shadow.grad is None
        assert rows.metrics()["table"] | {"rows": 0, "step": 0} == rows.metrics()["table"]
        rows(IDS[:0]).sum().backward()
        optimizer.step()  # a batch of no ids is one, as in a graph
        assert (rows.size(), rows.metrics()["table"]["step"]) == (0, 1)
        assert not optimizer.state_dict()["state"]  # of the shadow: rows have their state in the store


def test_a_backward_that_ends_before_the_rows_adds_nothing() -> None:
    rows, score = embedding(), torch.ones(3, requires_grad=True)
    optimizer = sgd(rows)

    def loss() -> Tensor:
        return rows(IDS, pooling="sum", weights=score * 2).sum()

    torch.autograd.grad(loss(), [score])
    loss().backward(inputs=[score])
    assert rows.shadow.grad is None
    before = rows.get([3, 4])
    loss().backward(inputs=[rows.shadow])
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), 2 * TWICE)
    with pytest.raises(GraphError, match=r"torch\.autograd\.grad of its parameter.*call backward\(\)"):
        torch.autograd.grad(loss(), list(rows.parameters()))


def test_a_gradient_of_weights_is_not_taken_from_rows_that_moved_on() -> None:
    rows, score = embedding(), torch.ones(3, requires_grad=True)
    optimizer = sgd(rows)
    weighted, plain = rows(IDS, pooling="sum", weights=score), rows(IDS)
    rows(IDS).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted.sum().backward()
    plain.sum().backward()  # needs no rows


@pytest.mark.parametrize(
    "use",
    [
        lambda rows, net: nn.utils.clip_grad_norm_([*rows.parameters(), *net.parameters()], 1.0, math.inf),
        lambda rows, net: rows.shadow.grad.clamp_(min=0.0),
        lambda rows, net: rows.shadow.grad.clamp_(min=-1.0, max=2.0),
        lambda rows, net: rows.shadow.grad.mul_(rows.shadow.grad),
        lambda rows, net: torch.optim.Adam(rows.parameters()).step(),
        lambda rows, net: rows.shadow.grad.norm(),
        lambda rows, net: rows.shadow.grad + 1,
    ],
)
def test_what_computes_with_the_gradient_of_rows_is_refused(use: Callable[..., Any]) -> None:
    rows, net = embedding(), nn.Linear(4, 1)
    optimizer = sgd(nn.ModuleList([rows, net]))
    net(rows(IDS)).sum().backward()
    with pytest.raises(GraphError, match=r"gradient of embedding 'rows\d+': no tensor holds.*EagerOptimizer"):
        use(rows, net)
    optimizer.step()
    assert rows.size() == 2


def test_a_module_with_gradients_is_moved() -> None:
    rows = embedding()
    optimizer = sgd(rows)
    rows(IDS).sum().backward()
    before = rows.get([3, 4])
    rows.to("cpu").cpu().float()
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), TWICE)


def test_a_scheduler_of_the_wrapped_optimizer_and_its_state() -> None:
    rows = embedding()
    optimizer = sgd(rows)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
    before = rows.get([3, 4])
    for _ in range(2):
        rows(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    torch.testing.assert_close(moved(rows, before), 1.5 * TWICE)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 8.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_announced_lookups_serve_the_step() -> None:
    with make(options("cached_host"), tables=1) as rows:
        optimizer = EagerOptimizer(torch.optim.Adam(rows.parameters()), rows)
        for ids in id_batches(8):
            rows.prefetch(ids)
        for ids in id_batches(8):
            rows(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert rows.metrics()["table"]["prefetch_hits"] == 10


def test_an_embedding_that_has_no_room_leaves_the_others_as_they_were() -> None:
    model = nn.ModuleList([embedding(), embedding(capacity=2), nn.Linear(4, 1)])
    first, second, net = model
    assert isinstance(first, MultiTableEmbedding)
    assert isinstance(second, MultiTableEmbedding)
    optimizer, bias = sgd(model), copy.deepcopy(net.bias)
    second.put([50], torch.ones(1, 4))
    before = first.get([3, 4])
    net(first(IDS) + second(IDS)).sum().backward()
    for _ in range(2):
        with pytest.raises(CapacityError, match="capacity=2"):
            optimizer.step()
    assert (first.size(), second.size()) == (0, 1)
    assert torch.equal(net.bias, bias)
    optimizer.zero_grad()
    (first(IDS) + second(IDS * 0 + 50)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(moved(first, before), TWICE)


def test_lookups_are_recomputed_and_compiled() -> None:
    rows = embedding()
    optimizer, before = sgd(rows), rows.get([3, 4])
    torch.utils.checkpoint.checkpoint(lambda ids: rows(ids).square().sum(), IDS, use_reentrant=False).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(rows.get([3, 4]), before * (1 - 2 * TWICE))
    before = rows.get([3, 4])
    torch.compile(lambda ids: rows(ids).sum(), backend="aot_eager")(IDS).backward()
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), TWICE)


def test_embeddings_that_the_optimizer_does_not_hold_are_refused_unless_frozen() -> None:
    model = nn.ModuleList([embedding(), embedding()])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    with pytest.raises(OptimizerError, match=r"SGD does not hold embedding 'rows\d+'; .*requires_grad_\(False\)"):
        EagerOptimizer(optimizer, model)
    other = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), nn.ModuleList([model[1]]))
    with pytest.raises(GraphError, match=r"no EagerOptimizer trains the embedding; .* a module that has the embedding"):
        model[0](IDS).sum().backward()
    del other
    model[1].requires_grad_(False)
    ours = EagerOptimizer(optimizer, model)
    (model[0](IDS) * model[1](IDS)).sum().backward()
    ours.step()
    assert [layer.size() for layer in model] == [2, 0]  # type: ignore[operator]


def test_a_newer_optimizer_takes_over_what_the_older_one_has_no_gradients_of() -> None:
    rows = embedding()
    older = sgd(rows)
    rows(IDS).sum().backward()
    with pytest.raises(OptimizerError, match=r"gradients of embedding 'rows\d+' that it has not applied; .*zero_grad"):
        sgd(rows)
    rows.zero_grad()
    before = rows.get(IDS)
    newer = sgd(rows)
    rows(IDS).sum().backward()
    with pytest.raises(OptimizerError, match=r"newer EagerOptimizer has taken over embedding 'rows\d+'; call step"):
        older.step()
    assert torch.equal(rows.get(IDS), before)
    newer.step()
    assert not torch.equal(rows.get(IDS), before)
    again = sgd(rows)  # the gradients were applied
    again.zero_grad()
    rows(IDS).sum().backward()
    again.step()
    assert len({older, newer, again}) == 3


def test_without_a_module_the_parameters_name_the_embeddings(tmp_path: Path) -> None:
    def run(alone: bool) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        stored = make_host_mem_store_options(persistent_path=tmp_path / str(alone))
        tables = [MultiTableEmbedding(f"t{i}", 4, torch.float32, torch.int64, None, stored) for i in range(3)]
        model = nn.ModuleList([*tables, nn.Linear(4, 1)])
        tables[1].requires_grad_(False)
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        optimizer = EagerOptimizer(inner) if alone else EagerOptimizer(inner, model)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model[3](tables[0](IDS) + tables[1](IDS) * tables[2](IDS)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        optimizer.save_snapshot("three")
        saved = sorted(place.parent.parent.name for place in (tmp_path / str(alone)).rglob("three"))
        assert saved == (["t0", "t2"] if alone else ["t0", "t1", "t2"])
        for table in tables:
            table.close()
        return losses, model[3].weight.flatten().tolist()

    assert run(True) == run(False)


def test_an_embedding_with_gradients_is_let_go() -> None:
    rows = embedding()
    optimizer = sgd(rows)
    rows(IDS).sum().backward()
    optimizer.step()
    gone = weakref.ref(rows)
    del rows, optimizer
    gc.collect()
    assert gone() is None


def test_optimizers_that_rows_cannot_follow_and_no_optimizers_are_refused() -> None:
    rows = embedding()
    with pytest.raises(OptimizerError, match=r"Adadelta cannot update rows"):
        EagerOptimizer(torch.optim.Adadelta(rows.parameters()), rows)
    with pytest.raises(OptimizerError, match=r"optimizer=list: give a torch\.optim optimizer"):
        EagerOptimizer(list(rows.parameters()), rows)  # type: ignore[arg-type]
    sgd(rows)


def test_a_step_in_build_is_refused() -> None:
    rows = embedding()
    optimizer = sgd(rows)

    def build(graph: Any, ids: Tensor) -> None:
        graph.rows(ids).sum().backward()
        optimizer.step()

    graph = graph_of(build, optimizer.optimizer, rows=rows)
    with pytest.raises(GraphError, match=r"build calls step\(\) of an EagerOptimizer; leave it out"):
        graph(IDS)
    assert rows.size() == 0


def test_a_closed_embedding_takes_no_step() -> None:
    with make(options("device"), tables=1) as rows:
        optimizer = sgd(rows)
        rows(IDS).sum().backward()
    with pytest.raises(ClosedError, match="'rows' was closed"):
        optimizer.step()
    with pytest.raises(ClosedError, match="'rows' was closed"):
        rows(IDS)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives_are_refused() -> None:
    rows = embedding()
    optimizer = sgd(rows)
    with pytest.raises(GraphError, match=r"no second derivative.*create_graph=True"):
        rows(IDS).square().sum().backward(create_graph=True)
    optimizer.step()
    assert rows.size() == 0
