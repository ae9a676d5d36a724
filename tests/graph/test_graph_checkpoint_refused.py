"""Checkpoints that cannot be saved or loaded say why, and leave all as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.checkpoints import IDS, Rating, files, rating, state, steps
from support.embeddings import DIM, make
from support.refusals import check_refusal
from support.stores import options
from tierbed import Graph, GraphError, InputError, MultiTableEmbedding, SnapshotError
from tierbed.engine.durable import seal, unseal
from tierbed.graph.state.kept import STATE


def fails(graph: Rating, path: Path, match: str) -> None:
    """Loading says why it cannot, and leaves all as it was."""
    before = state(graph)
    with pytest.raises(SnapshotError, match=match):
        graph.load(path)
    assert state(graph) == before


class Two(Rating):
    """With a second embedding, after the first."""

    def __init__(self, path: Path | None, dim: int = DIM, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__(make(options("host", path), None, "rows", tables=2))
        self.other = MultiTableEmbedding("other", dim, torch.float32, torch.int64, None, options("host", path))
        self.add_optimizer(kind(self.other.parameters(), lr=0.05))  # type: ignore[call-arg]

    def build(self, ids: Tensor) -> Tensor:
        self.scaler.scale(self.other(ids).square().sum()).backward()
        return super().build(ids)


def snapshots(path: Path) -> list[str]:
    return sorted(f"{place.parts[-3]}/{place.name}" for place in path.glob("*/snapshots/*"))


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_damage_in_the_last_embedding_leaves_the_first_and_the_store_folders(tmp_path: Path) -> None:
    graph = Two(None)
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    bucket = files(tmp_path / "checkpoint" / "rows" / "1")[0]
    whole = bucket.read_bytes()
    bucket.write_bytes(damaged(whole))
    stored = Two(tmp_path / "store")
    for one in (graph, stored):
        steps(one, IDS[2:3])
        fails(one, tmp_path / "checkpoint", "bucket-.* is damaged")
    with pytest.raises(SnapshotError, match=r"bucket-.* is damaged"):
        stored.other.table_handle().snapshots.load_rows(bucket.parent)  # also where it was not checked
    assert snapshots(tmp_path / "store") == []
    bucket.write_bytes(whole)
    stored.load(tmp_path / "checkpoint")
    assert stored.other.metrics()["table"]["step"] == 2


def test_rows_of_another_table_or_optimizer_are_refused(tmp_path: Path) -> None:
    graph = Two(None)
    graph.save(tmp_path / "checkpoint")
    for changed in ({"dim": 3}, {"kind": torch.optim.Adagrad}):
        fails(Two(None, **changed), tmp_path / "checkpoint", "holds rows of")  # type: ignore[arg-type]


def one_more_optimizer(graph: Rating) -> None:
    graph.add_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


OTHERS: dict[str, Callable[[Rating], object]] = {
    "the state has 2 optimizers, and this graph has 3; add the same": one_more_optimizer,
    r"lacks \['mlp.extra'\] and has \[\]": lambda graph: setattr(graph.mlp, "extra", nn.Parameter(torch.zeros(1))),
    r"mlp\.2\.bias has shape \[1\] in the state, and \[3\] in the graph": (
        lambda graph: setattr(graph.mlp[2], "bias", nn.Parameter(torch.zeros(3)))
    ),
    r"optimizer 1 .* has groups of \[4\] parameters.* of \[4, 1\]": (
        lambda graph: graph.dense.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    ),
    r"embeddings \['rows'\], but this graph has \['rows', 'other'\]": (
        lambda graph: setattr(graph, "other", make(options("device"), name="other"))
    ),
}


def test_another_graph_is_refused_before_rows_are_replaced(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:3])
    graph.save(tmp_path / "checkpoint")
    for match, change in OTHERS.items():
        other = rating("device", None)
        change(other)
        fails(other, tmp_path / "checkpoint", match)
    record = unseal((tmp_path / "checkpoint" / STATE).read_bytes())
    (tmp_path / "checkpoint" / STATE).write_bytes(seal({**record, "format": 9}))
    fails(graph, tmp_path / "checkpoint", "format 9, but this tierbed reads 2")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_only_one_side_has_is_told(tmp_path: Path, enabled: bool) -> None:
    graph, other = rating("device", None), rating("device", None)
    steps(graph, IDS[:3])
    graph.save(tmp_path / "scaled")
    other.scaler = torch.amp.GradScaler("cpu", enabled=False)
    other.set_grad_scaler(None if enabled else other.scaler)
    steps(other, IDS[:3])
    fails(other, tmp_path / "scaled", "the state has a gradient scaler, and this graph has no .*er\\(scaler\\) before")
    with pytest.raises(GraphError, match="the state has a gradient scaler"):
        other.load_state_dict(graph.state_dict())
    other.save(tmp_path / "plain")
    fails(graph, tmp_path / "plain", "this graph has a gradient scaler, and the state has no .*er\\(None\\) before")
    other.load(tmp_path / "plain")


def test_what_is_no_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    graph = rating("device", None)
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    fails(
        graph, tmp_path / "runs", r"runs' is not a checkpoint: it has no file graph\.msgpack; give one of graph\.save"
    )
    for name in ("second", "first"):
        graph.save(tmp_path / "runs" / name)
    fails(graph, tmp_path / "runs", r"it holds the checkpoints \['first', 'second'\]: give the path of one")
    graph(IDS[0])
    for use in (graph.save, graph.load, graph.draw):
        with pytest.raises(InputError, match="path=None"):
            use(None)  # type: ignore[arg-type]


def test_a_checkpoint_is_loaded_while_gradients_wait(tmp_path: Path) -> None:
    graph = rating("device", None)
    graph.accumulate_grads(2)
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    expected = steps(graph, IDS[2:4])
    steps(graph, IDS[4:5])
    graph.load(tmp_path / "checkpoint")
    assert steps(graph, IDS[2:4]) == expected


def test_another_snapshot_of_the_name_is_told_and_a_damaged_copy_found(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    name = graph.rows.last_snapshot
    assert name is not None
    other = rating("host", tmp_path / "other")
    steps(other, IDS[:1])
    other.rows.save_snapshot(name)
    fails(other, tmp_path / "checkpoint", "different snapshots with one name; rename or remove the former")
    place = tmp_path / "other" / "rows" / "snapshots" / name
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "checkpoint" / "rows" / "0" / name, place)
    bucket = next(place.glob("bucket-*"))
    bucket.write_bytes(damaged(bucket.read_bytes()))
    fails(other, tmp_path / "checkpoint", "other/rows/snapshots.* is damaged")


def test_a_state_that_a_checkpoint_cannot_have_writes_no_rows(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:1])
    graph.rows.save_snapshot("before")
    for place, value, *named in (
        ("odd", torch.zeros(2, dtype=torch.complex128), "state['mlp.odd']", "torch.complex128"),
        ("odd", torch.eye(3).to_sparse(), "state['mlp.odd']", "torch.sparse_coo"),
        ("note", list(range(65_537)), "['note']", "65537"),
        ("note", {1.5: "x"}, "['note']", "1.5"),
        ("note", 1 << 64, "['note']", "64 bits"),
        ("note", "x" * (1 << 24), "16777216"),
    ):
        graph.mlp.register_buffer("odd", value if place == "odd" else None)
        graph.dense.param_groups[0]["note"] = value if place == "note" else None
        check_refusal((lambda: graph.save(tmp_path / "checkpoint"), GraphError, *named))
        assert snapshots(tmp_path / "store") == ["rows/before"]
        assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_save_that_fails_after_rows_takes_them_back(tmp_path: Path) -> None:
    graph = Two(tmp_path / "store")
    steps(graph, IDS[:1])
    graph.rows.save_snapshot("before")
    (tmp_path / "store" / "other" / "snapshots").write_text("in the way")
    with pytest.raises(SnapshotError, match="was not written"):
        graph.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert snapshots(tmp_path / "store") == ["rows/before"]
    assert graph.rows.last_snapshot == "before"
    (tmp_path / "store" / "other" / "snapshots").unlink()
    graph.save(tmp_path / "checkpoint")
    assert len(snapshots(tmp_path / "store")) == 3


class First(nn.Module):
    def __init__(self, name: str = "old") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(3)))


class Versioned(First):
    """Of version 2, whose weight is ten times that of version 1."""

    _version = 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = 10 * state.pop(f"{prefix}old")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_module_migrates_what_is_of_an_older_version_alone(tmp_path: Path) -> None:
    graph, old = Graph(), Graph()
    graph.module, old.module = Versioned("weight"), First()
    for one, name, weight in ((graph, "new", 1.0), (old, "old", 10.0)):
        one.again = one.module
        one.save(tmp_path / name)
        graph.load(tmp_path / name)
        assert graph.module.weight.tolist() == [weight] * 3


def test_a_name_that_no_checkpoint_can_have_is_refused(tmp_path: Path) -> None:
    graph = rating("device", None)
    for name in (".hidden", "a\\b", "x" * 192, "x" * 300):
        with pytest.raises(SnapshotError, match=r"its name has to be 1 to 191 printable bytes"):
            graph.save(tmp_path / name)
        fails(graph, tmp_path / name, "there is no checkpoint")
    graph.save(tmp_path / ("x" * 191))
    graph.load(tmp_path / ("x" * 191))


def test_a_pipe_in_the_place_of_the_tensors_is_refused_at_once(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:1])
    graph.save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tensors.safetensors").unlink()
    os.mkfifo(tmp_path / "checkpoint" / "tensors.safetensors")
    fails(graph, tmp_path / "checkpoint", r"tensors\.safetensors' is not a regular file")
