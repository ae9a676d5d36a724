"""A plain PyTorch loop with embeddings behaves as one of torch, and what would go wrong in silence is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.embeddings import make
from support.graphs import dense_copy, embedding, graph_of
from support.stores import options
from tierbed import EagerOptimizer, MultiTableEmbedding
from tierbed.engine.errors import CapacityError, ClosedError, GraphError, InputError, OptimizerError


def sgd(rows: nn.Module, lr: float = 1.0) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=lr), rows)


IDS = torch.tensor([3, 4, 3])
TWICE = torch.tensor([[2.0], [1.0]])  # how often IDS hold 3 and 4


def moved(rows: MultiTableEmbedding, before: Tensor) -> Tensor:
    """By how much the rows of 3 and 4 went down, where all columns did alike."""
    by = before - rows.get([3, 4])
    torch.testing.assert_close(by, by[:, :1].expand(-1, 4))
    return by[:, :1]


def trained(lr: float = 1.0) -> tuple[MultiTableEmbedding, EagerOptimizer, Tensor]:
    """An embedding, its optimizer, and the rows of 3 and 4."""
    rows = embedding()
    return rows, sgd(rows, lr), rows.get([3, 4])


def test_gradients_of_several_backwards_are_one_step() -> None:
    rows, optimizer, before = trained()
    ids = IDS.clone()
    for scale in (1.0, 3.0):
        (rows(ids) * scale).sum().backward()
    ids.copy_(torch.tensor([4, 4, 4]))  # a buffer that the next batch fills
    rows(ids).sum().backward()
    assert rows.size() == 0
    rows.to("cpu").cpu().float()
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), 4 * TWICE + torch.tensor([[0.0], [3.0]]))
    assert rows.metrics()["table"]["step"] == 1


def test_ids_that_numpy_changed_between_lookups_are_those_of_their_lookup() -> None:
    rows, optimizer, before = trained()
    ids = IDS.clone()
    rows(ids).sum().backward()
    ids.numpy()[:] = 4  # which changes no version
    rows(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), TWICE + torch.tensor([[0.0], [3.0]]))


def test_a_closure_runs_before_the_step_and_its_loss_is_returned() -> None:
    rows, optimizer, before = trained()

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
    rows, optimizer, before = trained()
    shift, ids, weights, offsets = nn.Parameter(torch.zeros(3, 4)), IDS.clone(), torch.ones(3), torch.arange(4)
    out = rows(ids, 0, offsets, "sum", weights)
    out.retain_grad()
    (out + shift).sum().backward()
    for tensor in (ids, weights, offsets, shift.grad, out.grad):
        assert tensor is not None
        tensor.fill_(7)
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), TWICE)


def test_a_gradient_that_changes_before_the_step_is_refused() -> None:
    rows, optimizer, before = trained()
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
    for clear in (
        lambda optimizer, model: optimizer.zero_grad(),
        lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
        lambda optimizer, model: model.zero_grad(),
    ):
        for model in (nn.Sequential(rows, net), nn.Sequential(dense, other)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = EagerOptimizer(optimizer, model) if model[0] is rows else optimizer
            for steps in (2, 1):
                model(IDS).square().sum().backward()
                for _ in range(steps):
                    optimizer.step()
            clear(optimizer, model)
            optimizer.step()
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
    rows, optimizer, before = trained()
    score = torch.ones(3, requires_grad=True)

    def loss() -> Tensor:
        return rows(IDS, pooling="sum", weights=score * 2).sum()

    torch.autograd.grad(loss(), [score])
    loss().backward(inputs=[score])
    assert rows.shadow.grad is None
    loss().backward(inputs=[rows.shadow])
    optimizer.step()
    torch.testing.assert_close(moved(rows, before), 2 * TWICE)
    with pytest.raises(GraphError, match=r"torch\.autograd\.grad of its parameter.*call backward\(\)"):
        torch.autograd.grad(loss(), list(rows.parameters()))


def test_a_scheduler_of_the_wrapped_optimizer_and_its_state() -> None:
    rows, optimizer, before = trained()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
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


def test_an_embedding_that_has_no_room_leaves_the_others_as_they_were() -> None:
    first, second, net = embedding(), embedding(capacity=2), nn.Linear(4, 1)
    optimizer, bias = sgd(nn.ModuleList([first, second, net])), copy.deepcopy(net.bias)
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


def test_embeddings_that_the_optimizer_does_not_hold_are_refused_unless_frozen() -> None:
    first, second = embedding(), embedding()
    both, optimizer = nn.ModuleList([first, second]), torch.optim.SGD(first.parameters(), lr=1.0)
    with pytest.raises(OptimizerError, match=r"SGD does not hold embedding 'rows\d+'; .*requires_grad_\(False\)"):
        EagerOptimizer(optimizer, both)
    other = EagerOptimizer(torch.optim.SGD(both.parameters(), lr=1.0), nn.ModuleList([second]))
    with pytest.raises(GraphError, match=r"no EagerOptimizer trains the embedding\. .* a module that contains the"):
        first(IDS).sum().backward()
    del other
    second.requires_grad_(False)
    ours = EagerOptimizer(optimizer, both)
    (first(IDS) * second(IDS)).sum().backward()
    ours.step()
    assert (first.size(), second.size()) == (2, 0)


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


def test_without_a_module_the_parameters_name_the_embeddings(tmp_path) -> None:
    found = []
    for alone in (True, False):
        torch.manual_seed(0)
        path = tmp_path / str(alone)
        tables = [
            MultiTableEmbedding(f"t{i}", 4, torch.float32, torch.int64, None, options("host", path)) for i in "012"
        ]
        net = nn.Linear(4, 1)
        model = nn.ModuleList([*tables, net])
        tables[1].requires_grad_(False)
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        optimizer = EagerOptimizer(inner) if alone else EagerOptimizer(inner, model)
        for _ in range(3):
            optimizer.zero_grad()
            net(tables[0](IDS) + tables[1](IDS) * tables[2](IDS)).square().sum().backward()
            optimizer.step()
        optimizer.save_snapshot("three")
        saved = sorted(place.parent.parent.name for place in path.rglob("three"))
        assert saved == (["t0", "t2"] if alone else ["t0", "t1", "t2"])
        found.append((net.weight.tolist(), [table.get(IDS).tolist() for table in tables]))
        for table in tables:
            table.close()
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives_steps_in_build_and_of_closed_rows_are_refused() -> None:
    rows, optimizer, _ = trained()

    def build(graph: Any, ids: Tensor) -> None:
        graph.rows(ids).sum().backward()
        optimizer.step()

    with pytest.raises(GraphError, match=r"no second derivative.*create_graph=True"):
        rows(IDS).square().sum().backward(create_graph=True)
    optimizer.step()
    graph = graph_of(build, optimizer.optimizer, rows=rows)
    with pytest.raises(GraphError, match=r"build calls step\(\) of an EagerOptimizer; leave it out"):
        graph(IDS)
    assert rows.size() == 0
    rows(IDS).sum().backward()
    rows.close()
    for use in (optimizer.step, lambda: rows(IDS)):
        with pytest.raises(ClosedError, match=rf"'{rows.name}' was closed"):
            use()


def test_ids_weights_and_rows_that_change_before_backward_are_refused_as_by_torch() -> None:
    rows, optimizer, _ = trained()
    ids, weights, score = IDS.clone(), torch.ones(3), torch.ones(3, requires_grad=True)
    for changed in (ids, weights):
        out = rows(ids, pooling="sum", weights=weights)
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    optimizer.step()
    assert rows.size() == 0
    weighted, plain = rows(IDS, pooling="sum", weights=score), rows(IDS)
    rows(IDS).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted.sum().backward()
    plain.sum().backward()  # needs no rows
