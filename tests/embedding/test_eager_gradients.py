"""The gradients of rows are all taken by the step, from any thread, and whoever wants them as a tensor is refused."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.graphs import DIM, embedding, graph_of
from tierbed import ClosedError, EagerOptimizer, GraphError, MultiTableEmbedding, OptimizerError, OptionError

IDS = torch.tensor([3, 4, 3])
THREADS, STEPS = 4, 50
CONVERSIONS = {
    torch.float16: [lambda module: module.half(), lambda module: module.to(torch.float16)],
    torch.bfloat16: [lambda module: module.bfloat16(), lambda module: module.to(torch.bfloat16)],
    torch.float64: [lambda module: module.double(), lambda module: module.type(torch.float64)],
}


def sgd(rows: nn.Module, lr: float = 1.0) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=lr), rows)


def test_rows_in_a_distributed_data_parallel_are_refused_not_trained_apart(one_rank) -> None:
    """It talks to other ranks, and rows talk to none: ranks would drift apart."""
    rows, net = embedding(), nn.Linear(DIM, 1)
    model = nn.Sequential(rows, net)
    optimizer, around = sgd(model), DistributedDataParallel(model)
    with pytest.raises(OptimizerError, match=r"embedding 'rows\d+' is in a DistributedDataParallel: "):
        around(IDS)
    with torch.no_grad():
        around(IDS)
    model(IDS).sum().backward()
    optimizer.step()
    assert rows.size() == 2
    for module, name in ((around, "the module"), (nn.Sequential(rows, DistributedDataParallel(net)), "1")):
        with pytest.raises(OptimizerError, match=rf"{name} is a DistributedDataParallel: .*train in one process"):
            EagerOptimizer(torch.optim.Adagrad(module.parameters()), module)


@pytest.mark.parametrize("dtype", CONVERSIONS)
def test_a_conversion_is_taken_to_what_lookups_return_and_else_refused_with_its_remedy(dtype) -> None:
    rows, net = embedding(), nn.Linear(DIM, 1)
    graph = graph_of(lambda graph, ids: graph.net(graph.rows(ids)), net=net, rows=rows)
    remedy = r"results by \.to" if dtype == torch.float64 else rf"give output_dtype={dtype} when it is made"
    refused = rf"embedding 'rows\d+': cannot convert it to {dtype}.*{remedy}"
    for convert in CONVERSIONS[dtype]:
        for module in (rows, nn.Sequential(rows, nn.Linear(DIM, 1))):
            with pytest.raises(OptionError, match=rf"{refused}.*only the other.*half converted"):
                convert(module)
        for whole in (graph, nn.Sequential(graph)):
            with pytest.raises(OptionError, match=rf"{refused}.*Nothing of the Built is converted by now$") as error:
                convert(whole)
            assert "in part" not in str(error.value)
    assert rows(IDS).dtype == rows.shadow.dtype == net.weight.dtype == torch.float32
    assert graph.to("cpu", torch.float32) is graph
    if dtype == torch.float64:
        return
    rows = embedding(output_dtype=dtype)
    optimizer, before = sgd(rows), rows.get([4])
    for convert in CONVERSIONS[dtype]:
        for module in (rows, nn.Sequential(rows, nn.Linear(DIM, 1))):
            convert(module)
            rows.float()
    rows(IDS).sum().backward()
    rows.to(dtype)
    optimizer.step()
    assert rows.shadow.dtype == torch.float32
    torch.testing.assert_close(before - rows.get([4]), torch.ones(1, DIM))


@pytest.fixture
def switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("shared", [False, True])
def test_threads_that_call_backward_at_once_lose_no_gradient(switches, shared) -> None:
    rows = embedding()
    optimizer, before = sgd(rows), rows.get(range(THREADS))
    every = [torch.arange(THREADS)] * THREADS if shared else [torch.tensor([thread]) for thread in range(THREADS)]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    together, all_done = Barrier(THREADS), Barrier(THREADS, step)

    def train(ids: Tensor) -> None:
        for _ in range(STEPS):
            loss = rows(ids).sum()
            together.wait()
            loss.backward()
            all_done.wait()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(train, every))
    expected = before - STEPS * (THREADS if shared else 1)
    torch.testing.assert_close(rows.get(range(THREADS)), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_of_the_parameter_is_refused_at_the_backward(register) -> None:
    rows = embedding()
    optimizer = sgd(rows)
    handle = getattr(rows.shadow, register)(lambda given: None)
    with pytest.raises(GraphError, match=r"'rows\d+': its parameter has a gradient hook.*what a lookup returns"):
        rows(IDS).sum().backward()
    handle.remove()
    before, out = rows.get([3]), rows(IDS)
    out.register_hook(lambda grad: grad * 5)
    out.sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - rows.get([3]), torch.full((1, DIM), 10.0))


@pytest.mark.parametrize(
    "use",
    [
        lambda grad: grad.data,
        lambda grad: grad.data.mul_(0),
        lambda grad: grad.real,
        lambda grad: grad.to(torch.float64),
        lambda grad: grad.cpu(),
        lambda grad: grad.clone(),
        lambda grad: grad.norm(),
        lambda grad: grad + 1,
        lambda grad: grad.zero_(),
        lambda grad: grad.clamp_(min=-1.0, max=2.0),
        lambda grad: grad.mul_(grad),
        lambda grad: grad.item(),
        lambda grad: grad.numpy(),
        lambda grad: setattr(grad, "data", torch.zeros(1)),
        lambda grad: torch._has_compatible_shallow_copy_type(grad, grad),
    ],
)
def test_numbers_are_not_to_be_had_from_the_gradient_of_rows(use) -> None:
    rows = embedding()
    kept = sgd(rows)
    rows(IDS).sum().backward()
    refused = rf"gradient of embedding '{rows.name}': no tensor holds.*clip_grad_norm_[(]parameters"
    with pytest.raises(GraphError, match=refused):
        use(rows.shadow.grad)
    for other in (lambda: nn.utils.clip_grad_norm_([rows.shadow], 1.0, math.inf), torch.optim.Adam([rows.shadow]).step):
        with pytest.raises(GraphError, match=refused):
            other()
    rows.to_empty(device="meta")
    assert rows.shadow.grad is not None
    assert rows.shadow.grad.device.type == "meta"
    rows.to_empty(device="cpu")
    kept.step()
    assert rows.size() == 2


@pytest.mark.filterwarnings("ignore:volatile was removed", "ignore:The use of `x.T`")
def test_what_the_gradient_of_rows_is_may_be_asked() -> None:
    rows = embedding()
    kept = sgd(rows)
    rows(IDS).sum().backward()
    grad: Any = rows.shadow.grad
    assert repr(grad) == str(grad) == f"ShadowGrad(rows of embedding '{rows.name}')"
    assert (grad.shape, grad.size(), grad.dim(), grad.stride(), grad.storage_offset()) == ((1, 1), (1, 1), 2, (1, 1), 0)
    assert (grad.dtype, grad.device, grad.layout) == (torch.float32, torch.device("cpu"), torch.strided)
    assert grad.is_floating_point()
    for name in ("is_complex", "is_conj", "is_neg", "is_inference", "_is_view"):
        assert not getattr(grad, name)()
    assert grad.untyped_storage().nbytes() == 4
    for name in sorted(dir(torch.Tensor)):
        if type(getattr(torch.Tensor, name)).__name__ == "getset_descriptor":
            try:
                assert not isinstance(getattr(grad, name), Tensor), name
            except (GraphError, RuntimeError, TypeError):  # as .data, and .imag of what is real
                assert name in ("H", "T", "data", "imag", "mH", "mT", "real", "name"), name
    del kept


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_embedding_has_one_optimizer_in_backward_and_no_other() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    rows = embedding()
    kept = sgd(rows)
    _apply_optimizer_in_backward(torch.optim.SGD, rows.parameters(), {"lr": 0.1})
    with pytest.raises(OptimizerError, match=r"embedding 'rows\d+' has an EagerOptimizer"):
        rows(IDS)
    with torch.no_grad():
        rows(IDS)
    del kept
    with pytest.raises(OptimizerError, match=r"'rows\d+': apply_optimizer_in_backward gave .* leave the embedding out"):
        sgd(rows)
    with pytest.raises(OptimizerError, match=r"'rows\.shadow' is in two optimizers, SGD and SGD"):
        graph_of(lambda graph, ids: graph.rows(ids).sum(), torch.optim.SGD(rows.parameters()), rows=rows)(IDS)
    _apply_optimizer_in_backward(torch.optim.SGD, rows.parameters(), {"lr": 0.1})
    with pytest.raises(OptimizerError, match="gave it 2 optimizers; give it one"):
        rows(IDS)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_optimizer_in_backward_trains_rows_as_an_eager_optimizer_and_a_graph_do() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    eager, fused, graphed = (embedding(seed=3) for _ in range(3))
    optimizer = EagerOptimizer(torch.optim.Adagrad(eager.parameters(), lr=0.1), eager)
    for rows in (fused, graphed):
        _apply_optimizer_in_backward(torch.optim.Adagrad, rows.parameters(), {"lr": 0.1})

    def backward(rows: MultiTableEmbedding) -> None:
        (rows(IDS).square().sum() + rows(IDS.flip(0)).sum()).backward()

    graph = graph_of(lambda graph, ids: backward(graph.rows), rows=graphed)
    for _ in range(3):
        optimizer.zero_grad()
        backward(eager)
        optimizer.step()
        backward(fused)
        assert fused.shadow.grad is None
        graph(IDS)
        assert torch.equal(eager.get(IDS), fused.get(IDS))
        assert torch.equal(eager.get(IDS), graphed.get(IDS))
    known = weakref.ref(fused)
    del fused, rows
    gc.collect()
    assert known() is None  # torch's hook keeps the parameter, and nothing of the rows


def test_a_gradient_whose_embedding_was_dropped_says_so() -> None:
    rows = embedding()
    optimizer = sgd(rows)
    rows(IDS).sum().backward()
    shadow = rows.shadow
    del optimizer, rows
    gc.collect()
    for use in (lambda: torch.nn.utils.clip_grad_norm_([shadow], 1.0), lambda: shadow.grad.mul_(0.5)):  # type: ignore[union-attr]
        with pytest.raises(ClosedError, match="keep the module"):
            use()
