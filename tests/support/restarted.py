"""Training that goes on from its last checkpoint; a script for torchrun."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from functools import partial
from pathlib import Path

import torch

from support.ranked import Ranked, batch, state
from tierbed import World, make_cached_ssd_store_options

STEPS, EVERY, KILLED = 12, 3, 7


def train(world: World, folder: Path, killed: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the steps that this process made, and what they came to. Rank `killed` is killed in one of them."""
    store = partial(make_cached_ssd_store_options, persistent_path=str(folder / "rows"), cache_budget_mb=1)
    graph = Ranked(world, store=store)
    saved = sorted(folder.glob("step-*"))
    if saved:
        graph.load(saved[-1])
    losses = []
    for step in range(EVERY * len(saved), STEPS):
        if step == KILLED and world.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(graph(*batch(world.rank, step)).item())
        if step % EVERY == EVERY - 1:
            graph.save(folder / f"step-{step:02}")
    found = losses, state(graph)
    graph.users.close()
    graph.items.close()
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    world = World.from_env(timeout=60)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    found = train(world, place, int(sys.argv[2]) if restarts == 0 else None)
    (place / f"found-{world.rank}").write_bytes(pickle.dumps((restarts, *found)))
