"""Embeddings that were used before they are trained together: they join, and a kill leaves all at one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.ranks import fails
from support.stores import options
from support.together import keep_open, killed
from tierbed.engine.durable import temporary_path
from tierbed.engine.errors import StoreError

ID = torch.tensor([1])
RATE = 0.25  # so that rows are exact
USES: dict[str, Callable[[tierbed.MultiTableEmbedding], object]] = {
    "put": lambda one: one.put(ID, torch.ones(1, 2)),
    "get": lambda one: one.get(ID),
    "lookup": lambda one: one(ID),
    "size": lambda one: one.size(),
}


def embeddings(path: Path, count: int) -> nn.ModuleList:
    """Embeddings in folders, of two kinds of store in turn, whose rows begin with ones."""
    made = nn.ModuleList(
        tierbed.MultiTableEmbedding(
            f"e{number}",
            2,
            torch.float32,
            torch.int64,
            None,
            options(("host", "ssd")[number % 2], path),
            default_initializer=tierbed.make_constant_initializer(1.0),
        )
        for number in range(count)
    )
    keep_open(made)
    return made


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), RATE)


class Summed(tierbed.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(sgd(model))

    def build(self, ids: Tensor) -> Tensor:
        loss = torch.stack([one(ids).sum() for one in self.model.children()]).sum()
        loss.backward()
        return loss


def optimized(modules: list[nn.Module]) -> Callable[[], None]:
    """A step of all, by an EagerOptimizer for each of the modules."""
    optimizers = [tierbed.EagerOptimizer(sgd(one), one) for one in modules]
    members = [one for whole in modules for one in whole.modules() if isinstance(one, tierbed.MultiTableEmbedding)]

    def step() -> None:
        torch.stack([one(ID).sum() for one in members]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step.optimizers = optimizers  # type: ignore[attr-defined]
    return step


def trained(path: Path, count: int, used: int, use: str, how: str) -> None:
    """Three steps, a save of all, and a fourth step. The first `used` of the embeddings are used before."""
    model = embeddings(path, count)
    for one in list(model)[:used]:
        USES[use](one)
    if how == "graph":
        graph = Summed(model)
        step: Any = lambda: graph(ID)  # noqa: E731
    else:
        step = optimized([model] if how == "optimizer" else list(model))
    for number in range(3):
        step()
        if how == "checkpoints":
            tierbed.save_checkpoint(path / f"checkpoint{number}", model, step.optimizers)
    if how == "graph":
        graph.save_snapshot("three")
    elif how == "optimizer":
        step.optimizers[0].save_snapshot("three")
    step()


def steps(path: Path, count: int) -> list[float]:
    """The steps of the embeddings' rows after a kill, in one group from the start."""
    model = embeddings(path, count)
    tierbed.EagerOptimizer(sgd(model), model)
    return [(1 - float(one.get(ID)[0, 0])) / RATE for one in model.children()]  # type: ignore[operator]


@pytest.mark.parametrize("how", ["optimizer", "graph", "checkpoints"])
@pytest.mark.parametrize(
    ("count", "used", "use"),
    [
        (2, 2, "put"),
        (2, 1, "get"),
        (3, 2, "lookup"),
        *(
            pytest.param(count, used, use, marks=pytest.mark.slow)
            for count in (2, 3)
            for used in range(count + 1)
            for use in USES
        ),
    ],
)
def test_embeddings_that_were_used_before_they_join_recover_to_one_step(
    tmp_path: Path, count: int, used: int, use: str, how: str
) -> None:
    assert killed(trained, tmp_path, count, used, use, how) is None
    assert killed(steps, tmp_path, count) == [3.0] * count


def joined_again(path: Path, blocked: int) -> str:
    """The first step cannot write the MARK of one of two embeddings; then they are trained."""
    model = embeddings(path, 2)
    for one in model.children():
        USES["put"](one)  # type: ignore[arg-type]
    in_the_way = temporary_path(path / f"e{blocked}" / "MARK")
    in_the_way.mkdir()
    first: Any = optimized([model])
    said = fails(first, StoreError)
    in_the_way.rmdir()
    first.optimizers[0].zero_grad()
    step: Any = optimized([model])
    for _ in range(3):
        step()
    step.optimizers[0].save_snapshot("three")
    step()
    model[0].save_snapshot("four")  # of one alone: it is no step of both
    return said


@pytest.mark.parametrize("blocked", [0, 1])
def test_a_join_that_failed_is_made_up_for_by_the_next(tmp_path: Path, blocked: int) -> None:
    assert "write MARK" in killed(joined_again, tmp_path, blocked)
    assert killed(steps, tmp_path, 2) == [3.0, 3.0]


def beside_a_new_store(path: Path) -> list[float]:
    """One store of a group is opened beside another that is new and knows of no group, and no optimizer is made."""
    two = embeddings(path, 2)
    with torch.no_grad():
        return [float(one(ID)[0, 0]) for one in reversed(list(two.children()))]


def test_a_store_of_a_group_opens_beside_one_whose_folder_is_new(tmp_path: Path) -> None:
    assert killed(trained, tmp_path, 2, 0, "get", "optimizer") is None
    (tmp_path / "e1").rename(tmp_path / "aside")
    assert killed(beside_a_new_store, tmp_path)
