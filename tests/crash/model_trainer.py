"""The process that is killed while it trains embeddings together, and what their rows are after any steps.

Each step of a member has a number of its own, drawn once: the sums of these numbers in its rows show which steps it has
taken, whatever was lost, loaded and trained again in between.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from support import shim
from support.stores import ONE_SET_MB, options
from tierbed import GroupError, MultiTableEmbedding, load_checkpoint, make_constant_initializer, save_checkpoint
from tierbed.distributed import World
from tierbed.embedding.state_dict.model_snapshots import ModelSnapshots
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.durable import fsync_dir, fsync_file
from tierbed.engine.errors import StoreError
from tierbed.engine.options.lookup import Lookup
from tierbed.snapshots import Snapshot, list_snapshots

from .history import History
from .plan import KINDS, MODEL_WEIGHTS, NAMES
from .record_processes import Rows
from .trainer import RankTrainer, Writer, begun, meet, tierbed

KEYS = 40
NO_STEP = "they have no saved step in common"


def keys_of(number: int) -> NDArray[np.int64]:
    """The keys that a step trains, each once; key 0 is in all of them."""
    return np.unique(np.append((np.arange(9) * 7 + number * 5) % KEYS, 0))


def rows_after(steps: Rows, dim: int) -> dict[int, float]:
    """The value of each written row, all its columns alike."""
    rows: dict[int, float] = {}
    for number in steps:
        for key in keys_of(number):
            rows[int(key)] = rows.get(int(key), 0.0) - number
    return rows


class Members(ModelSnapshots, nn.Module):
    """Embeddings of a plan, trained together by SGD. world: the ranks that share their rows."""

    def __init__(
        self,
        path: Path,
        plan: Mapping[str, Any],
        mode: str,
        stores: Sequence[str],
        budgets: Sequence[float] = 3 * (ONE_SET_MB,),
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.all: list[MultiTableEmbedding] = []
        self.world = world
        self.register_buffer("dense", torch.zeros((), dtype=torch.float64))  # moves by each step of this process
        more = {"capacity": 64 if plan["capacity"] else None, "state_dict_snapshots": plan["states"], "open": mode}
        if plan["apart"]:
            more["snapshot_path"] = path.with_name("apart")
        for name, store, dim, budget in zip(NAMES, stores, plan["dims"], budgets, strict=False):
            start, made = [make_constant_initializer(0.0)], options(store, path, budget, **more)
            one = MultiTableEmbedding(name, dim, torch.float32, torch.int64, start, made, world=world)
            optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
            one.attach(optimizer, optimizer.param_groups[0])
            self.all.append(one)
            self.add_module(name, one)
        train_together(self.all)

    def step(self, names: str, numbers: list[int]) -> None:
        """One step of the members of these names: all rows are pinned before one is updated."""
        pinned = []
        for one in self.all:
            if one.name in names:
                number = numbers[NAMES.index(one.name)]
                ids = torch.from_numpy(keys_of(number))
                if self.world is not None:
                    ids = ids[self.world.rank :: self.world.size]
                batch = one.pin([Lookup(ids, torch.zeros_like(ids))])
                batch.gather(0)
                pinned.append((batch, torch.full((len(ids), one.dim), float(number))))
                self.dense += number
        for batch, gradient in pinned:
            batch.update([gradient], scale=1.0)

    def firsts(self) -> list[tuple[int, float]]:
        """The step and the value of key 0 of each member."""
        return [(int(one.metrics()["table"]["step"]), float(one.get([0])[0, 0])) for one in self.all]

    def rows(self) -> list[dict[int, float]]:
        """The rows of each member that this process has, all columns of one alike."""
        found = []
        for one in self.all:
            rows = {key: row for _, key, row in one}
            assert all(bool((row == row[0]).all()) for row in rows.values())
            found.append({key: float(row[0]) for key, row in rows.items()})
        return found

    def close(self) -> None:
        for one in self.all:
            one.close()


def opened(
    make: Callable[[str], Members], order: Sequence[int], mixes: Callable[[], object] | None
) -> tuple[str, Members]:
    """Members of a mode, opened in that order. Where they have no step in common, `mixes`, and each opens its own."""
    for mode in ("resume", "mixed"):
        made = make(mode)
        try:
            for number in order:
                made.all[number].size()
            break
        except StoreError as error:
            if mode == "mixed" or mixes is None or NO_STEP not in str(error):
                raise
        made.close()
        mixes()
    return mode, made


def names_in(path: Path, members: int) -> list[dict[str, int]]:
    """The snapshots in the folder of each member, and their steps."""
    listings = [list_snapshots(path / name / "snapshots").snapshots for name in NAMES[:members]]
    return [{one.name: int(one.description["step"]) for one in listing} for listing in listings]


class ModelTrainer(Writer):
    """Random operations on embeddings that are trained together, each written ahead into the log."""

    world: World | None = None

    def __init__(self, path: Path, plan: dict[str, Any], files: list[int]) -> None:
        super().__init__(plan, files)
        self.path = path
        frozen = plan["frozen"] if plan["number"] >= plan["frozen_from"] else None
        self.trained = "".join(name for name in NAMES[: len(plan["dims"])] if name != frozen)
        self.open(plan["stores"], first=True)

    def run(self) -> None:
        self.operate_all(MODEL_WEIGHTS)
        kill = self.plan["kill"]
        for _ in range(3 if kill["inside"] else 0):  # it came to fewer calls than the kill has
            kill["number"] = max(kill["number"] // 3, 1)
            self.step()
            self.save_all()
            getattr(self, "reopen" if kill["inside"] == "open" else kill["inside"])()
        os.kill(os.getpid(), signal.SIGKILL)

    def operate_all(self, weights: Mapping[str, float]) -> None:
        weights = {**weights, **{name: one for name, one in KINDS[self.plan["kind"]].items() if name in weights}}
        for _ in range(self.plan["operations"]):
            self.operate(self.chance.choices(list(weights), list(weights.values()))[0])

    def operate(self, operation: str) -> None:
        getattr(self, operation)()

    def open(self, stores: list[str], first: bool = False) -> None:
        """All members, in a drawn order. first: in this process, so that recovery may have no step in common."""
        order = self.chance.sample(range(len(stores)), len(stores))
        self.say("begin", "open", first=first)
        self.arm("open")
        if not first:
            self.members.close()
        mode, self.members = opened(
            lambda mode: Members(self.path, self.plan, mode, stores, self.plan["budgets"], self.world),
            order,
            (lambda: self.say("begin", "mixed")) if first else None,
        )
        shim.live_on()
        self.say("end", "open", first=first, mode=mode, rows=self.members.firsts(), names=self.names())

    def names(self) -> list[dict[str, int]]:
        return names_in(self.path, len(self.plan["dims"]))

    def step(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            names, numbers = self.drawn_step()
            self.logged("step", partial(self.members.step, names, numbers), names, numbers)

    def part(self) -> None:
        """Some are closed, others go on, and all are opened again."""
        closed = self.chance.sample(self.members.all, self.chance.randint(1, len(self.members.all) - 1))
        for one in closed:
            self.close(one)
        there = "".join(name for name in self.trained if name not in [one.name for one in closed])
        if there:
            names, numbers = self.drawn_step(there)
            self.logged("step", lambda: self.members.step(names, numbers), names, numbers)
        self.open(self.plan["stores"])

    def drawn_step(self, trained: str = "") -> tuple[str, list[int]]:
        trained = trained or self.trained
        names = "".join(name for name in trained if self.chance.random() < 0.7) or trained[0]
        return names, [self.chance.randrange(1, 2000) for _ in NAMES]

    def save(self) -> None:
        one = self.chance.choice(self.members.all)
        name, kind = self.new_name("s"), self.any_kind([one])
        self.logged("save", lambda: one.save_snapshot(name, kind), one.name, name, kind)

    def save_all(self) -> None:
        name, kind = self.new_name("all"), self.any_kind(self.members.all)
        self.logged("save_all", lambda: self.members.save_snapshot(name, kind), name, kind)

    def background(self) -> None:
        """Steps go on while it saves, a checkpoint or snapshots alone."""
        is_checkpoint = self.chance.random() < 0.5
        name = self.new_name("kept" if is_checkpoint else "all")
        steps = [self.drawn_step() for _ in range(self.chance.randint(0, 2))]

        def save() -> None:
            if is_checkpoint:
                saving = save_checkpoint(self.path.parent / "kept" / name, self.members, background=True)
            else:
                saving = self.members.save_snapshot(name, background=True)
            assert saving is not None
            for step in steps:
                self.say("begin", "step", more=step)
                self.members.step(*step)
                self.say("end", "step", more=step)
            saving.wait()

        self.logged("background", save, name, "background")

    def overwrite(self) -> None:
        for one in self.members.all:
            if self.is_no_parent("latest", [one]):
                save = partial(one.save_snapshot, "latest", overwrite=True)
                self.logged("overwrite", save, one.name, "latest")

    def over(self) -> None:
        if self.is_no_parent("all-over", self.members.all):
            self.logged("over", lambda: self.members.save_snapshot("all-over", overwrite=True), "all-over")

    def is_no_parent(self, name: str, members: list[MultiTableEmbedding]) -> bool:
        snapshots = [snapshot for one in members for snapshot in self.snapshots(one.name)]
        return not any(over.manifest.parent and over.manifest.parent.name == name for over in snapshots)

    def checkpoint(self) -> None:
        name = self.new_name("kept")
        self.logged("checkpoint", lambda: save_checkpoint(self.path.parent / "kept" / name, self.members), name)

    def restore(self) -> None:
        kept = sorted(place.parent for place in (self.path.parent / "kept").glob("kept-*/graph.msgpack"))
        if kept:
            place = self.chance.choice(kept)
            self.logged("restore", lambda: load_checkpoint(place, self.members), place.name)

    def state(self) -> None:
        """Keep a state_dict, which names a snapshot of each member whose rows were written."""
        name, kept = self.new_name("state"), self.path.parent / "kept"
        kept.mkdir(exist_ok=True)
        self.logged("state", lambda: self.keep(self.members.state_dict(), kept / f"{name}.pt"), name)

    def keep(self, state: Any, place: Path) -> None:
        torch.save(state, place.with_suffix(".tmp"))
        fsync_file(place.with_suffix(".tmp"))
        place.with_suffix(".tmp").rename(place)
        fsync_dir(place.parent)

    def load_state(self) -> None:
        kept = sorted((self.path.parent / "kept").glob("state-*.pt"))
        if kept:
            place = self.chance.choice(kept)
            state = torch.load(place, weights_only=True)
            said = [json.loads(bytes(state[f"{one.name}._extra_state"].tolist())) for one in self.members.all]
            names = [{snapshot.name for snapshot in self.snapshots(one.name)} for one in self.members.all]
            if all(of_member["snapshot"] in there for of_member, there in zip(said, names, strict=True)):
                self.logged("load_state", lambda: self.members.load_state_dict(state), place.stem)

    def load(self) -> None:
        one = self.chance.choice(self.members.all)
        names = [stored.name for stored in self.snapshots(one.name)]
        if names := [name for name in names if not name.startswith(("replaced-", "state_dict-", "kept-"))]:
            name = self.chance.choice(names)
            self.logged("load", lambda: one.load_snapshot(name), one.name, name)

    def load_all(self) -> None:
        if name := self.drawn_of_all():
            self.logged("load_all", lambda: self.members.load_snapshot(name), name)

    def drawn_of_all(self) -> str | None:
        """The name of a save of all that is in each folder."""
        names = set.intersection(*({s.name for s in self.snapshots(one.name)} for one in self.members.all))
        return self.chance.choice([*sorted(name for name in names if name.startswith("all")), None])

    def prune(self) -> None:
        one, keep = self.chance.choice(self.members.all), self.chance.randint(1, 2)
        self.logged("prune", lambda: one.prune_snapshots(keep), one.name)

    def prune_all(self) -> None:
        self.logged("prune_all", lambda: self.members.prune_snapshots(1))

    def reopen(self) -> None:
        order = self.chance.sample(self.members.all, len(self.members.all))
        for one in order if self.chance.random() < 0.7 else order[:1]:
            self.close(one)
        self.open([self.chance.choice(["device", "host", "ssd", "ssd_host"]) for _ in self.members.all])

    def close(self, one: MultiTableEmbedding) -> None:
        self.logged("reopen", one.close, one.name)

    def command(self) -> None:
        for one in self.members.all:
            self.close(one)
        self.shell("command", self.chance.choice(["save_all", "prune_all", "load_all"]))
        self.open(self.plan["stores"])

    def live(self) -> None:
        """The shell on stores that are open: this process serves it."""
        self.shell("live", self.chance.choice(["save_all", "prune_all"]))

    def shell(self, operation: str, what: str) -> None:
        if what == "save_all":
            name = self.new_name("all")
            self.logged(operation, lambda: tierbed("snapshot", "save", self.path, name), what, name)
        elif what == "prune_all":
            self.logged(operation, lambda: tierbed("snapshot", "prune", self.path, "--keep-last", 1), what, "")
        elif loaded := self.drawn_of_all():
            self.logged(operation, lambda: tierbed("snapshot", "load", self.path, loaded), what, loaded)

    def snapshots(self, member: str) -> list[Snapshot]:
        return list_snapshots(self.path / member / "snapshots").snapshots

    def new_name(self, begin: str) -> str:
        self.saved += 1
        return f"{begin}-{self.plan['number']}-{self.saved}"

    def any_kind(self, members: list[MultiTableEmbedding]) -> str:
        on_disk = self.world is None and all(one.store_options.store == "cached_ssd" for one in members)
        based = all(one.last_snapshot for one in members)
        return self.chance.choice(["full"] + ["incremental"] * based + ["checkpoint"] * on_disk)

    def logged(self, operation: str, call: Any, *more: Any) -> None:
        self.say("begin", operation, more=more, dense=float(self.members.dense))
        self.arm(operation)
        call()
        shim.live_on()
        names = None if operation == "step" else self.names()
        self.say("end", operation, more=more, dense=float(self.members.dense), names=names)


class RankModelTrainer(ModelTrainer):
    """Operations of all ranks."""

    world: World

    def __init__(self, world: World, path: Path, plan: dict[str, Any], files: list[int]) -> None:
        self.world, self.is_victim = world, world.rank == plan["victim"]
        super().__init__(path, plan, files if world.rank == 0 else [])

    def run(self) -> None:
        not_over_ranks = ("background", "command", "live")
        self.operate_all({name: weight for name, weight in MODEL_WEIGHTS.items() if name not in not_over_ranks})
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


def run(place: str, plan: dict[str, Any], script: str, events: int) -> None:
    """Run the script, then work in `place` until killed, at the latest by itself."""
    exec(script, {})
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    log = begun(Path(place), plan["power"])
    ModelTrainer(Path(place, "store", "model"), plan, [log, events]).run()


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
