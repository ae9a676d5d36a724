"""A plain loop over ranks trains rows by the mean of all ranks' losses, and what one rank raises is raised on all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.optimizers import Stumbling
from support.ranks import fails, on_ranks, outcome, run_kept
from tierbed import EagerOptimizer, InputError, MultiTableEmbedding, OptimizerError, World, make_host_mem_store_options
from tierbed.distributed.sharded_table import ShardedBatch

STEPS, DIM = 6, 4
KEYS = torch.arange(40)
SOME = KEYS[:8]


def embedding(name: str, world: World | None, dim: int = DIM, path: Path | None = None) -> MultiTableEmbedding:
    store = make_host_mem_store_options(persistent_path=path)
    return MultiTableEmbedding(name, dim, torch.float32, torch.int64, None, store, world=world)


class Model(nn.Module):
    def __init__(self, world: World | None, wrapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.unused = embedding("rows", world), embedding("unused", world)
        mlp = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 1))
        self.mlp = DistributedDataParallel(mlp) if wrapped else mlp

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.rows(ids)).square().mean()
        return out

    def state(self) -> list[Tensor]:
        """All rows, the steps of both embeddings, and dense parameters."""
        self.unused.get(KEYS)
        steps = torch.tensor([rows.metrics()["table"]["step"] for rows in (self.rows, self.unused)])
        return [self.rows.get(KEYS), steps, *(parameter.detach().clone() for parameter in self.mlp.parameters())]


def trained(model: Model) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=1e-3), model)


def ids_of(step: int, rank: int) -> Tensor:
    """Distinct ids, of which ranks share some; none on rank 1 in step 3."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randperm(len(KEYS), generator=random)[: 0 if (step, rank) == (3, 1) else 12]


@on_ranks(2, run_kept)
def test_rows_and_dense_parameters_are_those_of_one_process_with_the_mean_loss(world: World) -> None:
    made, begin = [], ShardedBatch.__init__

    def noted(batch: ShardedBatch, *arguments: Any) -> None:
        begin(batch, *arguments)
        made.append(ref(batch))

    ShardedBatch.__init__ = noted  # type: ignore[method-assign]  # this process ends with the test
    model = Model(world, wrapped=True)
    optimizer = trained(model)
    for step in range(STEPS):
        ids = ids_of(step, world.rank)
        loss = model(ids)
        if len(ids):
            loss.backward()
        else:
            (0 * sum(parameter.sum() for parameter in model.mlp.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    gc.collect()
    assert len(made) >= STEPS
    assert not any(batch() for batch in made), "batches of steps are still in memory"
    assert all(map(torch.equal, model.state(), of_one_process().state()))


def of_one_process() -> Model:
    model = Model(None)
    optimizer = trained(model)
    for step in range(STEPS):
        for rank in range(2):
            ids = ids_of(step, rank)
            if len(ids):
                (model(ids) / 2).backward()  # a half is exact, so that the sum of halves is half the sum
        optimizer.step()
        optimizer.zero_grad()
    return model


@on_ranks(2, run_kept)
def test_a_mistake_on_one_rank_is_raised_on_all_and_training_goes_on(world: World) -> None:
    model = Model(world)
    optimizer = trained(model)
    before = model.rows.get(KEYS)
    out = model.rows(ids_of(0, world.rank))
    grad = torch.ones_like(out)
    out.backward(grad)
    if world.rank == 1:
        grad += 1
    with pytest.raises(InputError, match=r"^rank 1: gradient of embedding 'rows': it was changed in place"):
        optimizer.step()
    assert torch.equal(model.rows.get(KEYS), before)
    optimizer.zero_grad()
    model(ids_of(1, world.rank)).backward()
    optimizer.step()
    assert not torch.equal(model.rows.get(KEYS), before)


@on_ranks(2)
def test_a_module_around_rows_several_worlds_and_clipping_by_one_norm_are_refused(world: World) -> None:
    model = Model(world)
    around = DistributedDataParallel(model)
    optimizer = trained(model)
    said = fails(lambda: EagerOptimizer(torch.optim.Adagrad(around.parameters()), around), OptimizerError)
    assert "embedding 'rows' exchanges its rows by a World, so it must not be in the module, a Distributed" in said
    with pytest.raises(OptimizerError, match=r"clip_grad_norm_ cannot clip rows that ranks share.*clip_grad_row_norm"):
        optimizer.clip_grad_norm_(model.parameters(), 1.0)
    del optimizer
    model.unused = Model(None).unused
    with pytest.raises(OptimizerError, match="embeddings 'rows', 'unused' have different worlds"):
        trained(model)


class Two(nn.Module):
    """Two embeddings of one number a row, each with an optimizer group of its own."""

    def __init__(self, world: World, path: Path | None = None) -> None:
        super().__init__()
        self.a, self.b = (embedding(name, world, 1, path) for name in "ab")
        groups = [{"params": part.parameters()} for part in (self.a, self.b)]
        self.optimizer = EagerOptimizer(torch.optim.SGD(groups, lr=0.5), self)

    def backward(self) -> None:
        (self.a(SOME).sum() + self.b(SOME).sum()).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rows(self) -> Tensor:
        return torch.cat([self.a.get(SOME), self.b.get(SOME)])


@on_ranks(2, run_kept)
def test_what_a_closure_raises_on_one_rank_is_raised_on_all(world: World) -> None:
    model = Two(world)
    for place in range(4):  # before the lookups, between them, after backward(), and nowhere

        def closure(place: int = place) -> None:
            for at, part in enumerate((model.a, model.b, None)):
                if world.rank == 1 and at == place:
                    raise ArithmeticError(f"failed at {at}")
                if part is not None:
                    part(SOME).sum().backward()

        before = model.rows()
        said = outcome(partial(model.optimizer.step, closure))
        assert said == (f"GroupError: rank 1: ArithmeticError: failed at {place}" if place < 3 else "fine")
        model.optimizer.zero_grad()
        assert torch.equal(model.rows(), before) == (place < 3)
    torch.testing.assert_close(model.rows(), before - 0.5)


class Broken(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("broken")


@on_ranks(2, run_kept)
def test_a_setting_or_ids_that_are_wrong_on_one_rank_are_told_to_all(world: World) -> None:
    model, said = Two(world), []
    for group in model.optimizer.param_groups:
        before = model.rows()
        group["lr"] = -1.0 if world.rank == 1 else 0.5
        said.append(outcome(model.step))
        assert torch.equal(model.rows(), before)
        group["lr"] = 0.5
        model.optimizer.zero_grad()
    ids = SOME.as_subclass(Broken) if world.rank == 1 else SOME
    said += [outcome(partial(model.a, ids)), outcome(partial(model.a.get, ids)), outcome(model.step)]
    torch.testing.assert_close(model.rows(), before - 0.5)
    assert all(one.startswith("OptimizerError: rank 1: param group: lr=-1.0") for one in said[:2])
    assert said[2:] == [*2 * ["GroupError: rank 1: ZeroDivisionError: broken"], "fine"]


@on_ranks(2, run_kept)
def test_a_call_of_rows_that_one_rank_closed_is_told_to_all(world: World, tmp_path: Path) -> None:
    """Before their first use, and when they were trained and saved."""
    unused = Two(world)
    if world.rank == 1:
        unused.a.close()
    calls: list[Callable[[], Any]] = [
        unused.a.metrics,
        lambda: list(unused.a.chunks()),
        lambda: unused.a.explain(1),
        lambda: unused.a.get(SOME),
    ]
    said = [outcome(call) for call in calls]
    assert not unused.b.size()
    model = Two(world, tmp_path)
    model.step()
    model.a.save_snapshot("first")
    if world.rank == 1:
        model.a.close()
    calls = [
        lambda: model.a(SOME),
        lambda: model.a.get(SOME),
        lambda: model.a.put(SOME, np.zeros((len(SOME), 1), np.float32)),
        lambda: model.a.delete(SOME),
        lambda: model.a.prefetch(SOME),
        model.a.size,
        lambda: model.a.save_snapshot("s"),
        lambda: model.a.check_save("s"),
        lambda: model.a.load_snapshot("first"),
        lambda: model.a.prune_snapshots(1),
        model.step,
    ]
    said += [outcome(call) for call in calls]
    assert model.b.size() == len(SOME)
    assert all(one.startswith("ClosedError: rank 1: embedding 'a' was closed") for one in said)


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.slow), 1])
@on_ranks(2, run_kept)
def test_rows_of_a_half_made_step_are_refused_until_a_load(world: World, tmp_path: Path, place: int) -> None:
    model = Two(world, tmp_path)
    model.step()
    for rows in (model.a, model.b):
        rows.save_snapshot("first")
    saved, before = model.optimizer.state_dict(), model.rows()
    group = model.optimizer.param_groups[place] = Stumbling(model.optimizer.param_groups[place])
    model.step()
    if world.rank == 1:
        group.fails_at = 2 * group.reads  # the last time in a step, which is in the update
    assert outcome(model.step) == ("ArithmeticError: stumbled" if world.rank == 1 else "fine")
    torn, name = (model.a, model.b)[place], "ab"[place]
    why = f"StoreError: rank 1: embedding '{name}', step 3 raised ArithmeticError('stumbled') on this rank"
    for call in (model.backward, lambda: torn.get(SOME), lambda: torn.put(SOME, np.zeros((8, 1), np.float32))):
        assert outcome(call).startswith(why)
    said = outcome(lambda: torn.save_snapshot("torn"))
    assert said.startswith(f"StoreError: rank 1: embedding '{name}' failed in the middle of a write")
    of_step = "rank 1: a step of an EagerOptimizer raised ArithmeticError('stumbled')"
    assert of_step in outcome(model.optimizer.step)
    for rows in (model.a, model.b):
        rows.load_snapshot("first")
    assert of_step in outcome(model.optimizer.step)
    model.optimizer.load_state_dict(saved)
    model.optimizer.zero_grad()
    assert torch.equal(model.rows(), before)
    model.step()
    torch.testing.assert_close(model.rows(), before - 0.5)
    assert [rows.metrics()["table"]["step"] for rows in (model.a, model.b)] == [2, 2]


@on_ranks(2, run_kept)
def test_parameters_of_a_half_made_step_are_told_at_the_next_until_a_state_is_loaded(world: World) -> None:
    model, stumbles = Two(world), False

    def hook(*_: object) -> None:
        if stumbles:
            raise ArithmeticError("stumbled")

    model.optimizer.register_step_pre_hook(hook)
    stumbles = world.rank == 1
    assert outcome(model.step) == ("ArithmeticError: stumbled" if world.rank == 1 else "fine")
    stumbles = False
    told = "OptimizerError: rank 1: a step of an EagerOptimizer raised ArithmeticError('stumbled') during its updates"
    assert outcome(model.step).startswith(told)
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    model.step()
    assert model.a.size() == len(SOME)
