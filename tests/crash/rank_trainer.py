"""One of several ranks, of which some are killed. All ranks draw the same operations, and rank 0 writes them down."""

from __future__ import annotations

import os
import re
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tierbed import GroupError, MultiTableEmbedding, StoreError
from tierbed.distributed import World

from .history import History
from .model_plan import WEIGHTS
from .model_trainer import ModelTrainer
from .plan import RANK_WEIGHTS, draw_stores
from .trainer import Trainer, begun, tierbed

UNSAVED = re.compile(r"has live rows of .*, of step (\d+), and no snapshot of them")


class RankTrainer(Trainer):
    """Operations of all ranks in a store folder."""

    weights = RANK_WEIGHTS

    def __init__(self, path: Path, history: History, plan: dict[str, Any], files: list[int]) -> None:
        assert history.world is not None
        self.world = history.world
        self.is_victim = self.world.rank == plan["victim"]
        super().__init__(path, history, plan, files if self.world.rank == 0 else [])

    def run(self) -> None:
        """Until the victim is killed, at the latest by itself, and the others notice that it has exited."""
        self.operate()
        if self.is_victim:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(self.world)

    def draw(self) -> Any:
        return draw_stores(self.chance, self.world.size)

    def open(self, store: Any, **more: Any) -> None:
        try:
            super().open(store[self.world.rank], **more)
        except StoreError as error:
            found = UNSAVED.search(str(error))
            if found is None:
                raise
            self.save_closed_store(int(found[1]))
            super().open(store[self.world.rank], **more)

    def save_closed_store(self, step: int) -> None:
        """The remedy for rows of another number of ranks, which the command line can read on one host."""
        name = self.new_name()
        meet(self.world)
        if self.world.rank == 0:
            with self.logged("save", name=name, kind="full", step=step, parent=None):
                tierbed("snapshot", "save", self.store_path, "--", name)
        meet(self.world)

    def close(self) -> None:
        if self.going is not None and self.going[0] is not None and self.going[0].done:
            self.settle()  # a step has committed it
        meet(self.world)
        with self.logged("close"):
            self.embedding.close()
            meet(self.world)
        if self.world.size == 1:
            self.settle()
        elif self.going is not None:  # ranks drop what they save in the background
            with self.logged("drop", name=self.going[2]):
                pass
        self.going = None

    def command(self) -> None:
        """The command line between two runs, by rank 0."""
        self.settle()
        self.close()
        what = self.chance.choice(["save", "load", "prune", "merge"])
        before, saved = self.chance.getstate(), self.saved
        if self.world.rank == 0:
            getattr(self, f"command_{what}")()
        meet(self.world)
        self.chance.setstate(before)
        self.saved = saved + 1  # rank 0 may have used a name
        self.open(self.draw())


def meet(world: World) -> None:
    """Every rank is here."""
    world.all_gather_object("the ranks of a round meet", lambda: b"")


class RankModelTrainer(ModelTrainer):
    """Operations of all ranks."""

    world: World

    def __init__(self, world: World, path: Path, plan: dict[str, Any], files: list[int]) -> None:
        self.world, self.is_victim = world, world.rank == plan["victim"]
        super().__init__(path, plan, files if world.rank == 0 else [])

    def run(self) -> None:
        not_over_ranks = ("background", "command", "live")
        self.operate_all({name: weight for name, weight in WEIGHTS.items() if name not in not_over_ranks})
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
    folder, is_model = Path(place), "dims" in plan
    files = [begun(folder, plan["power"] and not is_model), events.fileno()]
    try:
        world = world_of(rank, plan["ranks"], port)
        if is_model:
            RankModelTrainer(world, folder / "store" / "model", plan, files).run()
        else:
            history = History(plan["keys"], plan["life"], plan["types"], world)
            RankTrainer(folder / "store", history, plan, files).run()
    except GroupError:  # of a killed rank, or else the round reports the error
        (folder / f"ended-{rank}").write_text(traceback.format_exc())


def world_of(rank: int, ranks: int, port: int) -> World:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    return World.from_env(timeout=60)
