"""The collectives of a compiled step over ranks, which a rank makes even if its own part of the step fails.

Other ranks wait in each collective. If a step raises on one rank, that rank makes the remaining collectives with empty
data and reports the error in the next handshake. All ranks then raise in the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.optim.lr_scheduler import LRScheduler

from ...distributed.dense import Vote, all_reduce_in_order, broadcast_parameters, described
from ...distributed.rank_group import CollectiveSequence
from ...distributed.world import World, catch
from ...engine.errors import GraphError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from ..passes.collectives import CollectiveCall, sum_over_ranks
from ..passes.step_epilogue import (
    DenseGrads,
    LookupGrads,
    RowGrads,
    StepEpilogue,
    accumulate,
    apply_gradients,
    numbers_of,
    schedule,
)
from .rollback import DynamicStepFailed


class RankStepState:
    """What a graph knows of its steps with other ranks."""

    def __init__(self) -> None:
        # has False, True once steps that do not train, or do, have tensors of rank 0
        self.synced_at_start: set[bool] = set()
        # by mode and whether steps train, how to join the last step. Weak: the step holds this object
        self._joins: dict[tuple[bool, bool], weakref.WeakMethod[Callable[[], None]]] = {}
        self.partial_update = ""  # what this rank alone raised during the updates of a step

    def note_run(self, in_training: bool, trains: bool, join: Callable[[], None]) -> None:
        """Note how to join the step that runs now, for `join`."""
        self._joins[in_training, trains] = weakref.WeakMethod(join)

    def note_partial_update(self, error: BaseException) -> None:
        """This rank alone raised during the updates of a step: no rank trains until a checkpoint is loaded."""
        self.partial_update = self.partial_update or repr(error)

    def note_loaded(self) -> None:
        self.partial_update = ""

    def join(self, root: nn.Module) -> None:
        """Take part in a step for which this rank has no batch, and others have one.

        It is the last step in the mode of `root`, of those that train if there are any. GraphError if there is none.
        """
        for trains in (True, False):
            join_last = self._joins.get((root.training, trains), lambda: None)()
            if join_last is not None:
                join_last()
                return
        mode = "train()" if root.training else "eval()"
        raise_on_ranks(
            root,
            GraphError(
                f"a loader gave no batch at all, and this rank has run no step in the mode of {mode} yet: it needs one "
                "batch at least to join the steps of other ranks"
            ),
        )


@dataclass(eq=False)
class StepCollectives:
    """The collectives of one compiled step, in their order.

    owner: the name of the graph. trained, dense, schedulers: what the step trains, for a rank without a batch.
    dense: by optimizer, with gradients of any value. parameters: the same by name, in the order in which gradients are
    summed.
    """

    _world: World
    rank_state: RankStepState
    _owner: str
    _end: StepEpilogue
    _trained: list[EmbeddingBase]
    _dense: list[DenseGrads]
    _schedulers: list[LRScheduler]
    trains: bool
    _calls: list[CollectiveCall]
    parameters: InitVar[list[tuple[str, Tensor]]]
    _first: int = 0  # the world's count of collectives when the step began
    _first_batch: int = 0  # and of pinned batches
    _number: str = ""  # of the step, for errors

    def __post_init__(self, parameters: list[tuple[str, Tensor]]) -> None:
        self._sequence = CollectiveSequence([*map(str, self._calls)], described(parameters))
        embeddings = (call.embedding for call in self._calls if call.embedding is not None)
        self._embeddings: list[Any] = [*dict.fromkeys(embeddings)]

    def vote(self, dense: list[DenseGrads], *, finite: bool, present: bool = True) -> Vote:
        """Sum dense gradients over ranks. If the step failed on one rank, raises its error on all."""
        grads = [grad for part in dense for grad in part.grads]
        same = numbers_of([part.optimizer for part in dense])
        trained: list[Any] = self._trained
        _, error = catch(lambda: [embedding.table_handle().local_table for embedding in trained])
        return all_reduce_in_order(
            self._world, self._op("vote"), grads, error, present=present, finite=finite, same=same
        )

    def pin_accumulated(self, end: StepEpilogue) -> tuple[list[RowGrads], list[DenseGrads], Vote]:
        """The accumulated gradients of all ranks, with their rows pinned, and the vote of this update."""
        embeddings = end.embeddings
        kinds = [*(("pin", e) for e in embeddings), *((k, e) for e in embeddings for k in ("rows", "send"))]
        calls = [*(CollectiveCall(kind, e) for kind, e in kinds), CollectiveCall("vote", None)]
        parameters = [("accumulated", parameter) for parameter in end.parameters]
        owner = self._world, self.rank_state, self._owner, end
        update = StepCollectives(*owner, embeddings, [], [], True, calls, parameters)
        with update.step((), nested=True):
            rows, dense = end.pinned_gradients()
            for batch, grads, weights in rows:
                shared: Any = batch
                shared.send(grads, weights)
            return rows, dense, sum_over_ranks(update, end, rows, dense, end.present)

    def join(self) -> None:
        """Run the step without a batch: no lookups, and gradients that do not count."""
        batches: dict[EmbeddingBase | None, Any] = {}
        pinned: dict[int, Any] = {}
        stepped = True
        for index, (kind, embedding, like) in enumerate(self._calls):
            if kind == "vote":
                stepped = self._join_end(batches)
            elif embedding is not None and kind == "pin":
                pinned[index] = batches[embedding] = embedding.pin([], None if like is None else pinned[like])
            elif embedding is not None and kind == "read":
                embedding.read(Lookup(torch.empty(0, dtype=embedding.spec.key_type, device=embedding.device)))
            elif kind == "rows":
                batches[embedding].arrive()
            else:
                batches[embedding].send([], [])
        for scheduler in self._schedulers:
            schedule(scheduler, stepped)

    def _join_end(self, batches: dict[EmbeddingBase | None, Any]) -> bool:
        end = self._end
        if end.accumulate_steps == 1:
            rows = [RowGrads(batches[embedding], [], []) for embedding in self._trained]  # as the step has them
            return apply_gradients(end, rows, self._dense, sum_over_ranks(self, end, rows, self._dense, present=False))
        nothing = [part._replace(grads=[torch.zeros_like(p) for p in part.params]) for part in self._dense]
        none: list[LookupGrads] = [(embedding, [], [], []) for embedding in self._trained]
        return accumulate(end, none, nothing, self, present=False)

    @contextmanager
    def step(self, first_values: Iterable[tuple[str, Tensor]], nested: bool = False) -> Iterator[None]:
        """A block that runs the step. Its error on this rank is raised on all ranks if a collective remains.

        first_values: the tensors that begin as those of rank 0, by name. nested: whether in another block.
        """
        world = self._world
        world.check_thread()
        self._first = world.step_collectives
        world.begin_step(self._sequence, nested)
        self._first_batch = len(world.pinned_batches or ())
        self._number = ""
        try:
            if all(embedding.is_open for embedding in self._embeddings):  # ranks open and close them at any time
                steps = [embedding.table_handle().local_table.step for embedding in self._embeddings]
                self._number = f", step {max(steps, default=0) + 1}"
            if self.trains and self.rank_state.partial_update:
                raise GraphError(
                    f"a step of {self._owner} raised {self.rank_state.partial_update} during its updates, which other "
                    "ranks finished; load a checkpoint on all ranks"
                )
            if not nested and self.trains not in self.rank_state.synced_at_start:
                broadcast_parameters(world, f"parameters of {self._owner}", [*first_values])
                self.rank_state.synced_at_start.add(self.trains)
            yield
        except BaseException as error:
            if world.must_report(error):
                self._raise_on_ranks(error)
                if self.trains and not isinstance(error, DynamicStepFailed):
                    self.rank_state.note_partial_update(error)
                    for batch in (world.pinned_batches or [])[self._first_batch :]:
                        batch.fall_behind(error)
            raise
        finally:
            world.end_step(nested)

    def _raise_on_ranks(self, error: BaseException) -> None:
        """Make the remaining collectives. Raises the error on all ranks if there are any."""
        if not isinstance(error, DynamicStepFailed):
            self._finish_collectives(error)
            return
        try:
            self._finish_collectives(error.cause)
        except BaseException as shared:
            raise DynamicStepFailed(error.cause, shared) from error.cause
        if self._world.step_collectives > self._first:  # others have finished the step, and do not run it again
            raise DynamicStepFailed(error.cause, error.cause) from error.cause

    def _finish_collectives(self, error: BaseException) -> None:
        """Make the remaining collectives. An error in them aborts the group, which would wait for this rank."""
        try:
            self._run_remaining(error)
        except BaseException as wrong:
            if not self._world.must_report(wrong):
                raise
            raise self._world.abort(self._op("rest"), f"failed with {wrong!r} after {error!r}") from wrong

    def _run_remaining(self, error: BaseException) -> None:
        made = self._world.step_collectives - self._first
        pinned = iter((self._world.pinned_batches or [])[self._first_batch :])
        batches: dict[EmbeddingBase | None, Any] = {}
        for kind, embedding, _ in self._calls:
            if kind == "pin" and made:
                batches[embedding] = next(pinned)
            batch = batches.get(embedding)
            if kind == "rows":
                if batch is not None:
                    batch.arrive()  # raises on all ranks if one could not send its rows
            elif made:
                made -= 1
            elif kind == "send":
                assert batch is not None  # pinned before, in the same step
                batch.send_nothing()
            else:
                self._world.handshake(self._op(kind), error)

    def _op(self, kind: str) -> str:
        return f"{kind} of {self._owner}{self._number}"


def raise_on_ranks(root: nn.Module, error: BaseException) -> None:
    """Raise on all ranks an error that prevents a step on this one: they wait in the first collective of theirs."""
    world = world_of(root)
    is_traced = detect_fake_mode() is not None  # a graph around this one does it
    if world is not None and world.failure is None and not is_traced:
        world.handshake(f"a step of {type(root).__name__}", error)


def world_of(root: nn.Module) -> World | None:
    """The world of the embeddings under `root`, None if they have none."""
    worlds = (module.world for module in root.modules() if isinstance(module, EmbeddingBase))
    return next((world for world in worlds if world is not None), None)
