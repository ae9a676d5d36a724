"""One of several ranks, of which some are killed. All ranks draw the same operations, and rank 0 writes them down."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierbed import GroupError, MultiTableEmbedding, StoreError
from tierbed.distributed import World
from tierbed.engine.options.lookup import Lookup

from .history import History, Types, gradients
from .rank_plan import WEIGHTS, draw_stores
from .trainer import Trainer, tierbed

UNSAVED = re.compile(r"has live rows of .*, of step (\d+), and no snapshot of them")


class RankHistory(History):
    """Steps whose keys are divided among ranks. The rows are those of one process."""

    world: World

    def __init__(self, keys: int, life: str, types: Types, world: World) -> None:
        super().__init__(keys, life, types)
        self.world = world

    def batch(self, step: int) -> NDArray[np.int64]:
        return self._mine(super().batch(step))

    def take(self, embedding: MultiTableEmbedding, step: int) -> None:
        if len(self.gone(step)):
            gone = self._mine(self.gone(step))
            embedding.delete(gone, gone % 2)
        keys = self.batch(step)
        pinned = embedding.pin([Lookup(torch.from_numpy(keys), torch.from_numpy(keys % 2))])
        pinned.gather(0)
        pinned.update([torch.from_numpy(gradients(keys))], scale=1.0)

    def _mine(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        return keys[self.world.rank :: self.world.size]


class RankTrainer(Trainer):
    """Operations of all ranks in a store folder."""

    weights = WEIGHTS

    def __init__(self, path: Path, history: RankHistory, plan: dict[str, Any], files: list[int]) -> None:
        self.world = history.world
        self.first = self.world.rank == 0
        if self.world.rank != plan["victim"]:
            plan = {**plan, "kill": {**plan["kill"], "armed": False}}
        super().__init__(path, history, {**plan, "store": plan["stores"]}, files if self.first else [])

    def run(self) -> None:
        """Until the victim is killed, at the latest by itself, and the others notice that it has exited."""
        self.operate()
        if self.world.rank == self.plan["victim"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.meet()

    def meet(self) -> None:
        """Every rank is here."""
        self.world.all_gather_object("the ranks of a round meet", lambda: b"")

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
        self.meet()
        if self.first:
            with self.logged("save", name=name, kind="full", step=step, parent=None):
                tierbed("snapshot", "save", self.store_path, "--", name)
        self.meet()

    def close(self) -> None:
        if self.going is not None and self.going[0] is not None and self.going[0].done:
            self.settle()  # a step has committed it
        self.meet()
        with self.logged("close"):
            self.embedding.close()
            self.meet()
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
        if self.first:
            getattr(self, f"command_{what}")()
        self.meet()
        self.chance.setstate(before)
        self.saved = saved + 1  # rank 0 may have used a name
        self.open(self.draw())

    def any_kind(self, base: str | None) -> str:
        return self.chance.choice(["full"] + ["incremental"] * 2 * bool(base))


def train(place: str, plan: dict[str, Any], rank: int, port: int, events: Connection) -> None:
    """Work in `place` as one of the ranks until killed, or until another is."""
    signal.alarm(600)  # what hangs fails
    folder = Path(place)
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_DSYNC, 0o644)
    trace = os.open(folder / "trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT) if plan["power"] else -1
    ctypes.CDLL(None).watch_calls(os.fsencode(folder / "store"), os.fsencode(folder / "aside"), trace)
    try:
        history = RankHistory(plan["keys"], plan["life"], plan["types"], world_of(rank, plan["ranks"], port))
        RankTrainer(folder / "store", history, plan, [log, events.fileno()]).run()
    except GroupError:  # of a killed rank, or else the round reports the error
        (folder / f"ended-{rank}").write_text(traceback.format_exc())


def world_of(rank: int, ranks: int, port: int) -> World:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    return World.from_env(timeout=60)
