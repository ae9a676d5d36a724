"""`save_checkpoint` and `load_checkpoint` keep a plain loop whole: rows, dense weights and what trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

import tierbed
from support.checkpoints import IDS as GRAPH_IDS
from support.checkpoints import rating, steps
from support.refusals import check_refusal
from support.stores import options
from support.together import killed_at
from support.two_towers import IDS, TwoTowers
from tierbed import load_checkpoint, save_checkpoint
from tierbed.engine.errors import GraphError, InputError, SnapshotError

KINDS = ["host", "host folder", "ssd folder"]


class Loop:
    """A model with two embeddings and all that trains it."""

    def __init__(self, kind: str, path: Path, lr: float = 0.02) -> None:
        store, *folder = kind.split()
        self.model = TwoTowers(options(store, path if folder else None, budget_mb=0.1))
        self.optimizer = tierbed.EagerOptimizer(torch.optim.Adam(self.model.parameters(), lr=lr), self.model)
        self.scheduler = ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, [self.scheduler], self.scaler

    def run(self, begin: int, end: int) -> list[float]:
        found = []
        for ids in IDS[begin:end]:
            loss = self.model(ids)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.scaler.scale(torch.ones(()))  # it has a scale from here on; rows are not scaled in a plain loop
            self.scaler.update(self.scaler.get_scale() * 1.5)
            found += [float(loss.detach()), self.scaler.get_scale()]
        return found


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow), KINDS[2]])
def test_a_resumed_loop_is_the_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    first = Loop(kind, tmp_path / "store")
    first.run(0, 5)
    extra = {"epoch": 5, "best": torch.tensor(0.5)}
    save_checkpoint(tmp_path / "saved", *first.parts(), extra=extra)
    expected = first.run(5, 10)
    assert load_checkpoint(tmp_path / "saved", *first.parts()) == extra
    assert first.run(5, 10) == expected
    first.model.close()
    torch.manual_seed(2)
    again = Loop(kind, tmp_path / "other", lr=1.0)
    assert load_checkpoint(tmp_path / "saved", *again.parts()) == extra
    assert again.run(5, 10) == expected
    save_checkpoint(tmp_path / "saved", *again.parts(), overwrite=True)
    rest = again.run(10, 12)
    load_checkpoint(tmp_path / "saved", *again.parts())
    assert again.run(10, 12) == rest


def overwrite(path: Path, background: bool, begin: Any) -> None:
    torch.manual_seed(1)
    loop = Loop("host folder", path / "store")
    loop.run(0, 2)
    save_checkpoint(path / "saved", *loop.parts(), extra={"step": 2})
    loop.run(2, 3)
    begin()
    saving = save_checkpoint(path / "saved", *loop.parts(), extra={"step": 3}, overwrite=True, background=background)
    if saving is not None:
        loop.run(3, 4)
        saving.wait()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, background: bool) -> None:
    torch.manual_seed(1)
    whole = Loop("host", tmp_path)
    expected = whole.run(0, 5)
    seen = set()
    for number in range(1, 12, 3):
        place = tmp_path / str(number)
        place.mkdir()
        killed_at(place, "rename", number, overwrite, place, background)
        left = Loop("host folder", place / "store").model
        assert (left.users.size() > 0, left.items.size() > 0) == (True, True)
        recovered = {rows.metrics()["table"]["step"] for rows in (left.users, left.items)}
        assert recovered in ({2}, {3})
        left.close()
        again = Loop("host folder", place / "new")
        step = load_checkpoint(place / "saved", *again.parts())["step"]
        seen.add(step)
        assert again.run(step, 5) == expected[2 * step :]
    assert seen == {2, 3}


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_load_that_stops_after_the_rows_is_used_by_nobody(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    first = Loop(kind, tmp_path / "store")
    first.run(0, 3)
    save_checkpoint(tmp_path / "saved", *first.parts())
    expected = first.run(3, 5)
    graph = rating(kind.split()[0], tmp_path / "graph")
    steps(graph, GRAPH_IDS[:2])
    graph.save(tmp_path / "of-graph")
    stops = RuntimeError("of a module")

    def stop(*_: Any) -> None:
        raise stops

    for model, load, use in (
        (first.model, lambda: load_checkpoint(tmp_path / "saved", *first.parts()), lambda: first.run(3, 5)),
        (graph, lambda: graph.load(tmp_path / "of-graph"), lambda: steps(graph, GRAPH_IDS[2:3])),
    ):
        hook = model.register_load_state_dict_pre_hook(stop)
        with pytest.raises(RuntimeError, match="of a module"):
            load()
        for _ in range(2):
            with pytest.raises(SnapshotError, match=r"a load stopped at checkpoint '(saved|of-graph)'"):
                use()
        hook.remove()
        load()
        use()
    load_checkpoint(tmp_path / "saved", *first.parts())
    assert first.run(3, 5) == expected


def test_gradients_that_wait_for_a_step_are_in_no_checkpoint(tmp_path: Path) -> None:
    first = Loop("host", tmp_path)
    for _ in range(2):
        first.model(IDS[0]).backward()
        with pytest.raises(GraphError, match=r"gradients of embedding 'users' wait for step\(\)"):
            save_checkpoint(tmp_path / "saved", *first.parts())
        first.optimizer.step()
        save_checkpoint(tmp_path / "saved", *first.parts(), overwrite=True)
        first.optimizer.zero_grad()


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = Loop("host", tmp_path)
    first.run(0, 3)
    model, optimizer, schedulers, _ = first.parts()
    saved, new = tmp_path / "saved", tmp_path / "new"
    save_checkpoint(saved, *first.parts())
    graph = rating("host", tmp_path / "graph")
    graph.save(tmp_path / "of-graph")
    load_checkpoint(saved, *first.parts())
    expected = first.run(3, 5)
    load_checkpoint(saved, *first.parts())
    for save, given, kind, *named in (
        (load_checkpoint, (tmp_path / "none", *first.parts()), SnapshotError, "save_checkpoint wrote"),
        (load_checkpoint, (tmp_path, *first.parts()), SnapshotError, "holds the checkpoints ['of-graph', 'saved']"),
        (load_checkpoint, (tmp_path / "of-graph", *first.parts()), SnapshotError, "call graph.load"),
        (graph.load, (saved,), SnapshotError, "save_checkpoint wrote it", "call load_checkpoint"),
        (load_checkpoint, (saved, model), SnapshotError, "1 optimizers", "has 0", "pass the saved ones"),
        (load_checkpoint, (saved, model, optimizer), SnapshotError, "1 schedules", "has 0"),
        (load_checkpoint, (saved, model, optimizer, schedulers), SnapshotError, "gradient scaler", "give scaler="),
        (load_checkpoint, (saved, model.mlp, *first.parts()[1:]), SnapshotError, "embeddings", "this model has"),
        (save_checkpoint, (saved, *first.parts()), SnapshotError, "exists", "choose another path"),
        (save_checkpoint, (new, graph), InputError, "model=Rating"),
        (save_checkpoint, (new, model, [model]), InputError, "optimizers: got TwoTowers"),
        (save_checkpoint, (new, model, [optimizer, optimizer.optimizer]), InputError, "one is given twice"),
        (save_checkpoint, (new, model, optimizer, [], None, 5), InputError, "extra=5"),
        (save_checkpoint, (new, model, optimizer, [3]), InputError, "schedulers: got int"),
        (save_checkpoint, (new, model, optimizer, [], 7), InputError, "scaler=7"),
    ):
        check_refusal((lambda s=save, g=given: s(*g), kind, *named))
    assert first.run(3, 5) == expected


class OwnAdam(torch.optim.Adam):
    """A user's optimizer, with a state of its own."""


class OwnSchedule(LRScheduler):
    """A user's schedule, whose state changes types."""

    def __init__(self, optimizer: Any) -> None:
        self.phases, self.phase = ["warm", "cold"], "first"
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, *unused: Any) -> None:
        super().step()
        self.phases, self.phase = [], None  # type: ignore[assignment]


def test_an_optimizer_and_a_schedule_of_the_user_may_change_types_and_one_may_be_new(tmp_path: Path) -> None:
    first, second = Loop("host", tmp_path), Loop("host", tmp_path)
    own = [OwnAdam(loop.model.mlp.parameters()) for loop in (first, second)]
    own[0].state["steps"] = 3  # of no parameter
    save_checkpoint(tmp_path / "plain", first.model, [first.optimizer, own[0]])
    first.scheduler, second.scheduler = OwnSchedule(first.optimizer), OwnSchedule(second.optimizer)
    first.run(0, 3)
    save_checkpoint(tmp_path / "own", first.model, [first.optimizer, own[0]], first.scheduler)
    load_checkpoint(tmp_path / "own", second.model, [second.optimizer, own[1]], second.scheduler)
    assert (second.scheduler.phase, own[1].state["steps"]) == (None, 3)
    load_checkpoint(tmp_path / "plain", second.model, [second.optimizer, own[1]])
    second.run(0, 3)
