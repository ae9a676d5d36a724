"""Rows of an earlier run and a fresh dense part cause a warning, once, and nothing else does."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.forked import in_process
from support.graphs import graph_of
from support.killed import copy_as_killed
from support.ranks import run_ranks
from support.stores import options
from support.two_towers import IDS, TwoTowers, losses, optimizer_of
from tierbed import Graph, load_checkpoint, save_checkpoint
from tierbed.distributed import World


def test_rows_alone_new_rows_and_intended_ones_are_not_told_and_a_partly_loaded_dense_part_is(tmp_path, caplog) -> None:
    run(towers(tmp_path))
    for mode in ("pretrained", "fresh"):
        run(towers(tmp_path, mode))
    model = towers(tmp_path)
    adam = torch.optim.Adam(model.users.parameters(), lr=0.1)
    graph_of(lambda graph, ids: graph.users(ids).sum().backward(), adam, users=model.users)(IDS[0, 0])
    model.close()
    assert warnings_in(caplog) == []
    model = towers(tmp_path)
    model.mlp = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 1))
    part = optimizer_of(model)
    model.mlp[0].load_state_dict(nn.Linear(10, 8).state_dict())
    run(model, optimizer_of, part)
    (warning,) = warnings_in(caplog)
    assert "(2 of its 4 parameters)" in warning


def scores(towers: TwoTowers) -> Graph:
    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = graph.towers(ids)
        loss.backward()
        return loss.detach()

    return graph_of(build, torch.optim.Adam(towers.parameters(), lr=0.02), towers=towers)


def keep_rows(path: Path, model: TwoTowers, part: Any) -> None:
    model.users.keep_rows()
    model.items.keep_rows()


def towers(path: Path, mode: str = "resume", **more: Any) -> TwoTowers:
    return TwoTowers(options("host", path / "store", open=mode, state_dict_snapshots=True), **more)


def run(model: TwoTowers, make: Callable[[TwoTowers], Any] = optimizer_of, part: Any = None) -> None:
    """Two steps, and a close. part: the optimizer or the graph, if it is made."""
    part = part or make(model)
    list(map(part, IDS[:2])) if make is scores else list(losses(model, part, IDS[:2]))
    model.close()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "mixes old and new parts" in record.getMessage()]
    caplog.clear()
    return found


def test_a_fresh_dense_part_on_old_rows_is_told_once_with_both_steps_and_remedies(tmp_path, caplog) -> None:
    run(towers(tmp_path))
    assert warnings_in(caplog) == []
    for make in (optimizer_of, scores):
        run(towers(tmp_path), make)
        (warning,) = warnings_in(caplog)
        for part in ("has rows of step", "begins at step 0", "graph.load", 'open="fresh"', 'open="pretrained"'):
            assert part in warning


LOADS = {
    "dense part": lambda path, model, part: model.mlp.load_state_dict(torch.load(path / "dense")),
    "model": lambda path, model, part: model.load_state_dict(torch.load(path / "model")),
    "graph": lambda path, model, part: part.load(path / "graph"),
    "loop": lambda path, model, part: load_checkpoint(path / "loop", model, part),
    "optimizer": lambda path, model, part: part.load_state_dict(torch.load(path / "optimizer")),
    "snapshots": lambda path, model, part: [rows.load_snapshot("two") for rows in (model.users, model.items)],
    "dense rows": lambda path, model, part: [
        rows.load_dense({0: torch.ones(3, rows.dim)}) for rows in (model.users, model.items)
    ],
    "kept rows": keep_rows,
}
OF_GRAPHS, OF_LOOPS = ("dense part", "model", "graph"), [name for name in LOADS if name != "graph"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run of which everything was saved."""
    path = tmp_path_factory.mktemp("saved")
    first = towers(path)
    optimizer, of_graph = optimizer_of(first), TwoTowers(options("host", path / "of-graph"))
    graph = scores(of_graph)
    list(losses(first, optimizer, IDS[:2]))
    graph(IDS[0])
    graph.save(path / "graph")
    save_checkpoint(path / "loop", first, optimizer)
    optimizer.save_snapshot("two")
    for name, part in (("dense", first.mlp), ("model", first), ("optimizer", optimizer)):
        torch.save(part.state_dict(), path / name)
    first.close()
    of_graph.close()
    return path


@pytest.mark.parametrize(("make", "load"), [*product([optimizer_of], OF_LOOPS), *product([scores], OF_GRAPHS)])
def test_what_was_loaded_or_chosen_is_not_told(tmp_path, saved, caplog, make, load) -> None:
    path = tmp_path / "copy"
    copy_as_killed(saved, path)
    again = towers(path)
    part = make(again)
    LOADS[load](path, again, part)
    run(again, make, part)
    assert warnings_in(caplog) == []


def test_the_dense_part_of_this_process_belongs_to_rows_that_are_opened_again(tmp_path, caplog) -> None:
    for make in (scores, optimizer_of):
        path = tmp_path / make.__name__
        first, again = towers(path), towers(path)
        again.mlp = first.mlp
        run(first)
        run(again, make)
        assert warnings_in(caplog) == []
        run(towers(path))
        assert len(warnings_in(caplog)) == 1


def train_in_backward(path: Path, each: bool = False, kept: bool = False) -> None:
    """each: whether each embedding gets its optimizers, and not all at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch of its own import
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = towers(path)
    if kept:
        keep_rows(path, model, None)
    for part in (model.users, model.items) if each else (model,):
        _apply_optimizer_in_backward(torch.optim.SGD, part.parameters(), {"lr": 0.1})
    for ids in IDS[:2]:
        model(ids).backward()
    model.close()


def test_rows_that_optimizers_train_in_backward_are_told(tmp_path, caplog) -> None:
    in_process(train_in_backward, tmp_path, True)
    train_in_backward(tmp_path)
    assert len(warnings_in(caplog)) == 2  # each has an optimizer of its own
    train_in_backward(tmp_path, kept=True)
    assert warnings_in(caplog) == []


def on_ranks(world: World, path: Path) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierbed").addHandler(handler)
    logging.getLogger("tierbed").setLevel(logging.INFO)
    model = towers(path, world=world)
    list(map(scores(model), IDS[:2]))
    run_of_rank = model.users.table_handle().open_table.run_id
    model.close()
    assert len({*world.all_gather_object("runs", lambda: run_of_rank)}) == 1
    return [text for text in found if "mixes old and new parts" in text or "rows of rank 0" in text]


def test_ranks_share_the_run_and_the_first_tells(tmp_path) -> None:
    first, second = run_ranks(2, on_ranks, tmp_path)
    assert (len(first), len(second)) == (2, 0)  # a line for each embedding
    first, second = run_ranks(2, on_ranks, tmp_path)
    assert (len(first), len(second)) == (3, 0)
    assert "live rows of the last close" in first[0]
    assert "mixes old and new parts" in first[1]  # once the first of them is open


def test_each_open_and_load_logs_a_line_with_rows_step_and_source(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "tierbed")

    def line() -> str:
        (found,) = (said for one in caplog.records if (said := one.getMessage()).startswith("embedding 'users'"))
        caplog.clear()
        return found.removeprefix("embedding 'users': ")

    place = f"store folder {tmp_path / 'store' / 'users'}"
    model = towers(tmp_path)
    optimizer = optimizer_of(model)
    list(losses(model, optimizer, IDS[:2]))
    optimizer.save_snapshot("two")
    model.close()
    assert line() == f"0 rows of step 0; new, in {place}"
    rows = towers(tmp_path).users
    count = rows.size()
    assert line() == f"{count} rows of step 2; live rows of the last close of {place}"
    rows.load_snapshot("two")
    assert line() == f"{count} rows of step 2, loaded from snapshot 'two'"
    rows.close()
    in_memory = TwoTowers(options("host", None)).users
    in_memory.size()
    assert line() == "0 rows of step 0; new, in memory"
