"""The process that is killed. It writes down what it is about to do, does it, and writes down that it is done."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import shim
from support.embeddings import contents
from support.limits import descriptors
from tierbed import StoreError, TierbedError, cli
from tierbed.distributed import World
from tierbed.engine.table.background_save import SaveHandle
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.files.reader import find_snapshot_name
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GroupFile
from tierbed.snapshots.store.recovery_rule import EMPTY_ID
from tierbed.snapshots.store.retention import is_backup

from .history import History, in_order
from .plan import CHAINS, RANK_WEIGHTS, WEIGHTS, draw_store, draw_stores

HOW_TO_COME = {"step": "steps", "open": "reopen", "close": "reopen", "merge": "command"}  # to be inside of an operation
UNSAVED = re.compile(r"has live rows from step (\d+), and no snapshot of these rows")
NAMES = ["s{}", "{} of today", "schn\u00e4ppchen-{}", "-{}", "{}" + 150 * "x"]


class Recovered(logging.Handler):
    """Whether an embedding that was opened in the block, or since, found a folder without a clean marker."""

    seen = False

    def __enter__(self) -> Recovered:
        logging.getLogger("tierbed").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("tierbed").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        self.seen |= "was not closed by" in said or "was closed by its ranks at different steps" in said


class Writer:
    """Writes down what a process is about to do, and kills it in the operation that the plan says."""

    is_victim = True

    def __init__(self, plan: dict[str, Any], files: list[int]) -> None:
        self.plan, self._files = plan, files
        self.chance = random.Random(plan["seed"])
        self.saved = 0

    def arm(self, operation: str) -> None:
        kill = self.plan["kill"]
        if self.is_victim and kill["inside"] == operation:
            shim.die_at(kill["call"], kill["number"], kill["when"])

    def say(self, at: str, operation: str, **more: Any) -> None:
        """A line of the log, durable when this returns."""
        line = json.dumps({"at": at, "op": operation, **more}).encode() + b"\n"
        for file in self._files:
            os.write(file, line)


def begun(folder: Path, power: bool) -> int:
    """The file of the log of a process whose calls count, and are traced where the power may be cut, from here on."""
    signal.alarm(600)  # what hangs fails
    trace = os.open(folder / "trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT) if power else -1
    shim.watch(folder / "store", trace)
    return os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_DSYNC, 0o644)


class Trainer(Writer):
    """Random operations in a store folder, each written ahead into the log.

    Whatever it chooses depends on its seed and on what is in the folder alone.
    """

    weights = WEIGHTS

    def __init__(self, path: Path, history: History, plan: dict[str, Any], files: list[int]) -> None:
        super().__init__(plan, files)
        self.weights = {**self.weights, **(CHAINS if plan["has_chains"] else {})}
        self.path, self.history, self.store_path = path, history, path / "rows"
        self.going: tuple[SaveHandle | None, contextlib.AbstractContextManager[Any], str] | None = None
        self._recovered = Recovered()
        logging.getLogger("tierbed").handlers[:] = [self._recovered]
        self.open(plan["store"])

    def run(self) -> None:
        """Until killed, at the latest by itself: so an embedding is open, which would be closed at a common end."""
        self.operate()
        os.kill(os.getpid(), signal.SIGKILL)

    def operate(self) -> None:
        """All operations, until the one in which the plan has the kill."""
        for _ in range(self.plan["operations"]):
            getattr(self, self.chance.choices(list(self.weights), list(self.weights.values()))[0])()
        kill = self.plan["kill"]
        while kill["inside"] and kill["number"] > 1:  # it came to fewer such calls than that
            kill["number"] //= 2
            self.steps()
            self.save()
            getattr(self, HOW_TO_COME.get(kill["inside"], kill["inside"]))()

    def draw(self) -> Any:
        """A store to open, as `open` takes it."""
        return draw_store(self.chance)

    def steps(self) -> None:
        for _ in range(self.chance.randint(1, 5)):
            with self.logged("step", step=self.step + 1):
                self.step += 1
                self.history.take(self.embedding, self.step)
            if self.plan["ahead"]:
                self.history.announce(self.embedding, self.step + self.plan["ahead"])

    def save(self) -> None:
        self.settle()
        kind = self.any_kind(self.embedding.last_snapshot)
        parent = self.embedding.last_snapshot if kind == "incremental" else None
        name = self.any_name(parent)
        with self.logged("save", name=name, kind=kind, step=self.step, parent=parent):
            self.embedding.save_snapshot(name, kind, overwrite=True)

    def background(self) -> None:
        """A save that goes on until `settle`."""
        self.settle()
        name = self.any_name(None)
        logged = self.logged("background", name=name, step=self.step)
        logged.__enter__()
        self.going = self.embedding.save_snapshot(name, background=True, overwrite=True), logged, name

    def settle(self) -> None:
        if self.going is not None:
            saving, logged, _ = self.going
            assert saving is not None
            saving.wait()
            logged.__exit__(None, None, None)
        self.going = None

    def load(self) -> None:
        self.settle()  # which rows a name has is not known before
        if snapshot := self.any_snapshot():
            with self.logged("load", name=snapshot.name):
                self.embedding.load_snapshot(snapshot.name)
            self.step = snapshot.description["step"]

    def prune(self) -> None:
        rule = self.any_rule()
        with self.logged("prune", **rule) as found:
            self.embedding.prune_snapshots(**rule)
            found["left"] = self.left()

    def compact(self) -> None:
        if self.embedding.store_options.store == "cached_ssd":
            with self.logged("compact"):
                self.embedding.compact()

    def reopen(self) -> None:
        self.close()
        self.open(self.draw())

    def fresh(self) -> None:
        self.close()
        self.open(self.draw(), open="fresh")

    def short(self) -> None:
        """A run between two others that finds no room, or few descriptors: it reads all rows, or says what it lacks."""
        self.close()
        store, lack = draw_store(self.chance), self.chance.choice(["No space left", "Too many open files"])
        with self.logged("short", lack=lack):
            embedding = self.history.embedding(self.path, **store)
            try:
                with self.lacking(lack):
                    step = int(embedding.metrics()["table"]["step"])
                    rows = in_order(contents(embedding))
                assert step == self.step
                assert rows.tobytes() == self.history.rows(step).tobytes()
            except TierbedError as error:
                if lack not in str(error):
                    raise
            embedding.close()
        self.open(self.draw())

    def lacking(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _full_disk() if what == "No space left" else descriptors(self.chance.randrange(30))

    def command(self) -> None:
        """The command line between two runs."""
        self.close()
        getattr(self, f"command_{self.chance.choice(['save', 'load', 'prune', 'merge', 'compact'])}")()
        self.open(self.draw())

    def command_save(self) -> None:
        file = GroupFile(FolderState(self.store_path))
        parent = find_snapshot_name(file.folder.snapshots_path, file.record.parents.get(file.store_id, EMPTY_ID))
        kind = self.any_kind(parent)
        parent = parent if kind == "incremental" else None
        name = self.any_name(parent)
        with self.logged("save", name=name, kind=kind, step=self.step, parent=parent):
            tierbed("snapshot", "save", "--overwrite", "--kind", kind, self.store_path, "--", name)

    def command_load(self) -> None:
        if snapshot := self.any_snapshot():
            with self.logged("load", name=snapshot.name):
                tierbed("snapshot", "load", self.store_path, "--", snapshot.name)

    def command_prune(self) -> None:
        rule = self.any_rule()
        every = ["--keep-every", rule["keep_every"]] if rule["keep_every"] else []
        with self.logged("prune", **rule) as found:
            tierbed("snapshot", "prune", "--keep-last", rule["keep_last"], *every, self.store_path)
            found["left"] = self.left()

    def command_merge(self) -> None:
        if snapshot := self.any_snapshot():
            new = self.new_name()
            with self.logged("merge", name=snapshot.name, new=new):
                tierbed("snapshot", "merge", self.store_path, "--", snapshot.name, new)

    def command_compact(self) -> None:
        if self.embedding.store_options.store == "cached_ssd":
            with self.logged("compact"):
                tierbed("store", "compact", self.store_path)

    def open(self, store: dict[str, Any], **more: Any) -> None:
        self._recovered.seen = False
        with self.logged("open", store=store["store"], fresh=more.get("open") == "fresh") as found:
            self.embedding = self.history.embedding(self.path, **store, **more)
            self.step = int(self.embedding.metrics()["table"]["step"])
            found |= {"step": self.step, "recovered": self._recovered.seen}

    def close(self) -> None:
        with self.logged("close"):
            self.embedding.close()
        self.settle()

    def new_name(self) -> str:
        self.saved += 1
        return self.chance.choice(NAMES).format(f"{self.plan['number']}-{self.saved}")

    def any_name(self, parent: str | None) -> str:
        """A new one, or that of a snapshot which one over `parent` may replace."""
        snapshots = self.snapshots()
        over = {parent, *(s.manifest.parent.name for s in snapshots if s.manifest.parent)}
        free = [snapshot.name for snapshot in snapshots if snapshot.name not in over]
        return self.chance.choice(free) if free and self.chance.random() < 0.3 else self.new_name()

    def any_kind(self, base: str | None) -> str:
        """One that there can be now."""
        if base and self.plan["has_chains"] and self.chance.random() < 0.9:
            return "incremental"
        on_disk = self.history.world is None and self.embedding.store_options.store == "cached_ssd"
        return self.chance.choice(["full"] + ["incremental"] * 2 * bool(base) + ["checkpoint"] * on_disk)

    def any_rule(self) -> dict[str, Any]:
        return {"keep_last": self.chance.randint(1, 3), "keep_every": self.chance.choice([None, 3, 10])}

    def snapshots(self) -> list[Snapshot]:
        """Those with a name of the user's. Others come and go with the save of rank 0."""
        found = list_snapshots(self.store_path / "snapshots").snapshots
        return [snapshot for snapshot in found if not is_backup(snapshot.folder)]

    def left(self) -> dict[str, tuple[int, str, str | None]]:
        """What there is after a prune."""
        links = {snapshot: snapshot.manifest.parent for snapshot in self.snapshots()}
        return {s.name: (s.description["step"], s.kind, link and link.name) for s, link in links.items()}

    def any_snapshot(self) -> Snapshot | None:
        snapshots = self.snapshots()
        return self.chance.choice(snapshots) if snapshots else None

    @contextlib.contextmanager
    def logged(self, operation: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Written down before and after, and killed in between where the plan has that."""
        self.say("begin", operation, **more)
        self.arm(operation)
        found: dict[str, Any] = {}
        yield found
        if self.plan["kill"]["inside"] == operation:
            shim.live_on()
        self.say("end", operation, **more | found)


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    shim.fill_disk(True)
    try:
        yield
    finally:
        shim.fill_disk(False)


def tierbed(*words: Any) -> None:
    """The command line tool."""
    try:
        cli.main([str(word) for word in words])
    except SystemExit as end:
        if end.code:
            raise


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


def run(place: str, plan: dict[str, Any], script: str, events: int) -> None:
    """Run the script, then work in `place` until killed, at the latest by itself."""
    exec(script, {})
    log = begun(Path(place), plan["power"])
    history = History(plan["keys"], plan["life"], plan["types"])
    Trainer(Path(place, "store"), history, plan, [log, events]).run()
