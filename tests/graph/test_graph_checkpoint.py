"""A run that went on from a checkpoint is, bit for bit, one that never stopped."""

from __future__ import annotations

import copy
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.checkpoints import IDS, files, rating, state, steps
from support.stores import STORES
from tierbed import Graph, SnapshotError
from tierbed.engine.durable import seal, unseal


@cache
def uninterrupted() -> tuple[list[float], bytes]:
    """The losses of all steps, and the state after them, which are those of any store."""
    graph = rating("host", None)
    return steps(graph, IDS), state(graph)


@pytest.mark.parametrize("store", STORES)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, store: str) -> None:
    losses, expected = uninterrupted()
    first = rating(store, tmp_path / "first" if store.startswith("ssd") else None)
    assert steps(first, IDS[:5]) == losses[:5]
    first.save(tmp_path / "checkpoint")
    assert steps(first, IDS[5:]) == losses[5:]  # saving changes nothing
    assert state(first) == expected

    torch.manual_seed(99)
    again = rating("device", None)  # on another store
    again.load(tmp_path / "checkpoint")
    assert steps(again, IDS[5:]) == losses[5:]
    assert state(again) == expected

    first.load(tmp_path / "checkpoint")  # back, in the same process
    assert steps(first, IDS[5:]) == losses[5:]
    assert state(first) == expected


def test_a_store_folder_goes_back_to_the_checkpoint_that_it_loaded(tmp_path: Path) -> None:
    first = rating("host", tmp_path / "a")
    steps(first, IDS[:5])
    first.save(tmp_path / "checkpoint")
    first.rows.close()
    other = rating("ssd", tmp_path / "b")
    other.load(tmp_path / "checkpoint")
    name = other.rows.last_snapshot
    assert name is not None
    assert name.startswith("checkpoint-")
    steps(other, IDS[5:])
    other.rows.load_snapshot(name)
    assert other.rows.metrics()["table"]["step"] == 5


def test_rows_in_a_checkpoint_are_links_to_those_in_the_store_folder(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    linked = [path for path in (tmp_path / "checkpoint" / "rows").rglob("*") if path.is_file()]
    assert linked
    assert all(path.stat().st_nlink == 2 for path in linked)


def test_a_state_dict_brings_back_the_rows_of_the_snapshot_that_it_names(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:3])
    graph.rows.save_snapshot("three")
    state = copy.deepcopy(graph.state_dict())
    losses = steps(graph, IDS[3:5])
    graph.load_state_dict(state)
    assert steps(graph, IDS[3:5]) == losses


def test_a_path_that_exists_is_refused_and_left(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:1])
    graph.save(tmp_path / "checkpoint")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(SnapshotError, match=r"checkpoint' exists"):
        graph.save(tmp_path / "checkpoint")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


class Holder(Graph):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.weight = optimizer.param_groups[0]["params"][0]
        self.add_optimizer(optimizer)


def test_a_flipped_bit_in_any_file_is_found_and_nothing_is_replaced(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:3])
    graph.save(tmp_path / "whole")
    steps(graph, IDS[3:5])
    before = state(graph)
    for file in files(tmp_path / "whole"):
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        damaged = tmp_path / "damaged" / file.relative_to(tmp_path / "whole")
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 4
        damaged.write_bytes(data)
        with pytest.raises(SnapshotError):
            graph.load(tmp_path / "damaged")
        assert state(graph) == before, file
        shutil.rmtree(tmp_path / "damaged")
    graph.load(tmp_path / "whole")
    assert graph.rows.metrics()["table"]["step"] == 3


def test_checkpoints_that_are_missing_foreign_or_of_another_format_say_so(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:1])
    graph.save(tmp_path / "checkpoint")
    with pytest.raises(SnapshotError, match="there is no checkpoint"):
        graph.load(tmp_path / "none")
    other = Holder(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    with pytest.raises(SnapshotError, match=r"embeddings \['rows'\], but this graph has \[\]"):
        other.load(tmp_path / "checkpoint")
    record = unseal((tmp_path / "checkpoint" / "graph.msgpack").read_bytes())
    (tmp_path / "checkpoint" / "graph.msgpack").write_bytes(seal({**record, "format": 9}))
    with pytest.raises(SnapshotError, match="format 9, but this tierbed reads 2"):
        graph.load(tmp_path / "checkpoint")


def test_a_file_in_a_checkpoint_needs_no_tierbed(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:1])
    graph.save(tmp_path / "checkpoint")
    data = (tmp_path / "checkpoint" / "tensors.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int(np.frombuffer(data[:8], "<u8")[0])])
    assert len(header) > 5
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".tmp")]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left on device")

    graph = rating("device", None)
    steps(graph, IDS[:1])
    monkeypatch.setattr("tierbed.graph.state.checkpoint.save_file", fail)
    with pytest.raises(SnapshotError, match=r"was not written: no space left"):
        graph.save(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []
