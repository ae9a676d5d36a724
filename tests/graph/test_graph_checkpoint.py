"""A run that went on from a checkpoint is, bit for bit, one that never stopped; a checkpoint is whole, or not there."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from support.checkpoints import IDS, Rating, files, rating, state, steps
from support.embeddings import contents, make
from support.forked import in_process
from support.golden_checkpoint import Golden, batch, state_arrays
from support.killed import returned_until_killed
from support.places import GOLDEN
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import Graph, SnapshotError


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
    for graph in (rating("device", None), first):  # on another store; back, in the same process
        graph.load(tmp_path / "checkpoint")
        assert steps(graph, IDS[5:]) == losses[5:]
        assert state(graph) == expected


def test_a_store_folder_goes_back_to_the_checkpoint_that_it_loaded(tmp_path: Path) -> None:
    first = rating("host", tmp_path / "a")
    steps(first, IDS[:5])
    first.save(tmp_path / "checkpoint")
    linked = [path for path in (tmp_path / "checkpoint" / "rows").rglob("*") if path.is_file()]
    assert [path.stat().st_nlink for path in linked] == [2] * len(linked) != []  # with those in the store folder
    first.rows.close()
    other = rating("ssd", tmp_path / "b")
    other.load(tmp_path / "checkpoint")
    name = other.rows.last_snapshot
    assert name is not None
    assert name.startswith("checkpoint-")
    steps(other, IDS[5:])
    other.rows.load_snapshot(name)
    assert other.rows.metrics()["table"]["step"] == 5


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


@pytest.mark.parametrize("store", ["device", "host"])
def test_the_golden_checkpoint_is_loaded_and_trained_on(tmp_path: Path, store: str) -> None:
    graph = Golden(tmp_path if store == "host" else None, store)
    assert graph.load(GOLDEN / "checkpoint") == {}
    with np.load(GOLDEN / "checkpoint.npz") as expected:
        assert state_arrays(graph).keys() == set(expected)
        for name, value in state_arrays(graph).items():
            assert value.tobytes() == expected[name].tobytes(), name
    graph(batch(4))
    assert graph.rows.metrics()["table"]["step"] == 4


def save_until_killed(path: Path, saved: int, overwrite: bool) -> None:
    """Steps and checkpoints in turn, reported on `saved` when a save has returned."""
    graph = rating("host", path / "store")
    for number in range(1, 10_000):
        steps(graph, IDS[number % 5 : number % 5 + 1])
        graph.save(path / ("best" if overwrite else f"step-{number:05}"), overwrite=overwrite)
        os.write(saved, b"%d\n" % number)


def kill_and_look(path: Path, seed: int) -> None:
    returned = returned_until_killed(lambda path, saved: save_until_killed(path, saved, False), path, seed)
    there = {int(folder.name.removeprefix("step-")) for folder in path.glob("step-*")}
    assert set(returned) <= there
    assert len(there) <= len(returned) + 1  # one may be whole whose save did not return
    graph = rating("device", None)
    for step in there:
        graph.load(path / f"step-{step:05}")
        assert graph.rows.metrics()["table"]["step"] == step


def kill_and_look_at_the_best(path: Path, seed: int) -> None:
    returned = returned_until_killed(lambda path, saved: save_until_killed(path, saved, True), path, seed)
    other = rating("device", None)
    other.load(path / "best")
    step = other.rows.metrics()["table"]["step"]
    assert returned[-1] <= step <= returned[-1] + 1
    expected = contents(other.rows).tobytes()
    again = rating("host", path / "store")  # goes back to what was saved last, then to the checkpoint
    again.load(path / "best")
    assert contents(again.rows).tobytes() == expected
    again.save(path / "best", overwrite=True)
    assert {place.name for place in path.iterdir()} == {"best", "store"}
    # the kill may leave one of a save that it ended
    assert len(list((path / "store" / "rows" / "snapshots").iterdir())) <= 2


@pytest.mark.parametrize("look", [kill_and_look, kill_and_look_at_the_best])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_kill_at_any_instant_leaves_whole_checkpoints_alone(tmp_path: Path, look: object, seed: int) -> None:
    in_process(look, tmp_path, seed)


def in_store(path: Path) -> set[str]:
    return {place.name for place in (path / "rows" / "snapshots").iterdir()}


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
def test_the_best_checkpoint_is_saved_again_and_again(tmp_path: Path, store: str) -> None:
    graph = rating(store, None if store == "device" else tmp_path / "store")
    for number in range(3):
        steps(graph, IDS[number : number + 1])
        graph.check_save(tmp_path / "best", overwrite=True)
        graph.save(tmp_path / "best", overwrite=True)
        saved = state(graph)
    for save in (graph.check_save, graph.save):
        check_refusal((lambda save=save: save(tmp_path / "best"), SnapshotError, "best' exists", "overwrite=True"))
    assert {place.name for place in tmp_path.iterdir()} <= {"best", "store"}
    if store != "device":  # rows of the replaced ones are gone
        assert in_store(tmp_path / "store") == {graph.rows.last_snapshot}
    steps(graph, IDS[3:5])
    graph.load(tmp_path / "best")
    assert state(graph) == saved


def test_a_snapshot_of_a_replaced_checkpoint_stays_where_another_goes_over_it(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:1])
    graph.save(tmp_path / "best")
    first = graph.rows.last_snapshot
    steps(graph, IDS[1:2])
    graph.rows.save_snapshot("over", "incremental")
    graph.save(tmp_path / "best", overwrite=True)
    assert in_store(tmp_path / "store") == {first, "over", graph.rows.last_snapshot}
    graph.rows.load_snapshot("over")
    assert graph.rows.metrics()["table"]["step"] == 2


def test_a_snapshot_of_a_replaced_checkpoint_stays_where_rows_of_another_store_go_back_to_it(tmp_path: Path) -> None:
    def graph_in(store: str) -> Rating:
        return Rating(make(options("host", tmp_path / store, snapshot_path=tmp_path / "place"), None, tables=2))

    graph = graph_in("one")
    steps(graph, IDS[:1])
    graph.save(tmp_path / "best")
    graph.rows.close()
    other = graph_in("other")
    other.load(tmp_path / "best")
    first = other.rows.last_snapshot
    steps(other, IDS[:1])
    other.rows.close()
    graph = graph_in("one")
    steps(graph, IDS[1:2])
    graph.save(tmp_path / "best", overwrite=True)
    assert in_store(tmp_path / "place") == {first, graph.rows.last_snapshot}
    graph.rows.close()


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    graph = rating("device", None)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").touch()
    for save in (graph.save, graph.check_save):
        with pytest.raises(SnapshotError, match=r"home' exists and is not a checkpoint"):
            save(tmp_path / "home", overwrite=True)
        with pytest.raises(SnapshotError, match=r"choose another path$"):  # no remedy that is refused then
            save(tmp_path / "home")
    assert (tmp_path / "home" / "thesis").exists()


def test_an_overwriting_save_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:1])
    graph.save(tmp_path / "best")
    saved, name = state(graph), graph.rows.last_snapshot
    steps(graph, IDS[1:2])
    graph.rows.save_snapshot("running")
    snapshots = tmp_path / "store" / "rows" / "snapshots"
    snapshots.rename(tmp_path / "aside")
    snapshots.write_text("in the way")
    with pytest.raises(SnapshotError, match="was not written"):
        graph.save(tmp_path / "best", overwrite=True)
    snapshots.unlink()
    (tmp_path / "aside").rename(snapshots)
    assert in_store(tmp_path / "store") == {name, "running"}
    graph.load(tmp_path / "best")
    assert state(graph) == saved


def test_tensors_of_a_checkpoint_have_the_names_of_their_parameters(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    tensors = load_file(tmp_path / "checkpoint" / "tensors.safetensors")
    for name, value in [*graph.named_parameters(), *graph.named_buffers()]:
        assert tensors[name].numpy().tobytes() == value.detach().numpy().tobytes(), name
    assert "_extra_state.optimizers.1.state.0.exp_avg" in tensors


class Odd(nn.Module):
    """Its state has keys that lead to one name."""

    def get_extra_state(self) -> Any:
        one, two, three, four = torch.arange(1, 5)
        return {"1": one, 1: two, "a.b": three, "a": {"b": four}}

    def set_extra_state(self, state: Any) -> None:
        self.values = state


def test_keys_that_lead_to_one_name_are_kept_apart(tmp_path: Path) -> None:
    graph = Graph()
    graph.odd = Odd()
    graph.save(tmp_path / "checkpoint")
    graph.load(tmp_path / "checkpoint")
    assert graph.odd.values == graph.odd.get_extra_state()
