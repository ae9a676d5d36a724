"""Checkpoints that a thread writes while training goes on, and the user's own values in checkpoints."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from support.checkpoints import IDS, Rating, rating, state, steps
from support.embeddings import make
from support.refusals import check_refusal
from support.stores import options
from tierbed import Graph, GraphError, InputError, MultiTableEmbedding, OptionError, SnapshotError, StoreError
from tierbed.engine.table import background_save


@pytest.fixture(autouse=True)
def saves_last_until_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_save, "PAUSE_RATIO", 1e9)


class Two(Rating):
    """With a second embedding, which has no folder."""

    def __init__(self, store: str, path: Path | None) -> None:
        super().__init__(make(options(store, path), None, "rows", tables=2))
        self.other = MultiTableEmbedding("other", 2, torch.float32, torch.int64, None, options("host", None))
        self.add_optimizer(torch.optim.SGD(self.other.parameters(), lr=0.05))

    def build(self, ids: Any) -> Any:
        self.scaler.scale(self.other(ids).square().sum()).backward()
        return super().build(ids)


def saved_bytes(folder: Path) -> dict[Any, bytes]:
    """The content of each file of rows, by its path without the snapshot's name, and of each tensor."""
    rows = {(file.parts[-3], file.name): file.read_bytes() for file in folder.glob("rows/*/*/*.npy")}
    tensors = load_file(folder / "tensors.safetensors")
    tensors.pop("rows._extra_state")  # names the last snapshot
    return rows | {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def in_stores(path: Path) -> list[str]:
    return sorted(place.name for place in path.glob("store/*/snapshots/*"))


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
def test_a_save_while_training_goes_on_is_the_save_of_its_begin(tmp_path: Path, store: str) -> None:
    graph = Two(store, None if store == "device" else tmp_path / "store")
    steps(graph, IDS[:4])
    extra = {"epoch": 1, "order": torch.arange(5).view(1, 5).t()}
    graph.save(tmp_path / "front", kind="full", extra=extra)
    saved = state(graph)
    saving: Any = graph.save(tmp_path / "behind", background=True, extra=extra)
    assert not saving.done
    extra["order"].zero_()
    losses = steps(graph, IDS[4:8])
    assert not saving.done
    assert not (tmp_path / "behind").exists()
    assert saving.wait()
    assert saving.done
    assert saved_bytes(tmp_path / "behind") == saved_bytes(tmp_path / "front") != {}
    graph.save(tmp_path / "later", extra={})
    for one in (graph, Two("host", None)):
        loaded = one.load(tmp_path / "behind")
        assert (loaded["epoch"], loaded["order"].flatten().tolist()) == (1, [0, 1, 2, 3, 4])
        assert state(one) == saved
        assert steps(one, IDS[4:8]) == losses
    assert graph.load(tmp_path / "later") == {}
    names = [] if store == "device" else ["behind", "front", "later"]
    assert [name.rsplit("-", 1)[0] for name in in_stores(tmp_path)] == names


def test_one_save_runs_at_a_time_and_a_load_and_a_close_wait_for_it(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:1])
    graph.save(tmp_path / "best")
    saved = in_stores(tmp_path)
    steps(graph, IDS[1:2])
    saving: Any = graph.save(tmp_path / "best", overwrite=True, background=True)
    for save in (
        partial(graph.save, tmp_path / "best", overwrite=True),
        partial(graph.save, tmp_path / "best", overwrite=True, background=True),
        partial(graph.save, tmp_path / "other"),
        partial(graph.save_snapshot, "other"),
    ):
        check_refusal((save, StoreError, "'best", "one save can run at a time", "call wait()"))
    assert not saving.done
    expected = steps(graph, IDS[2:4])
    graph.load(tmp_path / "best")  # the one that was being saved
    assert saving.done
    assert steps(graph, IDS[2:4]) == expected
    assert len(in_stores(tmp_path)) == 1
    assert in_stores(tmp_path) != saved
    graph.save(tmp_path / "last", background=True)
    graph.rows.close()
    again = rating("host", None)
    again.load(tmp_path / "last")
    assert again.rows.metrics()["table"]["step"] == 4
    assert {place.name for place in tmp_path.iterdir()} == {"best", "last", "store"}


@pytest.mark.parametrize("fault", ["rows", "dense part", "name"])
@pytest.mark.parametrize("store", ["device", "host", "ssd"])
@pytest.mark.rotated("store")
def test_a_save_that_fails_leaves_nothing_and_says_so(tmp_path: Path, store: str, fault: str) -> None:
    graph = rating(store, None if store == "device" else tmp_path / "store")
    steps(graph, IDS[:2])
    graph.save(tmp_path / "best")
    before, names = state(graph), in_stores(tmp_path)
    for raises in (lambda saving: saving.wait(), lambda saving: graph.rows.close()):
        steps(graph, IDS[2:3])
        saving = graph.save(tmp_path / "new", background=True)
        if fault == "rows":
            [folder] = tmp_path.glob("*/*/snapshots/.tmp-new-*" if in_stores(tmp_path) else ".tmp-new/rows/0/.tmp-*")
            folder.rename(tmp_path / "aside")
        elif fault == "dense part":
            (tmp_path / ".tmp-new" / "tensors.safetensors").mkdir()
        else:
            (tmp_path / "new" / "in the way").mkdir(parents=True)
        with pytest.raises(SnapshotError, match=r"new.* was not written"):
            raises(saving)
        for place in ("aside", "new"):
            if (tmp_path / place).exists():
                shutil.rmtree(tmp_path / place)
        assert {place.name for place in tmp_path.iterdir()} - {"store"} == {"best"}
        assert in_stores(tmp_path) == names
    graph = rating(store, None if store == "device" else tmp_path / "store")
    graph.load(tmp_path / "best")
    assert state(graph) == before
    assert graph.save(tmp_path / "new", background=True).wait()  # type: ignore[union-attr]
    assert in_stores(tmp_path) == ([] if store == "device" else [*names, graph.rows.last_snapshot])


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:1])
    graph.save(tmp_path / "there", extra=None)
    before, names = sorted(tmp_path.iterdir()), in_stores(tmp_path)
    for path, given, kind, *named in (
        ("new", {"background": "yes"}, InputError, "background='yes'", "give True or False"),
        ("new", {"extra": [1]}, InputError, "extra=[1]", "give a dict"),
        ("new", {"extra": {"loader": object()}}, GraphError, "extra['loader'] is a object", "leave it out"),
        ("new", {"extra": {1.5: 0}, "background": True}, GraphError, "extra has the key 1.5", "leave it out"),
        ("new", {"kind": "checkpoint", "background": True}, OptionError, "kind='checkpoint'", "leave out kind"),
        ("there", {"background": True}, SnapshotError, "exists", "overwrite=True"),
    ):
        check_refusal((partial(graph.save, tmp_path / path, **given), kind, *named))  # type: ignore[arg-type]
    assert (sorted(tmp_path.iterdir()), in_stores(tmp_path)) == (before, names)


def test_a_graph_without_rows_is_saved_at_once(tmp_path: Path) -> None:
    graph = Graph()
    graph.dense = nn.Linear(2, 3)
    saving: Any = graph.save(tmp_path / "dense", background=True, extra={"dense": torch.ones(())})
    assert saving.wait()
    assert saving.done
    assert graph.load(tmp_path / "dense") == {"dense": torch.ones(())}
    with pytest.raises(SnapshotError, match="exists"):
        graph.save(tmp_path / "dense", background=True)
