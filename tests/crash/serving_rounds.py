"""Rounds of serving: a publisher is killed while a reader follows it, and what is left is compared with its log.

What a version must answer follows from its step and its encoding alone.
"""

from __future__ import annotations

import os
import random
import signal
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.forked import with_pipe
from tierbed.serving import ServedVersion, ServingFolder, merging, open_served, publish
from tierbed.serving.folder import CURRENT, LOCK, PENDING, MissingVersionError
from tierbed.serving.row_file import decode, encode
from tierbed.serving.version import ENCODINGS
from tierbed.snapshots import Snapshot, list_snapshots

from .history import BEGIN, DIM, History
from .plan import SERVING_WEIGHTS
from .rounds import Result, Rounds
from .trainer import Trainer, begun

OPERATIONS = ("publish", "rollback", "release", "prune")
Made = tuple[int, str, bool]  # of a version: its step, its encoding, and whether it has dense weights


def dense_weights(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((40,), float(step)), "b": torch.full((), step)}


class ServingTrainer(Trainer):
    """Trains, and changes a serving folder. Its own store is elsewhere, where no power is cut."""

    weights = SERVING_WEIGHTS

    def __init__(self, place: Path, history: History, plan: dict[str, Any], files: list[int]) -> None:
        self.served = ServingFolder(place / "store")
        super().__init__(place / "trained", history, plan, files)

    def publish(self) -> None:
        name = self.embedding.last_snapshot
        if name is None or self.chance.random() < 0.9:  # else another version of the same rows
            self.steps()
            self.save()
            name = self.embedding.last_snapshot
        snapshot = Snapshot.open(self.store_path / "snapshots" / str(name))
        with self.logged("publish", **(drawn := draw_publish(self.chance, snapshot))) as found:
            found["version"] = publish_drawn(self.served, snapshot, drawn)

    def rollback(self) -> None:
        if versions := self.served.list_versions():
            version = self.chance.choice(versions)
            with self.logged("rollback", version=version):
                self.served.rollback(version)

    def release(self) -> None:
        if self.served.list_versions():
            with self.logged("release"):
                self.served.release()

    def prune(self) -> None:
        if self.served.list_versions():
            keep = self.chance.randint(1, 3)
            with self.logged("prune", keep=keep):
                self.served.prune(keep)

    def forget(self) -> None:
        """Merge the chain of increments, so that the next publish may have to write bases."""
        self.embedding.prune_snapshots(keep_last=self.chance.randint(1, 3))


def draw_publish(chance: random.Random, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "step": snapshot.description["step"],
        "encoding": chance.choice(["float32", "float32", "float32", *ENCODINGS]),
        "dense": chance.random() < 0.8,
        "keep": chance.randint(1, 3),
        "rebase": chance.random() < 0.1,
    }


def publish_drawn(folder: ServingFolder, snapshot: Snapshot, drawn: dict[str, Any]) -> int:
    """Returns the version's number. A trainer that was killed goes back, maybe to fewer rows."""
    tensors = dense_weights(drawn["step"]) if drawn["dense"] else {}
    more = {"keep": drawn["keep"], "rebase": drawn["rebase"], "allow_older": True}
    return publish(folder.path, snapshot, drawn["encoding"], tensors, **more).version


def run(place: str, plan: dict[str, Any], script: str, events: int) -> None:
    """Run the script, then work in `place` until killed, at the latest by itself."""
    exec(script, {})
    if plan["seed"] % 2:  # rows go through temporary files
        merging.SORT_BYTES, merging.PIECE_ROWS = 300, 7
    log = begun(Path(place), plan["power"])
    history = History(plan["keys"], plan["life"], plan["types"])
    ServingTrainer(Path(place), history, plan, [log, events]).run()


class Answers:
    """Compares what versions answer with what they must answer."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._count = history.keys + 9  # ids of each table; some were never trained
        self._ids = torch.arange(self._count).repeat(2), torch.arange(2).repeat_interleave(self._count)
        self.rows = cache(self._rows)

    def _rows(self, step: int, encoding: str) -> bytes:
        rows, values = self._history.rows(step), self._history.values(step)
        found = np.repeat(np.array(BEGIN, np.float32), self._count)[:, None].repeat(DIM, 1)  # of unknown ids
        place = rows["table"].astype(np.int64) * self._count + rows["key"].astype(np.int64)
        found[place] = decode(encode(np.ascontiguousarray(values), encoding, 0, rows["key"]), encoding, DIM)
        return found.tobytes()

    def check(self, version: ServedVersion, made: Made | None = None) -> None:
        """made: what it must be, where that is known."""
        step, encodings = version.step, ENCODINGS if made is None else [made[1]]
        rows = version["rows"](*self._ids).numpy().tobytes()
        assert any(rows == self.rows(step, one) for one in encodings), f"version {version.version}: wrong rows"
        is_dense = version.tensors is not None
        assert made in (None, (step, encodings[0], is_dense)), f"version {version.version} is {step, is_dense}"
        if version.tensors is not None:
            dense = dense_weights(step)
            assert version.tensors.keys() == dense.keys()
            assert all(torch.equal(dense[name], tensor) for name, tensor in version.tensors.items())


def read(place: str, keys: int, life: str, types: Any, pipe: Connection) -> None:
    """Refresh and look up until told to stop, and once more. Sends the number of answers, or what went wrong."""
    signal.alarm(600)  # what hangs fails
    outcome: int | str = 0
    try:
        outcome = follow(Path(place, "store"), Answers(History(keys, life, types)), pipe)
    except Exception:
        outcome = traceback.format_exc()
    pipe.recv()
    pipe.send(outcome)


def follow(path: Path, answers: Answers, pipe: Connection) -> int:
    served, count = None, 0
    while True:
        is_last = pipe.poll()
        with suppress(MissingVersionError):  # before the first publish
            served = served or open_served(path)
        if served is not None:
            served.refresh()
            answers.check(served.current)
            count += 1
        if is_last:
            return count


@dataclass
class Published:
    """What a log allows a serving folder to have. `versions` by number, and the one that readers take."""

    versions: dict[int, Made] = field(default_factory=dict)
    current: int | None = None
    hold: bool = False
    inside: str = "between"  # the operation in flight
    _running: dict[str, Any] | None = None
    _doubt: list[Published] = field(default_factory=list)  # to which of these a power cut may lead back

    def follow(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take further lines of the log. A kill comes after them."""
        self.inside = "between"
        for line in lines:
            is_end = line["at"] == "end"
            self.inside = "between" if is_end else line["op"]
            if line["op"] in OPERATIONS:
                self._running = None if is_end else line
                if is_end:
                    self._doubt = []
                    assert line.get("version") in (None, self._next) or line["op"] == "rollback"
                    self._go(line)

    @property
    def _next(self) -> int:
        return 1 + max([*self.versions, self.current or 0])

    def _go(self, line: dict[str, Any]) -> None:
        if line["op"] == "publish":
            number = self._next
            self.versions[number] = line["step"], line["encoding"], line["dense"]
            self.current = self.current if self.hold else number
        elif line["op"] == "rollback":
            self.current, self.hold = line["version"], True
        elif line["op"] == "release":
            self.current, self.hold = max(self.versions), False
        if "keep" in line:
            kept = {*sorted(self.versions)[-line["keep"] :], self.current}
            self.versions = {number: made for number, made in self.versions.items() if number in kept}

    def found(self, folder: ServingFolder, is_durable: bool = True) -> None:
        """From now on, the folder is as found. Raises AssertionError if the log does not allow that."""
        records = {number: folder.read_version(number) for number in folder.list_versions()}
        there = {number: (one.step, one.encoding, one.tensors is not None) for number, one in records.items()}
        current, hold = None, False
        with suppress(MissingVersionError):
            current, hold = (taken := folder.read_current()).version, taken.hold
        options = [*self._doubt, Published(dict(self.versions), self.current, self.hold)]
        if self._running is not None:
            self._go(self._running)
            options.append(Published(dict(self.versions), self.current, self.hold))
        assert (current, hold) in [(one.current, one.hold) for one in options], f"{current, hold} is not of {options}"
        assert set.intersection(*({*one.versions} for one in options)) <= there.keys(), (
            f"{there} lacks some of {options}"
        )
        assert there.items() <= set().union(*(one.versions.items() for one in options)), f"{there} is not of {options}"
        if not self.versions.keys() <= there.keys():  # the last operation was not durable, and so removed nothing
            assert any(one.versions.keys() <= there.keys() for one in options[:-1]), f"{there} lacks some of {options}"
        self.versions, self.current, self.hold, self._running = there, current, hold, None
        self._doubt = [] if is_durable else options


class ServingRounds(Rounds):
    """Rounds of a publisher and a reader."""

    runs = staticmethod(run)
    counted = OPERATIONS
    _num_answers = 0

    def expected(self, plan: Any) -> Published:
        self._answers = Answers(History(plan.keys, plan.life, plan.types))
        return Published()

    def train(self, place: Path, session: Any, orders: dict[str, Any]) -> None:
        reader, pipe = with_pipe(read, str(place), orders["keys"], orders["life"], orders["types"])
        with reader, pipe:
            super().train(place, session, orders)
            pipe.send("stop")
            outcome = pipe.recv()
            reader.wait()
        assert isinstance(outcome, int), f"the reader failed: {outcome}"
        self._num_answers = outcome

    def cuts_power(self, plan: Any, number: int) -> bool:
        return plan.power and bool(plan.checks[number])

    def check(self, path: Path, plan: Any, number: int, published: Published, result: Result) -> None:
        """Of the folder that a session left, and after one more publish there."""
        result.answers += self._num_answers
        published.found(ServingFolder(path), is_durable=self.cuts_power(plan, number) or not plan.power)
        result.snapshots_checked += self._check_versions(path, published)
        snapshots = list_snapshots(path.with_name("trained") / "rows" / "snapshots").snapshots
        if not plan.checks[number] or not snapshots:
            return
        chance = random.Random(plan.sessions[number].seed)
        snapshot = chance.choice(snapshots)
        drawn = draw_publish(chance, snapshot)
        version = publish_drawn(ServingFolder(path), snapshot, drawn)
        published.follow([{"at": "end", "op": "publish", "version": version, **drawn}])
        folder = ServingFolder(path)
        published.found(folder)
        result.snapshots_checked += self._check_versions(path, published)
        records = [folder.read_pending(), *map(folder.read_version, folder.list_versions())]
        assert {*os.listdir(folder.files)} == {file.name for record in records for file in record.files}, "leftovers"
        assert {*os.listdir(path)} == {CURRENT, LOCK, PENDING, "versions", "files"}
        assert all(name[0] != "." for name in os.listdir(path / "versions"))

    def _check_versions(self, path: Path, published: Published) -> int:
        """All versions are whole, and answer as they must. Returns how many."""
        folder = ServingFolder(path)
        for number, made in published.versions.items():
            assert not (damaged := folder.verify(number)), damaged
            record = folder.read_version(number)
            self._answers.check(ServedVersion(folder, record, "initial", torch.float32, None), made)
        if published.current is not None:
            with open_served(path) as served:
                assert served.version == published.current
                self._answers.check(served.current, published.versions[published.current])
        return len(published.versions)
