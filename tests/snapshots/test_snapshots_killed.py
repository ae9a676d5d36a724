"""A process that is killed in a save or a load leaves snapshots that are whole, and rows of before or after it."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
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

OLD, BASE, NEW = 2, 3, 4  # steps of the snapshot that is replaced, of the one saved last, and of the one that replaces
IDS = torch.arange(3)
GRAD = torch.ones(3, 1)  # rows follow from the number of steps


def open_embedding(path: Path, store: str, dtype: torch.dtype = torch.float32, **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), "adagrad", tables=1, dtype=dtype)


def killed_at(place: str, call: str, number: int, when: int, events: int, act: Callable[[], None]) -> None:
    """`act`, in which the process is killed at the `number`th `call`, or after it."""
    signal.alarm(60)  # what hangs fails
    shim = ctypes.CDLL(None)
    trace = os.open(Path(place, "trace"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    shim.watch_calls(os.fsencode(Path(place, "store")), os.fsencode(Path(place, "aside")), trace)
    shim.die_at(call.encode(), ctypes.c_long(number), when)
    act()
    shim.die_at(b"", ctypes.c_long(0), 0)
    os.write(events, b"returned\n")
    os.kill(os.getpid(), signal.SIGKILL)


def kills(warm: Warm, path: Path, call: str, stride: int, begun: Path | None = None, **plan: Any) -> Iterator[Any]:
    """The folder of a kill at the first `call` and at each `stride`th behind it, its number, and whether none came."""
    number, returned = 1, False
    while not returned:
        place = path / f"{call}-{number}"
        (place / "aside").mkdir(parents=True)
        shutil.copytree(begun, place / "store", symlinks=True) if begun else (place / "store").mkdir()
        answer = warm.order(plan | {"place": str(place), "call": call, "number": number, "when": number % 2})
        assert answer["signal"] == signal.SIGKILL
        returned = "returned" in answer["events"]
        yield place, number, returned
        number += stride
    assert number > 1 + stride, f"no {call} was reached"


def convert(place: str, store: str, call: str, number: int, when: int, events: int) -> None:
    """Load the float32 rows into a bfloat16 table and train on."""
    embedding = open_embedding(Path(place, "store"), store, torch.bfloat16)
    embedding.size()

    def act() -> None:
        embedding.load_snapshot("wide", convert=True)
        train(embedding, range(9))

    killed_at(place, call, number, when, events, act)


@pytest.mark.parametrize(
    "store", ["ssd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("host", "ssd_host"))]
)
def test_a_kill_amid_a_conversion_leaves_rows_of_one_dtype_and_every_snapshot(tmp_path: Path, store: str) -> None:
    begun, narrow_type = tmp_path / "begun", torch.bfloat16
    with open_embedding(begun, store) as embedding:
        train(embedding, range(12))
        embedding.save_snapshot("wide")
    with open_embedding(begun, store, narrow_type, open="fresh") as embedding:
        train(embedding, range(6, 15))
        embedding.save_snapshot("narrow")
        narrow = contents(embedding).tobytes()
    snapshots = Path("rows") / "snapshots"
    with open_embedding(tmp_path / "alone", "device", narrow_type, open="fresh") as embedding:
        shutil.copytree(begun / snapshots / "wide", tmp_path / "alone" / snapshots / "wide")
        embedding.load_snapshot("wide", convert=True)
        converted = contents(embedding).tobytes()
    warm = Warm(convert, SHIMMED)
    for call, stride in {"rename": 3, "sync": 4, "write": 13}.items():
        for place, _, returned in kills(warm, tmp_path, call, stride, begun, store=store):
            listing = list_snapshots(place / "store" / snapshots)
            assert not listing.damaged
            assert [snapshot.name for snapshot in listing.snapshots] == ["wide", "narrow"]
            with open_embedding(place / "store", store, narrow_type) as embedding:
                assert contents(embedding).tobytes() in ([narrow] if returned else [narrow, converted])
                embedding.load_snapshot("wide", convert=True)
                assert contents(embedding).tobytes() == converted


def rows_after(steps: int) -> bytes:
    with make(options("device"), "adagrad", tables=1) as embedding:
        for _ in range(steps):
            train(embedding, IDS, grad=GRAD)
        return contents(embedding).tobytes()


def overwrite(
    place: str, store: str, kind: str, call: str, number: int, when: int, background: bool, events: int
) -> None:
    """Replace the snapshot "final"."""
    embedding = open_embedding(Path(place, "store"), store)
    for step in range(1, NEW + 1):
        train(embedding, IDS, grad=GRAD)
        if step in (OLD, BASE):
            embedding.save_snapshot("final" if step == OLD else "other")

    def act() -> None:
        save = embedding.save_snapshot("final", kind, background, overwrite=True)
        if save is not None:
            save.wait()

    killed_at(place, call, number, when, events, act)


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
    warm, plan = Warm(overwrite, SHIMMED), {"store": store, "kind": kind, "background": background}
    for call in ("rename", "sync", "unlink", "mkdir"):
        for place, number, returned in kills(warm, tmp_path, call, 1, **plan):
            shutil.copytree(place / "store", place / "killed", symlinks=True, ignore=shutil.ignore_patterns("SOCKET"))
            Disk(place / "store", (place / "trace").read_text()).cut(random.Random(number))
            seen["killed"].add(check(place / "killed", store, expected, returned))
            seen["without power"].add(check(place / "store", store, expected, returned))
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
