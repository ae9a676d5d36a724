"""Checkpoints with right checksums and wrong contents are refused whole: nothing is replaced."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierbed
from support.checkpoints import IDS, rating, state, steps
from support.stores import options
from support.two_towers import IDS as LOOP_IDS
from support.two_towers import TwoTowers
from tierbed import Graph, GraphError, SnapshotError, load_checkpoint, save_checkpoint
from tierbed.embedding.state_dict.saved_rows import rows_excluded
from tierbed.engine.durable import seal, unseal

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
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    last = place[-1]
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
    saved.save(path)
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


@pytest.mark.parametrize("every", [263, pytest.param(1, marks=pytest.mark.slow)])
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


def test_a_malformed_state_of_a_graph_is_told_and_nothing_is_replaced() -> None:
    graph = rating("host", None)
    steps(graph, IDS[:2])
    given = graph.state_dict()
    (extra,) = given["_extra_state"]
    steps(graph, IDS[2:3])
    before = state(graph)
    for wrong in (
        5,
        (1, 2),
        {"optimizers": 3},
        {"random": [1.5]},
        {"random": [torch.zeros(3, dtype=torch.uint8)]},
        {"random": None},
        {"scaler": {"scale": "x"}},
        {"schedules": [{"last_epoch": None}, {}]},
        {"optimizers": [{"state": {}, "param_groups": []}, {}]},
        {"ranks": [1]},
        {"optimizers": None},
    ):
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
    with rows_excluded():
        before = repr(sorted(graph.state_dict().items()))
        with pytest.raises(SnapshotError, match="does not fit this graph"):
            graph.load(tmp_path / "checkpoint")
        assert repr(sorted(graph.state_dict().items())) == before
