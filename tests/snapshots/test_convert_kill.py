"""A process that is killed while it loads rows of another dtype leaves its own last snapshot, or the converted rows."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.killed import Warm
from support.stores import options
from support.warm import SHIMMED
from tierbed import MultiTableEmbedding
from tierbed.snapshots import list_snapshots

CALLS = {"rename": 3, "sync": 4, "write": 9}  # a kill at the first of these, and at each so-many-th behind it


def open_embedding(path: Path, store: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), "adagrad", tables=1, dtype=dtype)


def convert(place: str, store: str, call: str, number: int, events: int) -> None:
    """Load the float32 rows into a bfloat16 table and train on, killed before the `number`th `call`."""
    signal.alarm(60)  # what hangs fails
    embedding = open_embedding(Path(place, "store"), store)
    embedding.size()
    shim = ctypes.CDLL(None)
    shim.watch_calls(os.fsencode(Path(place, "store")), os.fsencode(Path(place, "aside")), -1)
    shim.die_at(call.encode(), ctypes.c_long(number), 0)
    embedding.load_snapshot("wide", convert=True)
    train(embedding, range(9))
    shim.die_at(b"", ctypes.c_long(0), 0)
    os.write(events, b"returned\n")
    os.kill(os.getpid(), signal.SIGKILL)


WARM = Warm(convert, SHIMMED)


@pytest.mark.parametrize(
    "store", ["ssd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("host", "ssd_host"))]
)
def test_a_kill_amid_a_conversion_leaves_rows_of_one_dtype_and_every_snapshot(tmp_path: Path, store: str) -> None:
    begun = tmp_path / "begun"
    with open_embedding(begun, store, torch.float32) as embedding:
        train(embedding, range(12))
        embedding.save_snapshot("wide")
    with open_embedding(begun, store, open="fresh") as embedding:
        train(embedding, range(6, 15))
        embedding.save_snapshot("narrow")
        narrow = contents(embedding).tobytes()
    with open_embedding(tmp_path / "alone", "device", open="fresh") as embedding:
        shutil.copytree(begun / "rows" / "snapshots" / "wide", tmp_path / "alone" / "rows" / "snapshots" / "wide")
        embedding.load_snapshot("wide", convert=True)
        converted = contents(embedding).tobytes()
    killed = 0
    for call, stride in CALLS.items():
        number, returned = 1, False
        while not returned:
            place = tmp_path / f"{call}-{number}"
            shutil.copytree(begun, place / "store", symlinks=True)
            (place / "aside").mkdir()
            answer = WARM.order({"place": str(place), "store": store, "call": call, "number": number})
            assert answer["signal"] == signal.SIGKILL
            returned = "returned" in answer["events"]
            killed += not returned
            listing = list_snapshots(place / "store" / "rows" / "snapshots")
            assert not listing.damaged
            assert [snapshot.name for snapshot in listing.snapshots] == ["wide", "narrow"]
            with open_embedding(place / "store", store) as embedding:
                assert contents(embedding).tobytes() in ([narrow] if returned else [narrow, converted])
                embedding.load_snapshot("wide", convert=True)
                assert contents(embedding).tobytes() == converted
            number += stride
    assert killed > 2
