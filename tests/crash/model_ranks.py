"""Rounds of embeddings that are trained together by several ranks, which draw the same operations; rank 0 logs them."""

from __future__ import annotations

import os
import random
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.ranks import run_ranks
from tierbed import GroupError, MultiTableEmbedding
from tierbed.distributed import World

from .model_plan import WEIGHTS
from .model_rounds import ModelRounds, checked
from .model_trainer import ModelTrainer
from .rank_rounds import train_ranks
from .rank_trainer import meet, world_of
from .trainer import begun

OF_RANKS = {name: weight for name, weight in WEIGHTS.items() if name not in ("background", "command", "live")}


class RankModelTrainer(ModelTrainer):
    """Operations of all ranks."""

    world: World

    def __init__(self, world: World, path: Path, plan: dict[str, Any], files: list[int]) -> None:
        self.world, self.is_victim = world, world.rank == plan["victim"]
        super().__init__(path, plan, files if world.rank == 0 else [])

    def run(self) -> None:
        self.operate_all(OF_RANKS)
        if self.is_victim:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(self.world)

    def operate(self, operation: str) -> None:
        meet(self.world)  # so that all see the same files
        super().operate(operation)

    def keep(self, state: Any, place: Path) -> None:
        if self.world.rank == 0:
            super().keep(state, place)

    def close(self, one: MultiTableEmbedding) -> None:
        """Closed by all ranks before the log says so."""

        def closed() -> None:
            one.close()
            meet(self.world)

        self.logged("reopen", closed, one.name)

    def reopen(self) -> None:
        for one in self.chance.sample(self.members.all, len(self.members.all)):
            self.close(one)
        self.open([self.chance.choice(["device", "host", "ssd", "ssd_host"]) for _ in self.members.all])


def train(place: str, plan: dict[str, Any], rank: int, port: int, events: Connection) -> None:
    """Work in `place` as one of the ranks until killed, or until another is."""
    files = [begun(Path(place), False), events.fileno()]
    try:
        RankModelTrainer(world_of(rank, plan["ranks"], port), Path(place, "store", "model"), plan, files).run()
    except GroupError:  # of a killed rank, or else the round reports the error
        Path(place, f"ended-{rank}").write_text(traceback.format_exc())


class ModelRankRounds(ModelRounds):
    """Runs rounds of that many ranks, of which one is killed, and the others find out or are killed with it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder)
        self.ranks = ranks

    def train(self, place: Path, session: Any, orders: dict[str, Any]) -> None:
        chance = random.Random(session.seed + 2)
        killed = {"ranks": self.ranks, "victim": chance.randrange(self.ranks), "all_die": chance.random() < 0.5}
        train_ranks(place, SimpleNamespace(kill=session.kill, **killed), {**orders, **killed}, train)

    def found(self, *given: Any) -> list[Any]:
        return run_ranks(self.ranks, checked, *given)
