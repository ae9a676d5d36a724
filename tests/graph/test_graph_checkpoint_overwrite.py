"""A checkpoint that takes the place of another: the best one of a run, and of a second run."""

from __future__ import annotations

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
from tierbed import Graph, InputError, SnapshotError


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
        with pytest.raises(InputError, match="overwrite=1"):
            save(tmp_path / "new", overwrite=1)  # type: ignore[arg-type]
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
