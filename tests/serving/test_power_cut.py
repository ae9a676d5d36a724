"""A power cut after a process was killed: what that one had not synced may be lost, though others went on from it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from crash.power import Disk

from support import shim
from support.embeddings import make, train
from support.killed import Warm
from support.served_rows import snapshot_of
from support.stores import options
from tierbed.serving import ServingFolder, publish


def change(path: str, what: str, call: str, number: int, events: int) -> None:
    """Change the folder, killed after that call. What was done is traced."""
    folder = ServingFolder(Path(path, "served"))
    shim.watch(folder.path, os.open(Path(path, "trace"), os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    shim.die_at(call, number, "after")
    if what == "publish":
        publish(folder.path, Path(path, "rows", "snapshots", "s3"), "float32", rebase=True)
    elif what == "prune":
        folder.prune(1)
    else:
        folder.release()
    shim.live_on()


KILLED = {  # what is killed after which call, and what is done then
    "a version is removed, then its files": ("prune", "unlink", 1, "prune"),
    "a version is written, then readers take it": ("publish", "rename", 1, "release"),
    "readers take a version, then older ones are removed": ("publish", "rename", 2, "prune"),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", KILLED)
def test_what_a_killed_process_left_is_made_durable_first(tmp_path: Path, name: str, seed: int) -> None:
    first, call, number, second = KILLED[name]
    served, warm = ServingFolder(tmp_path / "served"), Warm(change)
    (tmp_path / "aside").mkdir()
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        for step in ("s1", "s2", "s3"):
            train(embedding, range(40))
            embedding.save_snapshot(step)
            if step != "s3":
                publish(served.path, snapshot_of(embedding, tmp_path, step), "float32", rebase=True)
    plan = {"path": str(tmp_path), "what": first, "call": call, "number": number}
    assert warm.order(plan)["signal"] == 9
    answer = warm.order(plan | {"what": second, "call": ""})
    assert (answer["signal"], answer["code"]) == (0, 0)
    Disk(served.path, (tmp_path / "trace").read_text()).cut(random.Random(seed))
    versions = served.list_versions()
    assert served.read_current().version in versions
    assert all(not served.verify(version) for version in versions)
