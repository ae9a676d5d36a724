"""A graph over ranks trains with the bits of one process that accumulates the same parts and takes their mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.ranked import Ranked, assert_equal, batch, state
from support.ranks import run_ranks
from tierbed import World

STEPS = 4


def _scaled(graph: Ranked) -> None:
    graph.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    graph.set_grad_scaler(graph.scaler)


SETTINGS: dict[str, Callable[[Ranked], Any]] = {
    "plain": lambda graph: None,
    "norm": lambda graph: [graph.clip_grad_norm(0.05), _scaled(graph)],
    "everything": lambda graph: [graph.clip_grad_norm(0.05), graph.clip_grad_value(0.001), _scaled(graph)],
}


class Scaled(Ranked):
    """Multiplies its loss where it has a scaler."""

    scaler: Any = None

    def loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)


def reached(graph: Scaled) -> dict[str, Tensor]:
    scale = 1.0 if graph.scaler is None else graph.scaler.get_scale()
    return state(graph) | {"scale": torch.tensor(scale), "lr": torch.tensor(graph.optimizer.param_groups[0]["lr"])}


def over_ranks(world: World, setting: str, by_run: bool) -> tuple[list[float], dict[str, Tensor]]:
    graph = Scaled(world)
    SETTINGS[setting](graph)
    mine = [batch(world.rank, step, size=5 + 3 * world.rank) for step in range(STEPS)]
    losses = list(graph.run(mine, ahead=2)) if by_run else [graph(*one) for one in mine]
    return [loss.item() for loss in losses], reached(graph)


def in_one_process(ranks: int, setting: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of each rank's parts, and the state."""
    graph = Scaled(None)
    SETTINGS[setting](graph)
    graph.accumulate_grads(ranks, mean=True)
    parts = [[graph(*batch(rank, step, size=5 + 3 * rank)).item() for rank in range(ranks)] for step in range(STEPS)]
    return [list(losses) for losses in zip(*parts, strict=True)], reached(graph)


@pytest.mark.parametrize(
    ("ranks", "by_run", "setting"),
    [
        pytest.param(3, True, "plain", marks=pytest.mark.slow),
        pytest.param(2, False, "norm", marks=pytest.mark.slow),
        (2, True, "everything"),
    ],
)
def test_ranks_train_as_one_process_that_accumulates_their_parts(ranks: int, by_run: bool, setting: str) -> None:
    losses, expected = in_one_process(ranks, setting)
    for mine, (found, there) in zip(losses, run_ranks(ranks, over_ranks, setting, by_run), strict=True):
        assert found == mine
        assert_equal(there, expected)


def shown(world: World, path: str) -> tuple[str, set[str], str]:
    graph = Ranked(world)
    profile = graph.profile([batch(world.rank, step) for step in range(3)])
    graph.draw(f"{path}/{world.rank}.mmd")
    return repr(graph), set(profile.stages), Path(path, f"{world.rank}.mmd").read_text()


def test_what_travels_is_shown_as_a_stage_of_its_own(tmp_path: Path) -> None:
    for listed, stages, drawn in run_ranks(2, shown, str(tmp_path)):
        lines = [line.strip() for line in listed.splitlines()]
        assert lines.index("# pin") < lines.index("# gather") < lines.index("# exchange") < lines.index("# update")
        assert next(line for line in lines if line.startswith("send")).endswith("# items in host_mem")
        assert "exchange" in stages
        assert '["exchange"]' in drawn
