"""What a static graph cannot hold is refused with a message that names the place and the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tierbed.engine.errors import GraphError, OptimizerError
from tierbed.graph import Graph

outside = nn.Linear(3, 1)


class Net(Graph):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)


def test_control_flow_on_values_names_the_users_line() -> None:
    class Branch(Net):
        def build(self, x: Tensor) -> Tensor:
            loss = self.net(x).sum()
            if loss > 0:
                loss = -loss
            return loss

    graph = Branch()
    with pytest.raises(GraphError, match=r"test_graph_errors\.py.*in build: `if loss > 0:`.*torch\.where"):
        graph(torch.ones(2, 3))
    assert isinstance(graph.net.weight, nn.Parameter)
    assert graph.net(torch.ones(2, 3)).shape == (2, 1)


@pytest.mark.parametrize(
    "use", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.unique()]
)
def test_values_and_shapes_that_depend_on_data_are_refused(use: object) -> None:
    class Value(Graph):
        def build(self, x: Tensor) -> object:
            return use(x)  # type: ignore[operator]

    with pytest.raises(GraphError, match=r"test_graph_errors\.py.*<lambda>.*needs the value of a tensor"):
        Value()(torch.ones(3))


def test_an_exception_of_build_keeps_its_type_and_the_graph_stays_usable() -> None:
    class Picky(Net):
        def build(self, x: Tensor, fail: bool) -> Tensor:
            if fail:
                raise KeyError("mine")
            return self.net(x).sum()

    graph = Picky()
    with pytest.raises(KeyError, match="mine"):
        graph(torch.ones(2, 3), True)
    torch.testing.assert_close(graph(torch.ones(2, 3), False), graph.net(torch.ones(2, 3)).sum().detach())


def test_a_wrong_shape_raises_what_torch_raises() -> None:
    class Run(Net):
        def build(self, x: Tensor) -> Tensor:
            return self.net(x)

    with pytest.raises(RuntimeError) as caught:
        Run()(torch.ones(2, 4))
    assert not isinstance(caught.value, GraphError)


def test_an_exception_in_a_compiled_step_leaves_the_graph_usable() -> None:
    class Pick(Net):
        def build(self, x: Tensor, rows: Tensor) -> Tensor:
            loss = self.net(x[rows]).sum()
            loss.backward()
            return loss

    graph = Pick()
    graph.add_optimizer(torch.optim.SGD(graph.net.parameters(), lr=0.1))
    before = graph.net.weight.clone()
    with pytest.raises(IndexError):
        graph(torch.ones(2, 3), torch.tensor([0, 7]))
    assert torch.equal(graph.net.weight, before)
    graph(torch.ones(2, 3), torch.tensor([0, 1]))
    assert not torch.equal(graph.net.weight, before)


@pytest.mark.parametrize("value", [{1, 2}, bytearray(b"x"), type("Box", (), {})()])
def test_an_argument_without_a_value_is_named(value: object) -> None:
    class Take(Graph):
        def build(self, x: Tensor, options: list[object]) -> Tensor:
            return x

    with pytest.raises(GraphError, match=r"argument options\[1\] is a "):
        Take()(torch.ones(1), [1, value])
    with pytest.raises(GraphError, match=r"argument options\[0\] is a "):
        Take()(torch.ones(1), options=[value])


def test_a_parameter_of_a_module_outside_the_graph_is_named() -> None:
    class Outside(Graph):
        def build(self, x: Tensor) -> Tensor:
            loss = outside(x).sum()
            loss.backward()
            return loss

    with pytest.raises(GraphError, match=r"'outside\.(weight|bias)'.*assign its module to self"):
        Outside()(torch.ones(2, 3))
    assert outside.weight.grad is None
    assert outside.bias.grad is None


def test_an_optimizer_over_parameters_outside_the_graph_is_refused() -> None:
    class Outside(Net):
        def build(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                outside(x)
            return self.net(x)

    graph = Outside()
    graph.add_optimizer(torch.optim.SGD(outside.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"SGD holds parameter 'outside\.weight'.*assign its module to self"):
        graph(torch.ones(2, 3))


def test_add_optimizer_refuses_what_it_cannot_run() -> None:
    graph = Net()
    with pytest.raises(OptimizerError, match=r"got a float.*torch\.optim"):
        graph.add_optimizer(0.1)  # type: ignore[arg-type]
    with pytest.raises(OptimizerError, match="LBFGS"):
        graph.add_optimizer(torch.optim.LBFGS(graph.net.parameters()))
    sgd = torch.optim.SGD(graph.net.parameters(), lr=0.1)
    graph.add_optimizer(sgd)
    with pytest.raises(OptimizerError, match="already added"):
        graph.add_optimizer(sgd)
    with pytest.raises(OptimizerError, match=r"'net\.weight' is in two optimizers, SGD and Adam"):
        graph.add_optimizer(torch.optim.Adam(graph.net.parameters()))
    assert len(list(graph._Graph__optimizers)) == 1


def test_a_gradient_of_an_argument_is_refused_not_dropped() -> None:
    class Sensitive(Graph):
        def build(self, x: Tensor) -> Tensor:
            loss = x.sum()
            loss.backward()
            return loss

    with pytest.raises(GraphError, match="argument x requires grad"):
        Sensitive()(torch.ones(2, requires_grad=True))


def test_a_tensor_kept_on_a_module_is_refused_and_taken_away() -> None:
    class Keep(Net):
        def build(self, x: Tensor) -> Tensor:
            self.last = self.net(x)
            return self.last

    graph = Keep()
    graph.last = 5
    with pytest.raises(GraphError, match=r"attribute Keep\.last"):
        graph(torch.ones(2, 3))
    assert graph.last == 5


def test_a_buffer_that_build_replaces_is_refused_and_restored() -> None:
    class Count(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def build(self) -> Tensor:
            self.count = self.count + 1
            return self.count

    graph = Count()
    with pytest.raises(GraphError, match="replaces count"):
        graph()
    assert type(graph.count) is Tensor
    assert graph.count == 0


def test_a_lazy_module_without_shape_is_refused() -> None:
    class Lazy(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LazyLinear(1)

        def build(self, x: Tensor) -> Tensor:
            return self.net(x)

    with pytest.raises(GraphError, match=r"net\.\w+ has no shape yet"):
        Lazy()(torch.ones(2, 3))


def test_a_gradient_hook_is_refused_not_skipped() -> None:
    graph = Net()
    graph.net.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(GraphError, match=r"net\.weight has a gradient hook"):
        graph(torch.ones(2, 3))


def test_a_graph_without_build_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Net defines no build"):
        Net()(torch.ones(1))
