"""Rows that catch up equal dense Adam and AdamW, for every reader, however rarely they are touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.embeddings import DIM, attach, contents, make
from support.rule_references import PastRates
from support.stores import STORES, options
from tierbed import EagerOptimizer, Graph, MultiTableEmbedding
from tierbed.engine.errors import OptimizerError
from tierbed.engine.optim import CatchUpAdam, CatchUpAdamW
from tierbed.engine.optim.catch_up_adam import CATCH_UP_ADAM, MAX_MISSED, count_terms
from tierbed.engine.optim.past_rates import MAX_KNOTS, append_past_rates, are_past_rates_valid
from tierbed.engine.optim.row_optimizer import row_optimizer
from tierbed.engine.options.lookup import Lookup

pytestmark = pytest.mark.optimizer

ROWS = 24
IDS = torch.arange(ROWS)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids, the later ones ever more rarely and the last three never, and gradients."""
    generator = torch.Generator().manual_seed(3)
    for step in range(1, steps + 1):
        ids = IDS[: ROWS - 3][step % (1 + IDS[: ROWS - 3] ** 2) == 0].repeat_interleave(2)
        grads = torch.randn((len(ids), DIM), generator=generator) * 10.0 ** -(step % 3)
        yield ids, grads


THEIRS: dict[str, Any] = {  # torch's of each kind in OPTIMIZERS
    "catch-up": lambda p, **more: torch.optim.Adam(p, lr=0.01, **more),
    "catch-up l2": lambda p, **more: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, **more),
    "catch-up w": lambda p, **more: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **more),
}
kinds = pytest.mark.parametrize("kind", THEIRS)


def trained(embedding: MultiTableEmbedding, steps: int, kind: str, schedule: Any) -> list[Tensor]:
    """What each step's lookup saw."""
    optimizer = attach(embedding, kind)
    seen, schedule = [], schedule(optimizer)
    for ids, grads in batches(steps):
        pinned = embedding.pin([Lookup(ids)])
        seen.append(pinned.gather(0))
        pinned.update([grads])
        optimizer.step()  # or torch warns
        schedule.step()
    return seen


# tolerances: Adam's steps are about lr = 1e-2, and float32 rounds weights near 1 by 6e-8 a step
@pytest.mark.parametrize(
    ("kind", "betas", "steps", "tolerance"),
    [
        ("catch-up", (0.9, 0.999), 500, 2e-7),
        pytest.param("catch-up", (0.5, 0.8), 500, 2e-7, marks=pytest.mark.slow),
        pytest.param("catch-up", (0.9, 0.8), 500, 2e-6, marks=pytest.mark.slow),
        pytest.param("catch-up", (0.0, 0.99), 500, 2e-7, marks=pytest.mark.slow),
        *[(kind, (0.9, 0.999), 80, 5e-7) for kind in THEIRS],
    ],
)
def test_rows_and_lookups_equal_dense_adam_at_each_step(kind: str, betas: Any, steps: int, tolerance: float) -> None:
    embedding = make(options("device"), tables=1)
    dense = torch.nn.Parameter(embedding.get(IDS))
    attach(embedding, kind, betas=betas)
    reference = THEIRS[kind]([dense], betas=betas)
    for step, (ids, grads) in enumerate(batches(steps), 1):
        pinned = embedding.pin([Lookup(ids)])
        torch.testing.assert_close(pinned.gather(0), dense.detach()[ids], rtol=0, atol=tolerance)
        pinned.update([grads])
        dense.grad = torch.zeros_like(dense).index_add_(0, ids, grads)
        reference.step()
        if step == 70 and steps == 80:  # a put lets the moments catch up and sets the row
            embedding.put([6, ROWS - 1], torch.ones(2, DIM))
            dense.data[[6, ROWS - 1]] = 1.0
        torch.testing.assert_close(embedding.get(IDS), dense.detach(), rtol=0, atol=tolerance)


SCHEDULES = {
    "constant": None,
    "stepped": lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.5),
    "warmed up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1e-3, total_iters=30),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=90, cycle_momentum=False),
}


class Trained(Graph):
    def __init__(self, rows: MultiTableEmbedding, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        super().__init__()
        self.rows = rows
        self.add_optimizer(optimizer, lr_sch=schedule)

    def build(self, ids: Tensor, wanted: Tensor) -> Tensor:
        loss = (self.rows(ids) - wanted).square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("way", ["loop", "graph"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("kind", [CatchUpAdam, CatchUpAdamW])
@pytest.mark.pairs
@pytest.mark.rotated("way")
def test_loops_and_graphs_train_what_dense_torch_trains(kind: Any, decay: float, schedule: str, way: str) -> None:
    rows = make(options("host"), tables=1)
    dense = torch.nn.Embedding.from_pretrained(rows.get(IDS).clone(), freeze=False)
    plain = torch.optim.Adam if kind is CatchUpAdam else torch.optim.AdamW
    optimizer = kind(rows.parameters(), lr=0.01, weight_decay=decay)
    reference = plain(dense.parameters(), lr=0.01, weight_decay=decay)
    ours, theirs = ((make_schedule := SCHEDULES[schedule]) and make_schedule(o) for o in (optimizer, reference))
    if way == "graph":
        graph = Trained(rows, optimizer, ours)
    else:
        eager = EagerOptimizer(optimizer)
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        ids = torch.randint(0, ROWS - 3, (4,), generator=generator)
        wanted = torch.randn((4, DIM), generator=generator)
        reference.zero_grad()
        expected = (dense(ids) - wanted).square().sum()
        expected.backward()
        if way == "graph":
            loss = graph(ids, wanted)
        else:
            eager.zero_grad()
            loss = (rows(ids) - wanted).square().sum()
            loss.backward()
            eager.step()
            if ours is not None:
                ours.step()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=1e-6)
        reference.step()
        if theirs is not None:
            theirs.step()
        torch.testing.assert_close(rows.get(IDS), dense.weight.detach(), rtol=0, atol=1e-6)


def past(steps: range, rate: Callable[[int], float], before: list[float]) -> list[float]:
    """The numbers of the rule after these steps."""
    numbers = [0.0] * (len(CATCH_UP_ADAM.all_hyperparams) + 3)
    for step in steps:
        numbers[CATCH_UP_ADAM.all_hyperparams.index("lr")] = rate(step)
        before = append_past_rates(CATCH_UP_ADAM, list(numbers), before, step)
    return before


def test_more_learning_rates_than_are_kept_are_taken_from_lines_between_them() -> None:
    def rate(step: int) -> float:
        return 1e-3 * (min(step, 100) / 100 if step <= 600 else 0.5 * (1 + np.cos((step - 600) / 900 * np.pi)))

    numbers = past(range(1, 1501), rate, [])
    kept, rates = numbers[len(CATCH_UP_ADAM.all_hyperparams) + 3 :], PastRates(CATCH_UP_ADAM, numbers)
    assert len(rates.knots) <= MAX_KNOTS
    assert are_past_rates_valid(kept, 1500)
    assert not are_past_rates_valid(kept[:-1], 1500)
    assert not are_past_rates_valid(kept, 1499)
    assert max(abs(rates.at(step) - rate(step)) for step in range(1400, 1501)) < 1e-18
    assert max(abs(rates.at(step) - rate(step)) for step in range(1, 1501)) < 1e-7


def test_learning_rates_of_steps_that_a_gpu_has_undone_are_forgotten() -> None:
    done = past(range(1, 11), lambda step: 0.1 if step < 5 else 0.2 if step < 9 else 0.3, [])
    undone = past(range(6, 7), lambda _: 0.3, done)
    assert are_past_rates_valid(undone[len(CATCH_UP_ADAM.all_hyperparams) + 3 :], 6)
    rates = PastRates(CATCH_UP_ADAM, past(range(7, 12), lambda _: 0.3, undone))
    assert [rates.at(step) for step in (4, 5, 7, 8)] == [0.1, 0.2, 0.3, 0.3]


@pytest.mark.parametrize(
    ("schedule", "off"),
    [
        (lambda at: 0.5 + 0.5 * np.cos(at / 1000 * np.pi), 0),
        (lambda at: 0.5 ** (at // 100), 0),
        (lambda at: 0.5 + 0.5 * np.cos(at % 7 / 7 * np.pi), 0.5),
        (lambda at: 0.5 + 0.5 * np.cos(at % 100 / 100 * np.pi), 1e-3),
    ],
    ids=["cosine", "by the epoch", "restarts", "rare restarts"],
)
def test_a_schedule_whose_rates_cannot_be_kept_is_named(schedule: Any, off: float, caplog: Any) -> None:
    optimizer = CatchUpAdam([torch.zeros(1)], lr=1.0)
    rows = row_optimizer(optimizer, optimizer.param_groups[0])
    numbers: list[float] = []
    for at in range(1000):
        optimizer.param_groups[0]["lr"] = float(schedule(at))
        numbers = rows.compute_hyperparams(at + 1, previous=numbers)
    rates = PastRates(CATCH_UP_ADAM, numbers)
    worst = max(abs(rates.at(at + 1) - schedule(at)) for at in range(1000))
    logged = [one.args[1] for one in caplog.records]
    assert bool(logged) == (worst > 1e-3) == bool(off)
    assert not off or (worst > off and max(logged) > worst / 20 and len(logged) < 4)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (torch.optim.Adam, {}, "use tierbed.optim.CatchUpAdam"),
        (torch.optim.AdamW, {}, "use tierbed.optim.CatchUpAdamW"),
        (torch.optim.RMSprop, {}, "Adagrad"),
        (torch.optim.SGD, {"momentum": 0.9}, "without momentum"),
        (torch.optim.SGD, {"weight_decay": 0.1}, "penalty"),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, "penalty"),
        (torch.optim.Adagrad, {}, ""),
        (torch.optim.SGD, {}, ""),
        (CatchUpAdam, {"weight_decay": 0.1}, ""),
        (CatchUpAdamW, {}, ""),
    ],
)
def test_the_log_names_what_is_not_lazy(kind: Any, settings: dict[str, float], named: str, caplog: Any) -> None:
    model = torch.nn.ModuleList([make(options("host"), name=f"lazy{i}", tables=1) for i in range(2)])
    EagerOptimizer(kind(model.parameters(), lr=0.1, **settings), model)
    lines = [record.getMessage() for record in caplog.records if "lazy" in record.getMessage()]
    assert [named in line and f"lazy {kind.__name__}:" in line for line in lines] == [True] * bool(named)


@pytest.mark.parametrize(("kind", "is_warned"), [(CatchUpAdam, True), (torch.optim.Adam, False)])
def test_the_log_says_once_that_missed_steps_have_other_betas(kind: Any, is_warned: bool, caplog: Any) -> None:
    rows = make(options("host"), tables=1)
    optimizer = EagerOptimizer(kind(rows.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=10)
    for _ in range(3):
        rows(torch.tensor([1])).sum().backward()
        optimizer.step()
        schedule.step()
    assert sum("cycle_momentum=False" in record.getMessage() for record in caplog.records) == is_warned


def test_steps_before_the_optimizer_changed_nothing() -> None:
    rows = make(options("device"), tables=1, padding_idx=0)
    attach(rows, "sgd")
    for _ in range(50):
        rows.pin([Lookup(IDS[:1])]).update([torch.zeros(1, DIM)])
    before = rows.get(IDS)  # the id 0 is padding: no row has the state of SGD
    attach(rows, "catch-up w", lr=0.1, weight_decay=0.5)
    rows.pin([Lookup(IDS[1:2])]).update([torch.zeros(1, DIM)])
    torch.testing.assert_close(rows.get(IDS[1:]), before[1:] * 0.95, rtol=0, atol=1e-7)


def check_readers(embedding: MultiTableEmbedding, rows: Tensor) -> None:
    assert torch.equal(embedding.get(IDS), rows)
    with torch.no_grad():
        assert torch.equal(embedding(IDS), rows)
    assert torch.equal(torch.stack([row for _, _, row in embedding]), rows[[key for _, key, _ in embedding]])


@kinds
@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.rotated("store")
def test_every_reader_sees_the_same_rows_and_writes_none(tmp_path: Path, store: str, kind: str) -> None:
    with make(options(store, tmp_path), tables=1) as embedding:
        trained(embedding, 60, kind, SCHEDULES["cosine"])
        rows, before = embedding.get(IDS), contents(embedding).tobytes()
        check_readers(embedding, rows)
        assert contents(embedding).tobytes() == before
        embedding.save_snapshot("sixty")
    with make(options(store, tmp_path), tables=1) as reader:  # without the optimizer
        check_readers(reader, rows)
    with make(options(store, tmp_path), tables=1) as resumed:
        resumed.load_snapshot("sixty")
        check_readers(resumed, rows)


def test_a_wrong_setting_of_the_group_leaves_no_batch_pinned() -> None:
    embedding = make(options("cached_host"), tables=1)
    optimizer = attach(embedding, "catch-up")
    embedding.pin([Lookup(IDS)]).update([torch.ones(ROWS, DIM)])
    embedding.pin([Lookup(IDS[:1])]).update([torch.ones(1, DIM)])
    optimizer.param_groups[0]["lr"] = -1.0
    for call in (lambda: embedding.pin([Lookup(IDS)]), lambda: embedding.put(IDS, torch.ones(ROWS, DIM))) * 2:
        with pytest.raises(OptimizerError, match=r"lr=-1\.0"):
            call()
    optimizer.param_groups[0]["lr"] = 0.01
    embedding.put(IDS, torch.ones(ROWS, DIM))
    assert (embedding.pin([Lookup(IDS)]).gather(0) == 1).all()


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
def test_numbers_of_the_rule_before_are_not_taken_for_those_of_catch_up_adam(tmp_path: Path, store: str) -> None:
    for path in (tmp_path, None) if store != "ssd" else (tmp_path,):
        with make(options(store, path), tables=1, padding_idx=0) as embedding:
            attach(embedding, "sgd")
            embedding.pin([Lookup(IDS[:1])]).update([torch.ones(1, DIM)])
            attach(embedding, "catch-up")
            embedding.put([3], torch.ones(1, DIM))
            description = embedding.table_handle().table.describe()
            assert (description["optimizer"], description["hyper"], description["step"]) == ("catch_up_adam", [], 1)
    with make(options(store, tmp_path), tables=1, padding_idx=0) as reader:
        assert (reader.get(IDS[3:4]) == 1).all()
        assert [row.tolist() for _, _, row in reader] == [[1.0] * DIM]


@kinds
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("threads", [2, 16])
@pytest.mark.rotated("threads")
def test_rows_do_not_depend_on_the_store_or_threads(
    tmp_path: Path, native_threads: Callable[[int], None], kind: str, store: str, threads: int
) -> None:
    native_threads(1)
    first = make(options("device"), tables=1)
    expected = trained(first, 30, kind, SCHEDULES["stepped"])
    native_threads(threads)
    with make(options(store, tmp_path), tables=1) as other:
        seen = trained(other, 30, kind, SCHEDULES["stepped"])
        assert all(map(torch.equal, seen, expected))
        assert contents(other).tobytes() == contents(first).tobytes()


@pytest.mark.parametrize(
    ("betas", "count"), [((0.9, 0.999), 207), ((0.0, 0.9), 1), ((0.9, 0.8), MAX_MISSED), ((0.5, 0.0), MAX_MISSED)]
)
def test_missed_steps_are_taken_singly_down_to_the_rounding(betas: tuple[float, float], count: int) -> None:
    assert count_terms(*betas) == count
    if count < MAX_MISSED:
        ratio = betas[0] / np.sqrt(betas[1])
        left = ratio ** np.arange(count, 100 * count + 100) * np.sqrt(1 + np.arange(count, 100 * count + 100))
        assert left.sum() <= 2**-24
