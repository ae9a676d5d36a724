"""A process that is killed while a snapshot takes the place of another leaves the old one or the new one, whole."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.power import Disk

from support.embeddings import contents, make, train
from support.killed import Warm
from support.records import last_snapshot
from support.stores import options
from support.warm import SHIMMED
from tierbed import MultiTableEmbedding
from tierbed.snapshots import Snapshot, list_snapshots

CALLS = ("rename", "sync", "unlink", "mkdir")
OLD, BASE, NEW = 2, 3, 4  # steps of the snapshot that is replaced, of the one saved last, and of the one that replaces
IDS = torch.arange(3)
GRAD = torch.ones(3, 1)  # rows follow from the number of steps


def open_embedding(path: Path, store: str) -> MultiTableEmbedding:
    return make(options(store, path), "adagrad", tables=1)


def rows_after(steps: int) -> bytes:
    with make(options("device"), "adagrad", tables=1) as embedding:
        for _ in range(steps):
            train(embedding, IDS, grad=GRAD)
        return contents(embedding).tobytes()


def overwrite(
    place: str, store: str, kind: str, call: str, number: int, when: int, background: bool, events: int
) -> None:
    """Replace the snapshot "final", and be killed at the `number`th `call`; writes to `events` where it returned."""
    signal.alarm(60)  # what hangs fails
    embedding = open_embedding(Path(place, "store"), store)
    for step in range(1, NEW + 1):
        train(embedding, IDS, grad=GRAD)
        if step in (OLD, BASE):
            embedding.save_snapshot("final" if step == OLD else "other")
    shim = ctypes.CDLL(None)
    trace = os.open(Path(place, "trace"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    shim.watch_calls(os.fsencode(Path(place, "store")), os.fsencode(Path(place, "aside")), trace)
    shim.die_at(call.encode(), ctypes.c_long(number), when)
    save = embedding.save_snapshot("final", kind, background, overwrite=True)
    if save is not None:
        save.wait()
    shim.die_at(b"", ctypes.c_long(0), 0)
    os.write(events, b"returned\n")
    os.kill(os.getpid(), signal.SIGKILL)


WARM = Warm(overwrite, SHIMMED)


@pytest.mark.parametrize(
    ("store", "kind", "background"),
    [
        ("device", "full", False),
        pytest.param("host", "full", True, marks=pytest.mark.slow),
        pytest.param("device", "incremental", False, marks=pytest.mark.slow),
        pytest.param("ssd", "checkpoint", False, marks=pytest.mark.slow),
    ],
)
def test_a_kill_or_a_loss_of_power_at_any_call_leaves_the_old_snapshot_or_the_new_one_and_its_base(
    tmp_path: Path, store: str, kind: str, background: bool
) -> None:
    expected = {steps: rows_after(steps) for steps in (OLD, BASE, NEW)}
    seen: dict[str, set[int]] = {"killed": set(), "without power": set()}
    for call in CALLS:
        number, returned = 1, False
        while not returned:
            place = tmp_path / f"{call}-{number}"
            (place / "store").mkdir(parents=True)
            (place / "aside").mkdir()
            plan: dict[str, Any] = {"place": str(place), "store": store, "kind": kind, "background": background}
            answer = WARM.order(plan | {"call": call, "number": number, "when": number % 2})
            assert answer["signal"] == signal.SIGKILL
            returned = "returned" in answer["events"]
            shutil.copytree(place / "store", place / "killed", symlinks=True, ignore=shutil.ignore_patterns("SOCKET"))
            Disk(place / "store", (place / "trace").read_text()).cut(random.Random(number))
            seen["killed"].add(check(place / "killed", store, expected, returned))
            seen["without power"].add(check(place / "store", store, expected, returned))
            number += 1
        assert number > 2, f"no {call} was reached"
    assert seen == {"killed": {OLD, NEW}, "without power": {OLD, NEW}}


def check(path: Path, store: str, expected: dict[int, bytes], returned: bool) -> int:
    """What is left is right. Returns the step of the snapshot under the name."""
    snapshots = path / "rows" / "snapshots"
    listing = list_snapshots(snapshots)
    assert not listing.damaged
    assert {snapshot.name for snapshot in listing.snapshots} == {"final", "other"}
    for snapshot in listing.snapshots:
        assert b"".join(rows.tobytes() for _, rows in snapshot.chunks()) == expected[snapshot.description["step"]]
    final = int(Snapshot.open(snapshots / "final").description["step"])
    assert final == NEW if returned else final in (OLD, NEW)
    base = last_snapshot(path / "rows")
    assert base == "final" if returned else base in ("other", "final" if final == NEW else "other")
    with open_embedding(path, store) as embedding:
        assert contents(embedding).tobytes() == expected[NEW if base == "final" else BASE]
        train(embedding, IDS, grad=GRAD)
        embedding.save_snapshot(
            "after" if base == "final" else "final", overwrite=final == OLD
        )  # else it does not count
        assert not [place.name for place in snapshots.iterdir() if place.name.startswith(".")]
    return final
