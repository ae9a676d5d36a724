"""Rows of an earlier run and a fresh dense part cause a warning, once, and nothing else does."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.ranks import run_ranks
from support.stores import options
from support.two_towers import IDS, TwoTowers, losses, optimizer_of
from tierbed import Graph, load_checkpoint, save_checkpoint
from tierbed.distributed import World


class Scores(Graph):
    def __init__(self, towers: TwoTowers) -> None:
        super().__init__()
        self.towers = towers
        self.add_optimizer(torch.optim.Adam(towers.parameters(), lr=0.02))

    def build(self, ids: Tensor) -> Tensor:
        loss = self.towers(ids)
        loss.backward()
        return loss.detach()


def towers(path: Path, mode: str = "resume", **more: Any) -> TwoTowers:
    return TwoTowers(options("host", path / "store", open=mode, state_dict_snapshots=True), **more)


def run(model: TwoTowers, steps: int = 2) -> None:
    """A run of a plain loop, which closes its rows."""
    list(losses(model, optimizer_of(model), IDS[:steps]))
    model.close()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "half a model" in record.getMessage()]
    caplog.clear()
    return found


def test_a_fresh_dense_part_on_old_rows_is_told_once_with_both_steps_and_remedies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(towers(tmp_path))
    assert warnings_in(caplog) == []
    for make in (lambda model: losses(model, optimizer_of(model), IDS[:3]), lambda model: map(Scores(model), IDS[:3])):
        model = towers(tmp_path)
        list(make(model))
        model.close()
        (warning,) = warnings_in(caplog)
        for part in ("resumes rows of step", "begins at step 0", "graph.load", 'open="fresh"', 'open="pretrained"'):
            assert part in warning


def dense_of(path: Path) -> Any:
    return torch.load(path / "dense.pt")


def load_dense_part(path: Path, model: TwoTowers, part: Any) -> None:
    model.mlp.load_state_dict(torch.load(path / "dense.pt"))


def load_model(path: Path, model: TwoTowers, part: Any) -> None:
    model.load_state_dict(torch.load(path / "model.pt"))


def load_whole(path: Path, model: TwoTowers, part: Any) -> None:
    part.load(path / "graph") if isinstance(part, Graph) else load_checkpoint(path / "loop", model, part)


def load_rows(path: Path, model: TwoTowers, part: Any) -> None:
    for embedding in (model.users, model.items):
        embedding.load_snapshot("two")


def load_dense_rows(path: Path, model: TwoTowers, part: Any) -> None:
    for embedding, dim in ((model.users, 4), (model.items, 6)):
        embedding.load_dense({0: torch.ones(3, dim)})


def keep_rows(path: Path, model: TwoTowers, part: Any) -> None:
    for embedding in (model.users, model.items):
        embedding.keep_rows()


def load_optimizer(path: Path, model: TwoTowers, part: Any) -> None:
    if isinstance(part, Graph):
        load_dense_part(path, model, part)
    else:
        part.load_state_dict(torch.load(path / "optimizer.pt"))


LOADS = [load_dense_part, load_model, load_whole, load_rows, load_dense_rows, keep_rows, load_optimizer]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
@pytest.mark.parametrize("make", [Scores, optimizer_of])
def test_what_was_loaded_or_chosen_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Callable[..., None], make: Callable[..., Any]
) -> None:
    first = towers(tmp_path)
    optimizer, graph = optimizer_of(first), Scores(TwoTowers(options("host", tmp_path / "of-graph")))
    list(losses(first, optimizer, IDS[:2]))
    graph(IDS[0])
    graph.save(tmp_path / "graph")
    save_checkpoint(tmp_path / "loop", first, optimizer)
    optimizer.save_snapshot("two")
    for name, part in (("dense", first.mlp), ("model", first), ("optimizer", optimizer)):
        torch.save(part.state_dict(), tmp_path / f"{name}.pt")
    first.close()
    again = towers(tmp_path)
    part = make(again)
    load(tmp_path, again, part)
    step = part if isinstance(part, Graph) else lambda ids: list(losses(again, part, ids[None]))
    step(IDS[0])
    again.close()
    assert warnings_in(caplog) == []


def test_the_dense_part_of_this_process_belongs_to_rows_that_are_opened_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for make in (Scores, optimizer_of):
        path = tmp_path / make.__name__
        first, again = towers(path), towers(path)
        again.mlp = first.mlp
        run(first)
        step: Any = make(again)
        list(losses(again, step, IDS[:1])) if make is optimizer_of else step(IDS[0])
        again.close()
        assert warnings_in(caplog) == []
        stranger = towers(path)
        run(stranger)
        assert len(warnings_in(caplog)) == 1


def test_rows_without_a_dense_part_new_rows_and_intended_ones_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(towers(tmp_path))
    for mode in ("pretrained", "fresh"):
        run(towers(tmp_path, mode))
    model = towers(tmp_path)
    optimizer = torch.optim.Adam(model.users.parameters(), lr=0.1)

    class Alone(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.users = model.users
            self.add_optimizer(optimizer)

        def build(self, ids: Tensor) -> None:
            self.users(ids).sum().backward()

    Alone()(IDS[0, 0])
    model.close()
    assert warnings_in(caplog) == []


def apply_in_backward(*arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch of its own import
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(*arguments)


def test_rows_that_optimizers_train_in_backward_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(model: TwoTowers) -> None:
        apply_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        for ids in IDS[:2]:
            model(ids).backward()
        model.close()

    run_ranks(1, first_run, tmp_path)
    train(towers(tmp_path))
    assert len(warnings_in(caplog)) == 2  # each has an optimizer of its own
    model = towers(tmp_path)
    model.users.keep_rows()
    model.items.keep_rows()
    train(model)
    assert warnings_in(caplog) == []


def first_run(world: World, path: Path) -> None:
    model = towers(path)
    for embedding in (model.users, model.items):
        apply_in_backward(torch.optim.SGD, embedding.parameters(), {"lr": 0.1})
    for ids in IDS[:2]:
        model(ids).backward()
    model.close()


def on_ranks(world: World, path: Path) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierbed").addHandler(handler)
    logging.getLogger("tierbed").setLevel(logging.INFO)
    model = towers(path, world=world)
    list(map(Scores(model), IDS[:2]))
    runs = [one.table_handle().local_table.run for one in (model.users, model.items)]
    model.close()
    assert len({*world.all_gather_object("runs", lambda: runs[0])}) == 1
    return [text for text in found if "half a model" in text or "rows of rank 0" in text]


def test_ranks_share_the_run_and_the_first_tells(tmp_path: Path) -> None:
    first, second = run_ranks(2, on_ranks, tmp_path)
    assert (len(first), len(second)) == (2, 0)  # a line for each embedding
    first, second = run_ranks(2, on_ranks, tmp_path)
    assert (len(first), len(second)) == (3, 0)
    assert "live rows of the last close" in first[0]
    assert "half a model" in first[1]  # once the first of them is open


def test_each_open_and_load_logs_a_line_with_rows_step_and_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierbed")

    def lines() -> list[str]:
        found = [
            record.getMessage() for record in caplog.records if record.getMessage().startswith("embedding 'users'")
        ]
        caplog.clear()
        return found

    model = towers(tmp_path)
    optimizer = optimizer_of(model)
    list(losses(model, optimizer, IDS[:2]))
    optimizer.save_snapshot("two")
    model.close()
    place = f"store folder {tmp_path / 'store' / 'users'}"
    assert lines() == [f"embedding 'users': 0 rows of step 0; new, in {place}"]
    rows = towers(tmp_path).users
    count = rows.size()
    assert lines() == [f"embedding 'users': {count} rows of step 2; live rows of the last close of {place}"]
    rows.load_snapshot("two")
    assert lines() == [f"embedding 'users': {count} rows of step 2, loaded from snapshot 'two'"]
    rows.close()
    in_memory = TwoTowers(options("host", None)).users
    in_memory.size()
    assert lines() == ["embedding 'users': 0 rows of step 0; new, in memory"]


def test_a_lazy_or_partly_loaded_dense_part_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(towers(tmp_path))
    model = towers(tmp_path)
    model.mlp = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 1))
    optimizer = optimizer_of(model)
    model.mlp[0].load_state_dict(nn.Linear(10, 8).state_dict())
    list(losses(model, optimizer, IDS[:1]))
    model.close()
    (warning,) = warnings_in(caplog)
    assert "(2 of its 4 parameters)" in warning
