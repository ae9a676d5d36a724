"""A plain loop over ranks trains rows by the mean of all ranks' losses, beside a DistributedDataParallel."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.ranks import run_ranks
from tierbed import (
    EagerOptimizer,
    GroupError,
    InputError,
    MultiTableEmbedding,
    OptimizerError,
    World,
    make_host_mem_store_options,
)
from tierbed.distributed.pinned import ShardedBatch

STEPS, DIM = 6, 4
KEYS = torch.arange(40)


class Model(nn.Module):
    def __init__(self, world: World | None, wrapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.unused = (
            MultiTableEmbedding(name, DIM, torch.float32, torch.int64, None, make_host_mem_store_options(), world=world)
            for name in ("rows", "unused")
        )
        mlp = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 1))
        self.mlp = DistributedDataParallel(mlp) if wrapped else mlp

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.rows(ids)).square().mean()
        return out

    def state(self) -> tuple[Tensor, list[Tensor], int, int]:
        """All rows, dense parameters, and the steps of both embeddings."""
        dense = [parameter.detach().clone() for parameter in self.mlp.parameters()]
        self.unused.get(KEYS)
        steps = (embedding.metrics()["table"]["step"] for embedding in (self.rows, self.unused))
        return self.rows.get(KEYS), dense, *steps


def trained(model: Model) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=1e-3), model)


def ids_of(step: int, rank: int, most: int = 12) -> Tensor:
    """Distinct ids, of which ranks share some; none on rank 1 in step 3."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randperm(len(KEYS), generator=random)[: 0 if (step, rank) == (3, 1) else most]


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert torch.equal(one[0], other[0])
    assert all(map(torch.equal, one[1], other[1]))
    assert one[2:] == other[2:]


def a_loop(world: World) -> Any:
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
    return model.state()


def test_rows_and_dense_parameters_are_those_of_one_process_with_the_mean_loss() -> None:
    model = Model(None)
    optimizer = trained(model)
    for step in range(STEPS):
        for rank in range(2):
            ids = ids_of(step, rank)
            if len(ids):
                (model(ids) / 2).backward()  # a half is exact, so that the sum of halves is half the sum
        optimizer.step()
        optimizer.zero_grad()
    for state in run_ranks(2, a_loop):
        same(state, model.state())


def only_rank_0(world: World) -> Any:
    model = Model(world)
    optimizer = trained(model)
    loss = model(ids_of(0, world.rank))
    if world.rank == 0:
        loss.backward()
    optimizer.step()
    return model.state()[0], model.state()[2:]


def test_a_rank_without_gradients_takes_part_and_an_embedding_of_no_rank_stays() -> None:
    model = Model(None)
    optimizer = trained(model)
    (model(ids_of(0, 0)) / 3).backward()
    optimizer.step()
    found = run_ranks(3, only_rank_0)
    assert [steps for _, steps in found] == [(1, 0)] * 3
    for rows, _ in found:
        assert torch.equal(rows, found[0][0])
        torch.testing.assert_close(rows, model.rows.get(KEYS))


def a_spoiled_gradient(world: World) -> Any:
    model = Model(world)
    optimizer = trained(model)
    before = model.rows.get(KEYS)
    out = model.rows(ids_of(0, world.rank))
    grad = torch.ones_like(out)
    out.backward(grad)
    if world.rank == 1:
        grad += 1
    try:
        optimizer.step()
    except InputError as error:
        said = str(error)
    stayed = torch.equal(model.rows.get(KEYS), before)
    optimizer.zero_grad()
    model(ids_of(1, world.rank)).backward()
    optimizer.step()
    return said, stayed, not torch.equal(model.rows.get(KEYS), before)


def test_a_mistake_on_one_rank_is_raised_on_all_and_training_goes_on() -> None:
    for said, stayed, moved in run_ranks(2, a_spoiled_gradient):
        assert said.startswith("rank 1: gradient of embedding 'rows': it was changed in place")
        assert stayed
        assert moved


def refused(world: World) -> str:
    model = Model(world)
    around = DistributedDataParallel(model)
    with pytest.raises(OptimizerError) as told:
        EagerOptimizer(torch.optim.Adagrad(around.parameters()), around)
    model.unused = Model(None).unused
    with pytest.raises(OptimizerError, match="embeddings 'rows', 'unused' have different worlds"):
        trained(model)
    return str(told.value)


def test_embeddings_within_a_distributed_data_parallel_or_of_several_worlds_are_refused() -> None:
    for said in run_ranks(2, refused):
        assert said.startswith("embedding 'rows' is in the module, a DistributedDataParallel, and its world sees to")


def a_closure_that_raises(world: World) -> Any:
    model = Model(world)
    optimizer, told = trained(model), []
    before = model.rows.get(KEYS)
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            loss = model(ids_of(step, world.rank))
            if step == 0 and world.rank == 1:
                raise ArithmeticError("no loss")
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
        except GroupError as error:
            told.append((str(error), torch.equal(model.rows.get(KEYS), before)))
        optimizer.zero_grad()
    return told, not torch.equal(model.rows.get(KEYS), before)


def test_what_a_closure_raises_on_one_rank_is_raised_on_all_and_training_goes_on() -> None:
    for told, moved in run_ranks(2, a_closure_that_raises):
        assert told == [("rank 1: ArithmeticError: no loss", True)]
        assert moved


def amid_the_updates(world: World) -> list[str]:
    model, told = Model(world), []
    optimizer = trained(model)
    good = optimizer.state_dict()

    def stumbles(*_: object) -> None:
        if world.rank == 1 and not told:
            raise ArithmeticError("stumbled")

    optimizer.optimizer.register_step_pre_hook(stumbles)
    for step in range(3):
        model(ids_of(step, world.rank)).backward()
        try:
            optimizer.step()
            told.append("fine")
        except (OptimizerError, ArithmeticError) as error:
            told.append(str(error))
        if step == 1:
            optimizer.load_state_dict(good)
        optimizer.zero_grad()
    return told


def test_a_rank_that_raises_amid_its_updates_keeps_all_from_a_step_until_a_state_is_loaded() -> None:
    one, two = run_ranks(2, amid_the_updates)
    assert one[0] == "fine"
    assert two[0] == "stumbled"
    for told in (one, two):
        assert told[1].startswith("rank 1: a step() of an EagerOptimizer raised ArithmeticError('stumbled') amid its ")
        assert told[2] == "fine"


def what_is_left_of_a_step(world: World) -> int:
    model = Model(world)
    optimizer, made = trained(model), []
    begin = ShardedBatch.__init__

    def noted(batch: ShardedBatch, *arguments: Any) -> None:
        begin(batch, *arguments)
        made.append(ref(batch))

    ShardedBatch.__init__ = noted  # type: ignore[method-assign]  # this process ends with the test
    for step in range(3):
        model(ids_of(step, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert made
    return sum(batch() is not None for batch in made)


def test_steps_of_a_plain_loop_leave_no_batch_in_memory() -> None:
    assert run_ranks(2, what_is_left_of_a_step) == [0, 0]
