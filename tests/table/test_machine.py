"""Random sequences of all that users do to a table, on every stack, against arrays of rows: see `table_model`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from support.embeddings import DIM, contents, make, train
from support.optimizers import OPTIMIZERS
from support.small_snapshots import files
from support.stores import ONE_SET_MB, STORES, options
from support.table_model import KEYS, NUMBERS, Full, Model, N, Places, Policy
from tierbed import CapacityError
from tierbed.engine.options.lookup import Lookup

BUDGETS = [ONE_SET_MB, 3 * ONE_SET_MB, 1.0]  # a set or two, a few, and one that holds every row


def places_of(count: int, first: int, stride: int) -> Places:
    return (first + stride * np.arange(count)) % N


capacities = st.sampled_from([1, 40, 200, N - 5])
admissions = st.sampled_from([None, None, 2, 3, 0.5])
policies = st.one_of(
    st.just(Policy()),
    st.builds(Policy, capacity=capacities),
    st.builds(Policy, st.none(), st.just("none"), admissions, st.sampled_from([None, 1, 5, 40])),
    st.builds(
        Policy, capacities, st.sampled_from(["lru", "lfu", "distance_lfu"]), admissions, st.sampled_from([None, 5, 40])
    ),
    st.builds(Policy, capacities, st.just("ttl"), admissions, st.sampled_from([1, 5])),
)
batches = st.builds(places_of, st.integers(0, 150), st.integers(0, N - 1), st.integers(0, 7))


def ids_of(places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(KEYS[places].view(np.int64)), torch.from_numpy(NUMBERS[places].astype(np.int64))


class Machine(RuleBasedStateMachine):
    """One embedding and its model. Rows are compared where a lookup sees them; a scan, which flushes, is a rule."""

    store: str  # the stack of the beginning

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tierbed-machine-"))
        self.snapshots: list[Model] = []
        self.announced_batches: list[Places] = []  # announced and not yet trained

    @initialize(
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        budget=st.sampled_from(BUDGETS[:2]),
        policy=policies,
    )
    def begin(self, optimizer: str, budget: float, policy: Policy) -> None:
        self.optimizer = optimizer
        self.open(self.store, budget, policy)
        assert self.embedding.row_optimizer is not None
        self.model = Model(self.embedding.row_optimizer)
        self.model.open(policy)

    def open(self, store: str, budget: float, policy: Policy) -> None:
        self.policy = policy
        self.embedding = make(options(store, self.path, budget, **asdict(policy)), self.optimizer)

    def teardown(self) -> None:
        with contextlib.ExitStack() as end:
            end.callback(shutil.rmtree, self.path)
            if hasattr(self, "model"):
                end.callback(self.embedding.close)
                self.scan()

    def admit(self, places: Places, training: bool, write: Callable[[], Any]) -> tuple[NDArray[np.bool_], Any] | None:
        """Let the embedding write where the model has room. Returns which rows are refused, and what it returned."""
        try:
            refused = self.model.admit(places, training)
        except Full:
            with pytest.raises(CapacityError):
                write()
            return None
        return refused, write()

    @rule(places=batches, seed=st.integers(0, 9))
    def train(self, places: Places, seed: int) -> None:
        grads = np.random.default_rng(seed).standard_normal((len(places), DIM), np.float32)
        done = self.admit(places, True, lambda: train(self.embedding, *ids_of(places), torch.from_numpy(grads)))
        if done is not None:
            refused, seen = done
            assert seen.numpy().tobytes() == self.model.read(places).tobytes()
            self.model.train(places, grads, refused)

    @rule(steps=st.integers(10, 50))
    def rest(self, steps: int) -> None:
        """Rows grow old."""
        for _ in range(steps):
            self.train(np.empty(0, np.int64), 0)

    @rule(announced_batches=st.lists(batches, min_size=1, max_size=4))
    def announce(self, announced_batches: list[Places]) -> None:
        for places in announced_batches:
            self.embedding.prefetch(*ids_of(places))
        self.announced_batches += announced_batches

    @precondition(lambda self: self.announced_batches)
    @rule(skip=st.integers(0, 1), seed=st.integers(0, 9))
    def train_announced(self, skip: int, seed: int) -> None:
        places = self.announced_batches[min(skip, len(self.announced_batches) - 1)]
        self.announced_batches = self.announced_batches[skip + 1 :]
        self.train(places, seed)

    @rule(places=batches, value=st.integers(-3, 3))
    def put(self, places: Places, value: int) -> None:
        rows = (value + np.arange(len(places) * DIM, dtype=np.float32)).reshape(-1, DIM)
        ids, tables = ids_of(places)
        if self.admit(places, False, lambda: self.embedding.put(ids, torch.from_numpy(rows), tables)):
            self.model.put(places, rows)

    @rule(places=batches)
    def delete(self, places: Places) -> None:
        assert self.embedding.delete(*ids_of(places)) == self.model.forget(places)

    @rule(places=batches)
    def fail(self, places: Places) -> None:
        """A step that does not come to its update; what made room for it is gone."""
        ids, tables = ids_of(places)
        self.admit(places, True, lambda: self.embedding.pin([Lookup(ids, tables)]))

    @rule(places=batches)
    def evaluate(self, places: Places) -> None:
        def look() -> bool:
            """Whether no file changed meanwhile."""
            before = files(self.path)
            assert self.embedding.get(ids, tables).numpy().tobytes() == expected
            with torch.no_grad():
                assert self.embedding(ids, tables).numpy().tobytes() == expected
                self.embedding(torch.arange(-500, -400), torch.tensor(1))
            return files(self.path) == before

        ids, tables = ids_of(places)
        expected = self.model.read(places).tobytes()
        while not look():
            time.sleep(0.01)  # RocksDB may be busy in the background

    @rule()
    def scan(self) -> None:
        rows = contents(self.embedding)
        assert rows.tobytes() == self.model.contents().tobytes()

    @rule()
    def save(self) -> None:
        self.embedding.save_snapshot(f"s{len(self.snapshots)}")
        self.snapshots.append(self.model.copy())

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.snapshots) - 1))
        self.embedding.load_snapshot(f"s{number}")
        self.model = self.snapshots[number].copy()
        self.forget_run()

    @rule(store=st.sampled_from(STORES), budget=st.sampled_from(BUDGETS), policy=policies)
    def reopen(self, store: str, budget: float, policy: Policy) -> None:
        self.embedding.close()
        self.open(store, budget, policy)
        self.forget_run()

    def forget_run(self) -> None:
        self.announced_batches = []
        self.model.open(self.policy)

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "model"):
            return
        metrics = self.embedding.metrics()
        assert metrics["table"]["rows"] == self.embedding.size() == self.model.rows
        assert metrics["table"]["step"] == self.model.step
        for tier in metrics.values():
            if "capacity" in tier:
                assert tier["resident_rows"] <= tier["capacity"]


def trained_with_reads(store: str, path: Path, reads: int) -> list[dict[str, float]]:
    """What each step counted in every cache, with that many evaluations between two steps."""
    counted = []
    names = ("hits", "misses", "insertions", "evictions_clean", "evictions_dirty", "overflows")
    with make(options(store, path), "adam") as embedding:
        random = np.random.default_rng(1)

        def counts() -> dict[str, float]:
            embedding.table_handle().table.flush()  # what goes down in the background is down
            metrics = embedding.metrics()
            caches = [tier for tier in ("device", "host") if tier in metrics]
            return {f"{tier}.{name}": metrics[tier].get(name, 0) for tier in caches for name in names}

        for step in range(12):
            before = counts()
            train(embedding, *ids_of((step * 20 + random.zipf(1.3, 40)) % N), grad=1.0)
            counted.append({name: count - before[name] for name, count in counts().items()})
            for number in range(reads):
                embedding.get(*ids_of((step * 31 + number * 7 + np.arange(20)) % N))
    return counted


@pytest.mark.parametrize("store", ["cached_host", "ssd", "ssd_host"])
def test_evaluation_leaves_no_trace_in_what_is_kept_and_evicted(tmp_path: Path, store: str) -> None:
    quiet = trained_with_reads(store, tmp_path / "quiet", 0)
    assert sum(step["device.evictions_clean"] + step["device.overflows"] for step in quiet) > 50
    assert trained_with_reads(store, tmp_path / "read", 5) == quiet


def drive(store: str, **how: Any) -> None:
    machine = type("Machine", (Machine,), {"store": store})
    run_state_machine_as_test(machine, settings=settings(deadline=None, **how))


@pytest.mark.all_stores
@pytest.mark.parametrize("store", STORES)
def test_every_sequence_leaves_the_rows_that_the_formula_gives(store: str) -> None:
    drive(store, max_examples=3, stateful_step_count=20)


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_long_sequences_leave_the_rows_that_the_formula_gives(store: str) -> None:
    drive(store, max_examples=100, stateful_step_count=60)
