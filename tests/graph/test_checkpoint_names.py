"""A checkpoint has the names of the plain model, so wrappers around a model, or in it, neither make nor break one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.ranks import run_ranks
from tierbed import (
    EagerOptimizer,
    Graph,
    MultiTableEmbedding,
    load_checkpoint,
    make_host_mem_store_options,
    save_checkpoint,
)
from tierbed.graph.state.folders import read_checkpoint
from tierbed.jagged import DistributedModelParallel

IDS = torch.arange(24).reshape(4, 6)


class Net(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda dense: dense, world: Any = None) -> None:
        super().__init__()
        self.rows = MultiTableEmbedding(
            "rows", 4, torch.float32, torch.int64, None, make_host_mem_store_options(), seed=0, world=world
        )
        torch.manual_seed(0)
        self.dense = wrap(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = (self.dense(self.rows(ids)) * self.scale).square().mean()
        return loss


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def fabric(module: nn.Module) -> nn.Module:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_module(module)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda module: module,
    "parallel": DistributedModelParallel,
    "data parallel": nn.DataParallel,
    "compiled": compiled,
    "both": lambda module: compiled(DistributedModelParallel(module)),
    "fabric": fabric,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda wrap=wrap: wrap(Net()) for name, wrap in WRAPPERS.items()},  # type: ignore[misc]
    "a part is compiled": lambda: Net(compiled),
    "a part is parallel": lambda: Net(nn.DataParallel),
    "all of it": lambda: compiled(Net(lambda dense: compiled(nn.DataParallel(dense)))),
}


def inner(model: nn.Module) -> Net:
    return next(module for module in model.modules() if isinstance(module, Net))


def optimizer_of(model: nn.Module) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.Adam(inner(model).parameters(), lr=0.1), inner(model))


class Around(nn.Module):
    """A module of the user that holds a wrapped one."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.net = wrap(Net())


def train(model: nn.Module, optimizer: EagerOptimizer, ids: Tensor) -> list[float]:
    losses = []
    for row in ids:
        optimizer.zero_grad()
        loss = inner(model)(row)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(make: Callable[[], nn.Module], path: Path) -> list[float]:
    """Train a model, save it, and go on: the losses that follow."""
    model = make()
    optimizer = optimizer_of(model)
    train(model, optimizer, IDS[:2])
    save_checkpoint(path, model, optimizer)
    return train(model, optimizer, IDS[1:])


def resumed(make: Callable[[], nn.Module], path: Path) -> list[float]:
    model = make()
    optimizer = optimizer_of(model)
    load_checkpoint(path, model, optimizer)
    return train(model, optimizer, IDS[1:])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder for checkpoints, one of them of a model without wrappers, and the losses that follow."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, trained(Net, folder / "none")


@pytest.mark.filterwarnings("ignore")  # of Lightning's packages
@pytest.mark.parametrize(
    "source", [pytest.param(name, marks=[pytest.mark.slow] * (name == "both")) for name in MODELS if name != "none"]
)
def test_a_checkpoint_loads_with_other_wrappers(source: str, saved: tuple[Path, list[float]]) -> None:
    folder, expected = saved
    assert trained(MODELS[source], folder / source) == expected
    assert list(read_checkpoint(folder / source).snapshots) == ["rows"]
    for make, name in ((MODELS[source], source), (Net, source), (MODELS[source], "none")):
        assert resumed(make, folder / name) == expected


@pytest.mark.parametrize("name", ["parallel", "data parallel", "compiled"])
def test_a_model_that_holds_a_wrapped_one_loads_as_one_that_holds_it_plain(name: str, tmp_path: Path) -> None:
    expected = trained(lambda: Around(WRAPPERS[name]), tmp_path / "saved")
    for wrap in (WRAPPERS["none"], WRAPPERS[name]):
        assert resumed(lambda wrap=wrap: Around(wrap), tmp_path / "saved") == expected
        again = Around(wrap)
        again.load_state_dict(again.state_dict(), strict=True)


def over_ranks(world: Any, folder: Path) -> tuple[float, Tensor]:
    """Loads what there is, trains, and saves for the next number of ranks."""
    parallel = DistributedModelParallel(Net(), env=world)
    net = inner(parallel)
    optimizer = EagerOptimizer(torch.optim.SGD(parallel.parameters(), lr=0.1), parallel)
    found = sorted(folder.iterdir())
    if found:
        load_checkpoint(found[-1], parallel, optimizer)
    rows = net.rows.get(torch.arange(24))
    optimizer.zero_grad()
    parallel(IDS[0]).backward()
    optimizer.step()
    save_checkpoint(folder / f"{len(found)}", parallel, optimizer)
    return float(net.scale.detach()), rows if found else net.rows.get(torch.arange(24))


def test_a_checkpoint_over_ranks_loads_over_any_number_of_them(tmp_path: Path) -> None:
    trained = None
    for number, ranks in enumerate((2, 3)):
        [scale, rows], *_ = run_ranks(ranks, over_ranks, tmp_path)
        plain = Net()
        optimizer = EagerOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), plain)
        load_checkpoint(tmp_path / f"{number}", plain, optimizer)
        assert float(plain.scale.detach()) == scale
        assert torch.equal(plain.rows.get(torch.arange(24)) if trained is None else trained, rows)
        train(plain, optimizer, IDS[2:])
        save_checkpoint(tmp_path / f"{number}", plain, optimizer, overwrite=True)  # the next ranks load this one
        trained = plain.rows.get(torch.arange(24))


class Compiled(Graph):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.module = Net(wrap)  # a name that a wrapper gives, too
        self.scale = nn.Parameter(torch.ones(()))
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.module(ids) * self.scale
        loss.backward()
        return loss


@pytest.mark.parametrize("first", [False, True])
def test_a_graph_loads_with_a_compiled_part_and_without(first: bool, tmp_path: Path) -> None:
    graph, again = Compiled(compiled if first else WRAPPERS["none"]), Compiled(WRAPPERS["none"] if first else compiled)
    graph(IDS[0])
    graph.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    assert torch.equal(again(IDS[1]), graph(IDS[1]))
    assert not torch.equal(again.scale, again.module.scale)
