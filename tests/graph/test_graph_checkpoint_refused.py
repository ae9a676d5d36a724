"""Checkpoints that cannot be saved or loaded say why, and leave all as it was."""

from __future__ import annotations

import copy
import functools
import operator
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.checkpoints import IDS, Rating, files, rating, state, steps
from support.embeddings import DIM, make
from support.refusals import check_refusal
from support.stores import options
from support.two_towers import IDS as LOOP_IDS
from support.two_towers import TwoTowers
from tierbed import Graph, GraphError, MultiTableEmbedding, OptionError, SnapshotError, load_checkpoint, save_checkpoint
from tierbed.embedding.state_dict.saved_rows import exclude_rows
from tierbed.engine.durable import seal, unseal
from tierbed.graph.state.folders import STATE_FILE


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a graph that was trained."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    graph = rating("device", None)
    steps(graph, IDS[:3])
    graph.save(path)
    return path


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
        stored.other.table_handle().snapshot_manager.load_snapshot_at(bucket.parent)  # also where it was not checked
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
    r"optimizer 1 .* groups have \[4\] parameters.* \[4, 1\] parameters": (
        lambda graph: graph.dense.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    ),
    r"embeddings \['rows'\], but this graph has \['rows', 'other'\]": (
        lambda graph: setattr(graph, "other", make(options("device"), name="other"))
    ),
}


@pytest.mark.parametrize("match", OTHERS)
def test_another_graph_is_refused_before_rows_are_replaced(saved: Path, match: str) -> None:
    graph = rating("device", None)
    OTHERS[match](graph)
    fails(graph, saved, match)


def test_other_formats_and_files_are_refused_at_once(tmp_path: Path, saved: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "checkpoint")
    record = unseal((path / STATE_FILE).read_bytes())
    (path / STATE_FILE).write_bytes(seal({**record, "format": 9}))
    graph = rating("device", None)
    fails(graph, path, "format 9, but this tierbed reads 3")
    shutil.copy(saved / STATE_FILE, path)
    (path / "tensors.safetensors").unlink()
    os.mkfifo(path / "tensors.safetensors")
    fails(graph, path, r"tensors\.safetensors' is not a regular file")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_only_one_side_has_is_told(tmp_path: Path, saved: Path, enabled: bool) -> None:
    graph, other = rating("device", None), rating("device", None)
    other.scaler = torch.amp.GradScaler("cpu", enabled=False)
    other.set_grad_scaler(None if enabled else other.scaler)
    fails(other, saved, "the state has an enabled gradient scaler, but this graph does not.*er\\(scaler\\)")
    with pytest.raises(GraphError, match="the state has an enabled gradient scaler"):
        other.load_state_dict(graph.state_dict())
    other.save(tmp_path / "plain")
    fails(graph, tmp_path / "plain", "this graph has an enabled gradient scaler, but the state does not.*er\\(None\\)")
    other.load(tmp_path / "plain")


def test_what_is_no_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    graph = rating("device", None)
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    fails(graph, tmp_path / "runs", r"runs' is not a checkpoint: it has no file graph\.msgpack; give one of")
    for name in ("second", "first"):
        graph.save(tmp_path / "runs" / name)
    fails(graph, tmp_path / "runs", r"it holds the checkpoints \['first', 'second'\]: give the path of one")
    for name in (".hidden", "a\\b", "x" * 192, "x" * 300):
        with pytest.raises(SnapshotError, match=r"its name has to be 1 to 191 printable bytes"):
            graph.save(tmp_path / name)
        fails(graph, tmp_path / name, "there is no checkpoint")
    graph.save(tmp_path / ("x" * 191))
    graph.load(tmp_path / ("x" * 191))


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
    fails(other, tmp_path / "checkpoint", "different snapshots with the same name; rename or remove the first")
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


@pytest.mark.parametrize("kind", [None, "full", "checkpoint"])
def test_a_folder_of_snapshots_that_was_removed_is_told(tmp_path: Path, kind: str | None) -> None:
    where = options("ssd", tmp_path / "store", snapshot_path=tmp_path / "elsewhere")
    graph = Rating(make(where, None, "rows", tables=2))
    steps(graph, IDS[:1])
    shutil.rmtree(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match="was not written"):
        graph.save(tmp_path / "checkpoint", kind=kind)


def test_rows_in_memory_have_no_files_to_link(tmp_path: Path) -> None:
    for path in (None, tmp_path / "store"):
        graph = rating("host", path)
        steps(graph, IDS[:1])
        with pytest.raises(OptionError, match="kind='checkpoint'"):
            graph.save(tmp_path / "checkpoint", kind="checkpoint")
        assert not (tmp_path / "checkpoint").exists()


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


DELETE, DOUBLE = object(), object()
VALUES = [
    *(None, True, -1, 1.5, 2**63, -1e300, float("nan"), "x", b"x", [], {}, [[]], DELETE, DOUBLE),
    *(["list", []], ["dict", []], ["dict", [[True, 1]]], ["tensor", "nope"]),
    *(["tensor", "mlp.0.weight"], ["tensor", "model.mlp.0.weight"]),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in nested maps and lists."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


def forged(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    if not place:
        return None if other in (DELETE, DOUBLE) else other
    value = copy.deepcopy(value)
    *path, last = place
    inner = functools.reduce(operator.getitem, path, value)
    if other is DELETE:
        del inner[last]
    elif other is DOUBLE and isinstance(inner, list):
        inner.append(inner[last])
    else:
        inner["more" if other is DOUBLE else last] = inner[last] if other is DOUBLE else other
    return value


Parts = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


def graph_parts(path: Path) -> Parts:
    """Load, the state that it replaces, and a step of a graph that is to load the checkpoint `path`."""
    saved, other = rating("host", None), rating("host", None)
    steps(saved, IDS[:2])
    saved.save(path, extra={"epoch": 1})
    steps(other, IDS[:1])
    return lambda: other.load(path), lambda: state(other), lambda: steps(other, IDS[2:3])


def loop_parts(path: Path) -> Parts:
    def parts() -> tuple[Any, ...]:
        model = TwoTowers(options("host", None))
        optimizer = tierbed.EagerOptimizer(torch.optim.Adam(model.parameters(), lr=0.02), model)
        return model, optimizer, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def step(model: Any, optimizer: Any, schedulers: Any) -> None:
        model(LOOP_IDS[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedulers[0].step()

    def now(model: Any, optimizer: Any, schedulers: Any) -> str:
        training = [one.state_dict() for one in (optimizer, *schedulers)]
        return repr((sorted(model.state_dict().items()), training, torch.get_rng_state().tolist()))

    saved, other = parts(), parts()
    step(*saved)
    step(*other)
    save_checkpoint(path, *saved, extra={"epoch": 1})
    return lambda: load_checkpoint(path, *other), lambda: now(*other), lambda: step(*other)


@pytest.mark.parametrize("every", [433, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parts", [graph_parts, loop_parts])
def test_a_field_of_any_value_is_refused_and_nothing_is_replaced(
    tmp_path: Path, parts: Callable[..., Parts], every: int
) -> None:
    """Each place with each value, or a part of these: refused with nothing replaced, or loaded and trained on."""
    load, now, step = parts(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "graph.msgpack"
    whole = file.read_bytes()
    record = unseal(whole)
    loaded = 0
    cases = [(place, other) for place in places(record) for other in VALUES][::every]
    for place, other in cases:
        before = now()
        file.unlink()
        file.write_bytes(seal(forged(record, place, other)))
        try:
            load()
            loaded += 1
            with suppress(ValueError):  # of a schedule of fewer steps; other numbers train
                step()
        except SnapshotError:
            assert now() == before, (place, other)
        if now() != before:
            file.unlink()
            file.write_bytes(whole)
            load()
            step()
    assert 0 < loaded < len(cases) / 5


@pytest.mark.parametrize(("parts", "near"), [(loop_parts, "model"), (graph_parts, "initial_lr")])
def test_a_string_that_stands_for_a_map_or_names_no_number_is_refused(
    tmp_path: Path, parts: Callable[..., Any], near: str
) -> None:
    load, now, _ = parts(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "graph.msgpack"
    record = unseal(file.read_bytes())
    *_, last = (place for place in places(record) if functools.reduce(operator.getitem, place, record) == near)
    before = now()
    # the value that "model" stands before; the name itself, of a phase of OneCycleLR
    file.write_bytes(seal(forged(record, (*last[:-1], 1) if near == "model" else last, "x")))
    with pytest.raises(SnapshotError):
        load()
    assert now() == before


WRONG: list[Any] = [
    *(5, (1, 2), {"ranks": [1]}, {"scaler": {"scale": "x"}}, {"schedules": [{"last_epoch": None}, {}]}),
    *({"random": [1.5]}, {"random": [torch.zeros(3, dtype=torch.uint8)]}, {"random": None}),
    *({"optimizers": 3}, {"optimizers": [{"state": {}, "param_groups": []}, {}]}, {"optimizers": None}),
]


def test_a_malformed_state_of_a_graph_is_told_and_nothing_is_replaced() -> None:
    graph = rating("host", None)
    steps(graph, IDS[:2])
    given = graph.state_dict()
    (extra,) = given["_extra_state"]
    steps(graph, IDS[2:3])
    before = state(graph)
    for wrong in WRONG:
        given["_extra_state"] = ({**extra, **wrong},) if isinstance(wrong, dict) else wrong
        with pytest.raises(GraphError):
            graph.load_state_dict(given)
        assert state(graph) == before, wrong


class Extra(nn.Module):
    """With extra state, which is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.number = 0.5

    def get_extra_state(self) -> Any:
        return {"number": self.number}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"] + 0.0


def test_extra_state_that_its_module_refuses_leaves_what_was_loaded_before_it(tmp_path: Path) -> None:
    graph = Graph()
    graph.first, graph.extra = nn.Linear(2, 2), Extra()
    graph.extra.number = "x"  # type: ignore[assignment]
    graph.save(tmp_path / "checkpoint")
    graph.extra.number = 0.25
    with torch.no_grad():
        graph.first.weight.add_(1)
    with exclude_rows():
        before = repr(sorted(graph.state_dict().items()))
        with pytest.raises(SnapshotError, match="does not fit this graph"):
            graph.load(tmp_path / "checkpoint")
        assert repr(sorted(graph.state_dict().items())) == before
