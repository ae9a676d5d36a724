"""Rounds of embeddings that are trained together by several ranks, which draw the same operations; rank 0 logs them."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from support.ranks import run_ranks
from tierbed import GroupError, MultiTableEmbedding
from tierbed.distributed import World
from tierbed.engine.errors import StoreError
from tierbed.engine.options.lookup import Lookup

from .model_plan import NAMES, ModelRound, ModelSession, as_orders, options_of
from .model_rounds import Allowed, ModelRounds
from .model_trainer import NO_STEP, Members, ModelTrainer, keys_of, names_in, rows_after
from .rank_plan import RankSession
from .rank_rounds import run_until_killed
from .rank_trainer import world_of
from .rounds import HUNG, KILLED

NOT_OVER_RANKS = ("background", "command", "live")


class RankMembers(Members):
    """Embeddings that ranks share."""

    def __init__(self, world: World, path: Path, stores: list[str], dims: list[int], **more: Any) -> None:
        super().__init__(path, stores, dims, world=world, **more)
        self.world = world

    def step(self, names: str, numbers: list[int]) -> None:
        pinned = []
        for one in self.all:
            if one.name in names:
                number = numbers[NAMES.index(one.name)]
                ids = torch.from_numpy(keys_of(number)[self.world.rank :: self.world.size])
                batch = one.pin([Lookup(ids, torch.zeros_like(ids))])
                batch.gather(0)
                pinned.append((batch, number, len(ids), one.dim))
        for batch, number, count, dim in pinned:
            batch.update([torch.full((count, dim), float(number))], scale=1.0)
            self.dense += number

    def firsts(self) -> list[tuple[int, float]]:
        """The step and the value of key 0 of each member."""
        return [(int(one.metrics()["table"]["step"]), float(one.get([0])[0, 0])) for one in self.all]


class RankModelTrainer(ModelTrainer):
    """Operations of all ranks."""

    def __init__(self, world: World, path: Path, orders: dict[str, Any], files: list[int]) -> None:
        self.world = world
        if world.rank != orders["victim"]:
            orders = {**orders, "kill": {**orders["kill"], "inside": "nowhere"}}
        super().__init__(path, orders, files if world.rank == 0 else [])

    def run(self) -> None:
        weights = {name: weight for name, weight in self.orders["weights"].items() if name not in NOT_OVER_RANKS}
        for _ in range(self.orders["operations"]):
            self.operate(self.chance.choices(list(weights), list(weights.values()))[0])
        if self.world.rank == self.orders["victim"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.meet()

    def meet(self) -> None:
        self.world.all_gather_object("the ranks of a round meet", lambda: b"")

    def operate(self, operation: str) -> None:
        self.meet()  # so that all see the same files
        super().operate(operation)

    def make(self, stores: list[str], mode: str) -> RankMembers:
        orders = self.orders
        more = options_of(self.path, **orders["options"])
        return RankMembers(self.world, self.path, stores, orders["dims"], budgets=orders["budgets"], open=mode, **more)

    def firsts(self, made: Members) -> list[tuple[int, float]]:
        assert isinstance(made, RankMembers)
        return made.firsts()

    def any_kind(self, members: Any) -> str:
        return self.chance.choice(["full"] + ["incremental"] * all(one.last_snapshot for one in members))

    def save_all(self) -> None:
        name, kind = self.new_name("all"), self.any_kind(self.members.all)
        self.logged("save_all", lambda: self.members.save_snapshot(name, kind), name, kind)

    def keep(self, state: Any, place: Path) -> None:
        if self.world.rank == 0:
            super().keep(state, place)

    def close(self, one: MultiTableEmbedding) -> None:
        """Closed by all ranks before the log says so."""

        def closed() -> None:
            one.close()
            self.meet()

        self.logged("reopen", closed, one.name)

    def reopen(self) -> None:
        for one in self.chance.sample(self.members.all, len(self.members.all)):
            self.close(one)
        self.open([self.chance.choice(["device", "host", "ssd", "ssd_host"]) for _ in self.members.all])


def train(place: str, orders: dict[str, Any], rank: int, port: int, events: Connection) -> None:
    """Work in `place` as one of the ranks until killed, or until another is."""
    signal.alarm(600)  # what hangs fails
    folder = Path(place)
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_DSYNC, 0o644)
    ctypes.CDLL(None).watch_calls(os.fsencode(folder / "store"), os.fsencode(folder / "aside"), -1)
    try:
        world = world_of(rank, orders["ranks"], port)
        RankModelTrainer(world, folder / "store" / "model", orders, [log, events.fileno()]).run()
    except GroupError:  # of a killed rank, or else the round reports the error
        (folder / f"ended-{rank}").write_text(traceback.format_exc())


class ModelRankRounds(ModelRounds):
    """Runs rounds of that many ranks, of which one is killed, and the others find out or are killed with it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder)
        self.ranks = ranks

    def _train(self, place: Path, plan: ModelRound, session: ModelSession, number: int) -> None:
        chance = random.Random(session.seed + 2)
        victim, all_die = chance.randrange(self.ranks), chance.random() < 0.5
        orders = {**as_orders(plan, session, number), "ranks": self.ranks, "victim": victim}
        killed = RankSession(session.seed, self.ranks, 0, [], 0, session.kill, victim, all_die)
        ends = run_until_killed(killed, place, orders, train)
        reports = "".join(file.read_text() for file in sorted(place.glob("ended-*")))
        assert HUNG not in ends, "a rank hung"
        assert ends[victim] == KILLED, f"the ranks ended with {ends}: {reports}"
        assert set(ends) <= {0, KILLED}, f"the ranks ended with {ends}: {reports}"

    def _check(self, path: Path, plan: ModelRound, session: ModelSession, allowed: Allowed) -> int:
        order = random.Random(session.seed + 1).sample(range(len(plan.dims)), len(plan.dims))
        found = run_ranks(self.ranks, checked, path, session.stores, plan.dims, order, plan.options(path))
        mode, firsts, _ = found[0]
        vector = allowed.found(firsts, mode, names_in(path, len(plan.dims)))
        for at, (steps, dim) in enumerate(zip(vector, plan.dims, strict=True)):
            assert {key: value for one in found for key, value in one[2][at].items()} == rows_after(steps, dim)
        allowed.closed()
        return int(mode == "resume")


def checked(
    world: World, path: Path, stores: list[str], dims: list[int], order: list[int], more: dict[str, Any]
) -> tuple[str, Any, Any]:
    """How a rank could open the members, their first values, and the rows of each that it has."""
    for mode in ("resume", "mixed"):
        model = RankMembers(world, path, stores, dims, open=mode, **more)
        try:
            for number in order:
                model.all[number].size()
            break
        except StoreError as error:
            if mode == "mixed" or NO_STEP not in str(error):
                raise
            for one in model.all:
                one.close()
    firsts = model.firsts()
    rows = [found for _, found in model.read()]
    for one in model.all:
        one.close()
    return mode, firsts, rows
