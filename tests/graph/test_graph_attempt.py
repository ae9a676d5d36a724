"""A dynamic-shape step that fails: another takes its place, and nothing happens twice or by half."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.embeddings import contents, make
from support.graphs import FEW as OWN
from support.graphs import compiled_steps, graph_of, training
from support.jagged_arguments import Jagged, jagged
from support.stores import options
from tierbed import CapacityError, MultiTableEmbedding

pytestmark = pytest.mark.usefixtures("few_steps_of_their_own")


FIRST_OF_MANY = OWN + 1
_failing: set[int] = set()  # the calls, from 1, that fail
_calls = 0
_arguments: list[weakref.ref[Tensor]] = []  # the arguments of the failed calls


@torch.library.custom_op("tierbed_tests::shaky", mutates_args=())
def shaky(x: Tensor) -> Tensor:
    global _calls
    _calls += 1
    if _calls in _failing:
        _arguments.append(weakref.ref(x))
        raise IndexError(f"call {_calls} of shaky")
    assert all(argument() is None for argument in _arguments)
    return x.clone()


shaky.register_fake(torch.empty_like)
shaky.register_autograd(lambda context, grad: grad)


@pytest.fixture(autouse=True)
def no_failures() -> Iterator[None]:
    global _calls
    _calls = 0
    _failing.clear()
    yield
    _failing.clear()
    _arguments.clear()


def graph_over(rows: MultiTableEmbedding) -> Any:
    """One whose shaky op comes after batch norm, dropout and a write to a buffer and to its argument."""

    def build(graph: Any, ids: Tensor, seen: Tensor) -> Tensor:
        with torch.no_grad():
            graph.norm.running_mean.add_(0.5)
            seen.add_(1)
        found = graph.norm(rows(ids, 0))
        found = F.dropout(found, 0.3) + torch.rand(rows.spec.dim, generator=graph.generator)
        loss = graph.layer(shaky(found)).pow(2).mean() + seen.mean()
        loss.backward()
        return loss

    torch.manual_seed(2)
    norm, layer = nn.BatchNorm1d(rows.spec.dim), nn.Linear(rows.spec.dim, 1)
    optimizer = torch.optim.Adagrad([*rows.parameters(), *norm.parameters(), *layer.parameters()], lr=0.1)
    graph: Any = graph_of(build, optimizer, rows=rows, norm=norm, layer=layer)
    graph.generator = torch.Generator().manual_seed(3)
    return graph


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    return [(torch.randint(0, 40, (size,), generator=draw), torch.zeros(size)) for size in range(2, FIRST_OF_MANY + 3)]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("how", ["called", "run", pytest.param("profile", marks=pytest.mark.slow)])
@pytest.mark.rotated("accumulated")
def test_a_step_for_many_sizes_that_fails_trains_once_and_keeps_nothing_meanwhile(
    how: str, accumulated: int, caplog: pytest.LogCaptureFixture
) -> None:
    global _calls
    found = []
    for failing in (set(), {FIRST_OF_MANY}):
        _calls = 0
        _failing.clear()
        _failing.update(failing)
        with make(options("cached_host"), None, tables=1) as rows:
            graph: Any = graph_over(rows)
            graph.accumulate_grads(accumulated)
            torch.manual_seed(5)
            drawn = batches()
            losses = []
            if how == "called":
                losses = [graph(*batch) for batch in drawn]
            elif how == "run":
                losses = list(graph.run(drawn, ahead=8))
            else:
                assert graph.profile(drawn).steps == len(drawn)
            state = [*losses, *graph.norm.state_dict().values(), *graph.layer.state_dict().values()]
            state += [torch.get_rng_state(), graph.generator.get_state(), *(seen for _, seen in drawn)]
            found.append((state, contents(rows).tobytes(), rows.metrics()["table"]["step"]))
            steps = compiled_steps(graph)
    assert all(map(torch.equal, *(state for state, *_ in found)))
    assert found[0][1:] == found[1][1:]
    assert steps == len(batches())
    failed = [record.message for record in caplog.records if "failed" in record.message]
    assert len(failed) == 1
    assert f"IndexError: call {FIRST_OF_MANY} of shaky" in failed[0]


def test_what_a_step_for_these_sizes_raises_as_well_reaches_the_user_and_changes_nothing() -> None:
    _failing.update({FIRST_OF_MANY, FIRST_OF_MANY + 1})
    with make(options("cached_host"), None, tables=1) as rows:
        graph = graph_over(rows)
        drawn = batches()
        for batch in drawn[:OWN]:
            graph(*batch)
        dense = [value for value in graph.parameters() if value is not rows.shadow]
        before, layer = contents(rows).tobytes(), [value.clone() for value in dense]
        with pytest.raises(IndexError, match=f"call {FIRST_OF_MANY + 1} of shaky"):
            graph(*drawn[OWN])
        assert contents(rows).tobytes() == before
        assert all(map(torch.equal, dense, layer))
        for batch in drawn[OWN:]:
            graph(*batch)
        assert rows.metrics()["table"]["step"] == len(drawn)
        assert compiled_steps(graph) == OWN + 2  # the dynamic-shape step was not at fault


class Failing(torch.optim.SGD):
    """Moves its parameters, and then raises when it is asked to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise RuntimeError("after the parameters moved")


def test_a_failure_after_parameters_moved_is_not_tried_again() -> None:
    layer, frozen = nn.Linear(3, 1), nn.Linear(3, 1, bias=False).requires_grad_(False)
    optimizer = Failing(layer.parameters(), lr=0.1)
    graph: Any = graph_of(
        lambda graph, x: (graph.layer(x) + graph.frozen(x)).pow(2).mean().backward(),
        optimizer,
        layer=layer,
        frozen=frozen,
    )
    for size in range(2, OWN + 4):
        graph(torch.randn(size, 3))
    other, x = copy.deepcopy(layer), torch.randn(30, 3)
    (other(x) + frozen(x)).pow(2).mean().backward()
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="after the parameters moved"):
        graph(x)
    torch.testing.assert_close(layer.bias.detach(), other.bias.detach() - 0.1 * other.bias.grad)
    assert not torch.equal(layer.bias, other.bias)
    assert compiled_steps(graph) == OWN + 1


def test_errors_of_rows_are_not_tried_again() -> None:
    with make(options("device", capacity=30), None, tables=1) as rows:
        graph = graph_over(rows)
        for size in range(2, OWN + 3):
            graph(torch.arange(size), torch.zeros(size))
        with pytest.raises(CapacityError):
            graph(torch.arange(50), torch.zeros(50))
        graph(torch.arange(20), torch.zeros(20))
        assert compiled_steps(graph) == OWN + 1


def test_a_step_of_open_sizes_that_fails_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    def loss(graph: Any, features: Jagged) -> Tensor:
        return shaky(graph.rows(features.values, 0)).square().sum()

    with make(options("cached_host"), None) as rows, make(options("cached_host"), None) as other:
        graphs = [training(loss, rows=rows), training(loss, rows=other)]
        _failing.add(3)
        for total in (30, 40, 50, 50, 60):
            assert torch.equal(*(graph(jagged(total)) for graph in graphs[:: 1 if total < 50 else -1]))
        assert contents(rows).tobytes() == contents(other).tobytes()
    assert sorted(map(compiled_steps, graphs)) == [1, 3]  # one for each of 40, 50 and 60
    assert len([record for record in caplog.records if "the dynamic-shape step failed" in record.message]) == 1
