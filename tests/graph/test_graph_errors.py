"""What a static graph cannot hold is refused with a message that names the place and the remedy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from support.embeddings import make
from support.graphs import DIM, embedding, graph_of, training
from support.refusals import check_refusal
from support.stores import options
from tierbed import Graph, MultiTableEmbedding
from tierbed.engine.errors import GraphError, OptimizerError

outside = nn.Linear(3, 1)


def branches(graph: Any, x: Tensor) -> Tensor:
    loss: Tensor = graph.net(x).sum()
    if loss > 0:
        loss = -loss
    return loss


def changes_ids_between_lookups(graph: Any, x: Tensor) -> None:
    first = graph.rows(graph.ids + 1).sum()
    graph.ids.add_(1)
    (first + graph.rows(graph.ids * 2).sum()).backward()


def replaces_saved_ids(graph: Any, x: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = graph.rows(graph.ids).sum()
    loss.backward()


def draws_ids_after_dropout(graph: Any, x: Tensor) -> None:
    first = F.dropout(graph.rows(torch.tensor([1, 2, 3])), 0.5)
    (first * graph.rows(torch.randint(0, 50, (3,)))).sum().backward()


NEEDS_VALUES = r"test_graph_errors\.py.*<lambda>.*needs a tensor's value"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a branch": (branches, r"test_graph_errors\.py.*in branches: `if loss > 0:`.*torch\.where"),
    "an item": (lambda graph, x: x.sum().item(), NEEDS_VALUES),
    "a mask": (lambda graph, x: x[x > 0], NEEDS_VALUES),
    "nonzero": (lambda graph, x: x.nonzero(), NEEDS_VALUES),
    "unique": (lambda graph, x: x.unique(), NEEDS_VALUES),
    "a method of an embedding": (
        lambda graph, x: graph.rows.put(torch.arange(3), torch.zeros(3, DIM)),
        r"test_graph_errors\.py.*in <lambda>: `lambda graph, x: graph\.rows\.put\(",
    ),
    "a gradient of an argument": (
        lambda graph, x: x.sum().backward(),
        "argument .* requires grad, but a graph keeps no gradient of its arguments",
    ),
    "a lazy module": (lambda graph, x: graph.lazy(x), r"lazy\.\w+ has no shape yet"),
    "a gradient hook": (lambda graph, x: graph.hooked(x), r"hooked\.weight has a gradient hook"),
    "a seed": (lambda graph, x: (torch.manual_seed(0), x)[1], r"torch\.manual_seed"),
    "a seed and a draw": (lambda graph, x: (torch.manual_seed(0), torch.rand(2))[1], r"torch\.manual_seed"),
    "an assignment to data": (lambda graph, x: setattr(graph.net.weight, "data", x.detach()), r"\.data .*copy_"),
    "an item of an attribute": (lambda graph, x: x * graph.ids[0].item(), "reads the value of the tensor"),
    "a number of an attribute": (lambda graph, x: x * float(graph.ids[0]), "reads the value of the tensor"),
    "ids that change between lookups": (changes_ids_between_lookups, "changed in place"),
    "ids that a hook replaces for backward": (replaces_saved_ids, "saved_tensors_hooks"),
    "a batch norm without momentum": (lambda graph, x: graph.norm(x), r"graph\.norm\(x\).*a momentum, such as 0\.1"),
    "ids that are drawn after dropout": (draws_ids_after_dropout, "draw the ids of all lookups first"),
    "a higher-order op": (lambda graph, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), r"cond.*torch\.where"),
}


@pytest.mark.parametrize(("build", "match"), REFUSED.values(), ids=REFUSED)
def test_what_a_static_graph_cannot_hold_is_refused(build: Callable[..., Any], match: str) -> None:
    norm = nn.BatchNorm1d(3, momentum=None)
    modules: dict[str, nn.Module] = {"net": nn.Linear(3, 1), "rows": embedding(), "norm": norm}
    if "lazy" in match:
        modules["lazy"] = nn.LazyLinear(1)
    if "gradient hook" in match:
        modules["hooked"] = nn.Linear(3, 1)
        modules["hooked"].weight.register_hook(lambda grad: grad * 2)  # type: ignore[operator, union-attr]
    trained = [*modules["net"].parameters(), *modules["rows"].parameters()]
    graph: Any = graph_of(build, torch.optim.SGD(trained, lr=0.1), **modules)
    graph.ids = torch.tensor([3])
    x = torch.ones(2, 3, requires_grad="requires grad" in match)
    with pytest.raises(GraphError, match=match):
        graph(x)
    assert isinstance(graph.net.weight, nn.Parameter)
    assert graph.net(torch.ones(2, 3)).shape == (2, 1)
    assert [tensor.grad for tensor in (x, *graph.net.parameters())] == [None] * 3


def test_a_wrong_shape_raises_what_torch_raises_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    said = logging.getLogger("torch._subclasses.fake_tensor")
    said.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError) as caught:
            graph_of(lambda graph, x: graph.net(x), net=nn.Linear(3, 1))(torch.ones(2, 4))
    finally:
        said.removeHandler(caplog.handler)
    assert not isinstance(caught.value, GraphError)
    assert [record for record in caplog.records if record.name == said.name] == []
    assert not said.filters


def test_an_exception_in_a_compiled_step_leaves_the_graph_usable() -> None:
    net = nn.Linear(3, 1)
    graph = training(lambda graph, x, rows: graph.net(x[rows]).sum(), net=net)
    before = net.weight.clone()
    with pytest.raises(IndexError):
        graph(torch.ones(2, 3), torch.tensor([0, 7]))
    assert torch.equal(net.weight, before)
    graph(torch.ones(2, 3), torch.tensor([0, 1]))
    assert not torch.equal(net.weight, before)


@dataclass(frozen=True)
class Inputs:
    x: Tensor


VALUES = [
    {1, 2},
    bytearray(b"x"),
    type("Slotted", (), {"__slots__": ("factor",)})(),
    Inputs(outside.weight),
    nn.Dropout(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_an_argument_without_a_value_is_named(value: object) -> None:
    graph = graph_of(lambda graph, x, values: x)
    for given in ([1, value], [value]):
        named = "argument", f"[{len(given) - 1}] is a {type(value).__name__}"
        check_refusal((lambda given=given: graph(torch.ones(1), given), GraphError, *named))


class Outside(Graph):
    def build(self, x: Tensor, trained: bool) -> None:
        with torch.set_grad_enabled(trained):
            loss = outside(x).sum()
        if trained:
            loss.backward()


def test_a_parameter_of_a_module_outside_the_graph_is_named() -> None:
    with pytest.raises(GraphError, match=r"'outside\.(weight|bias)'.*assign its module to self"):
        Outside()(torch.ones(2, 3), True)
    assert [outside.weight.grad, outside.bias.grad] == [None, None]
    graph = Outside()
    graph.add_optimizer(torch.optim.SGD(outside.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"SGD holds parameter 'outside\.weight'.*assign its module to self"):
        graph(torch.ones(2, 3), False)


def test_add_optimizer_refuses_what_it_cannot_run_and_keeps_nothing_of_it() -> None:
    def build(graph: Any, ids: Tensor) -> None:
        graph.rows(ids).sum().backward()

    rows, others, ids = embedding(), embedding(), torch.tensor([1])
    graph_of(build, torch.optim.SGD(others.parameters()), rows=others)(ids)
    graph = graph_of(build, net=nn.Linear(3, 1), rows=rows, others=others)
    dense = graph.net.parameters  # type: ignore[union-attr]
    sgd = torch.optim.SGD(dense(), lr=0.1)
    graph.add_optimizer(sgd)
    for optimizer, *named in (
        (0.1, "float", "torch.optim"),
        (torch.optim.LBFGS(nn.Linear(3, 1).parameters()), "LBFGS"),
        (torch.optim.Rprop(rows.parameters()), "Rprop"),
        (sgd, "already added"),
        (torch.optim.Adam(dense()), "'net.weight' is in two optimizers", "SGD and Adam"),
        (torch.optim.Adam([*rows.parameters(), *others.parameters()]),),
    ):
        check_refusal((lambda one=optimizer: graph.add_optimizer(one), OptimizerError, *named))
    assert len(list(graph._Graph__optimizers)) == 1
    graph.add_optimizer(torch.optim.SGD(rows.parameters(), lr=1.0))
    adam = torch.optim.Adam(rows.parameters())
    check_refusal((lambda: graph.add_optimizer(adam), OptimizerError, "'rows.shadow' is in two optimizers"))
    before = rows.get(ids)
    graph(ids)
    torch.testing.assert_close(rows.get(ids), before - 1)


def test_a_graph_without_build_or_with_forward_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Net defines no build"):
        type("Net", (Graph,), {})()(torch.ones(1))
    with pytest.raises(GraphError, match=r"Plain defines forward\(\).*rename forward\(\) to build\(\)"):
        type("Plain", (Graph,), {"forward": lambda self, x: x})()


def test_two_embeddings_of_one_store_folder_are_named(tmp_path: Path) -> None:
    def graph_in(*folders: Path) -> Graph:
        towers = nn.ModuleList(make(options("host", folder), name="rows", tables=1) for folder in folders)
        return graph_of(lambda graph, ids: sum(tower(ids).sum() for tower in graph.towers).backward(), towers=towers)

    def train_rows(graph: Graph) -> None:
        graph.add_optimizer(torch.optim.SGD(graph.parameters(), lr=1.0))

    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    graph, apart = graph_in(tmp_path, tmp_path / "link"), graph_in(tmp_path / "a", tmp_path / "b")
    for use in (
        lambda: train_rows(graph),
        lambda: graph(torch.tensor([1])),
        lambda: graph.save(tmp_path / "checkpoint"),
        lambda: train_rows(apart),
    ):
        check_refusal((use, GraphError, "towers.0 and towers.1 are two embeddings named 'rows'"))
    assert not any(tower.is_open for tower in graph.towers)  # type: ignore[union-attr]
    graph.towers[1] = graph.towers[0]
    train_rows(graph)
    graph(torch.tensor([1]))


def test_dropout_inside_a_checkpoint_is_refused_and_attention_without_is_not() -> None:
    def loss(graph: Any, x: Tensor, rate: float, reentrant: bool) -> Tensor:
        def run(w: Tensor) -> Tensor:
            q = (x * w).view(1, 1, 2, 3)
            return F.scaled_dot_product_attention(F.dropout(q, rate) if rate else q, q, q)

        return checkpoint(run, graph.net.weight, use_reentrant=reentrant).sum()

    graph = training(loss, net=nn.Linear(3, 1, bias=False))
    state = torch.get_rng_state()
    for reentrant in (False, True):
        with pytest.raises(GraphError, match=r"dropout inside torch\.utils\.checkpoint"):
            graph(torch.ones(2, 3), 0.5, reentrant)
        graph(torch.ones(2, 3), 0.0, reentrant)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_the_closure_draws_as_in_eager_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    graph = graph_of(lambda graph: torch.rand(3, generator=generator))
    ours = [graph(), graph()]
    generator.manual_seed(1)
    assert all(torch.equal(torch.rand(3, generator=generator), draw) for draw in ours)


def test_a_step_of_an_optimizer_in_build_is_refused_by_its_name() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def build(graph: Any, x: Tensor) -> None:
        graph.net(x).sum().backward()
        optimizer.step()

    said = r"build calls (.*SGD.*leave step\(\) out|step\(\) of SGD.*remove that call)"
    for added in ((), (optimizer,)):
        with pytest.raises(GraphError, match=said):
            graph_of(build, *added, net=net)(torch.ones(3, 2))
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is net.weight


def test_an_optimizer_whose_closure_calls_the_graph_is_none_of_build() -> None:
    net, loose = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    graph = graph_of(lambda graph, x: (graph.net(x) * loose).sum(), net=net)
    with pytest.raises(GraphError, match="build uses the tensor"):
        torch.optim.SGD(net.parameters()).step(lambda: graph(torch.ones(3, 2)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_parameters_with_an_optimizer_in_backward_are_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = nn.Linear(2, 1)
    graph = training(lambda graph, x: graph.net(x).sum(), net=net)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    with pytest.raises(GraphError, match=r"net\.weight was passed to apply_optimizer_in_backward.*add_optimizer"):
        graph(torch.ones(3, 2))


def test_a_graph_inside_a_graph_is_refused_by_name() -> None:
    inner = training(lambda graph, x: graph.net(x).sum(), net=nn.Linear(3, 1))
    for _ in range(2):
        inner(torch.ones(2, 3))
        with pytest.raises(GraphError, match="calls the graph Built"):
            graph_of(lambda graph, x: graph.inner(x), inner=inner)(torch.ones(2, 3))


def test_two_threads_may_make_the_first_calls_of_graphs_that_share_rows() -> None:
    rows = embedding()
    graphs = [graph_of(lambda graph, ids: graph.rows(ids), rows=rows) for _ in range(2)]
    expected = [rows.get(torch.arange(n)) for n in range(1, 15)]
    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(lambda graph: [graph(torch.arange(n)) for n in range(1, 15)], graphs):
            assert all(map(torch.equal, results, expected))


SHARED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "DistributedDataParallel": (DistributedDataParallel, "net is a DistributedDataParallel"),
    "inside": (lambda net: nn.Sequential(DistributedDataParallel(net)), r"net\.0 is a DistributedDataParallel"),
    "FSDP": (lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")), "net is a FullySharded.*"),
    "fully_shard": (lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (1,))), "net is a FSDPLinear"),
    "replicate": (replicate, "net is a DDPLinear"),
    "tensors": (
        lambda net: parallelize_module(net, init_device_mesh("cpu", (1,)), ColwiseParallel()),
        r"net\.(weight|bias) is a DTensor",
    ),
}


def squares(graph: Any, x: Tensor) -> Tensor:
    return graph.net(x).square().sum()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*FSDP")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", SHARED)
def test_a_module_of_several_ranks_is_refused_by_name_not_trained_alone(kind: str) -> None:
    share, message = SHARED[kind]
    with pytest.raises(GraphError, match=f"{message}: .*give the graph the module without it"):
        training(squares, net=share(nn.Linear(3, 1)))(torch.ones(2, 3))


@pytest.mark.usefixtures("one_rank")
def test_a_module_or_graph_that_is_shared_after_the_first_step_is_refused() -> None:
    graph = training(squares, net=nn.Linear(3, 1))
    graph(torch.ones(2, 3))
    graph.net = DistributedDataParallel(graph.net)
    with pytest.raises(GraphError, match="net is a DistributedDataParallel"):
        graph(torch.ones(2, 3))
    graph.net = graph.net.module
    around = DistributedDataParallel(graph)
    with pytest.raises(GraphError, match=r"Built is in a DistributedDataParallel: .*train in one process"):
        around(torch.ones(2, 3))
    graph(torch.ones(2, 3))


class Sized(MultiTableEmbedding):
    """An embedding of a user who counts its rows, none at first, so that it is false."""

    def __len__(self) -> int:
        return 0


def test_a_use_of_the_parameter_of_an_embedding_without_rows_is_refused() -> None:
    rows = Sized("rows", DIM, torch.float32, torch.int64, None, options("host"))
    graph = graph_of(lambda graph, ids: graph.rows(ids).sum() + graph.rows.shadow.sum(), rows=rows).eval()
    check_refusal((lambda: graph(torch.arange(3)), GraphError, "'rows'"))
