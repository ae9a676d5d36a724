"""The collectives of a compiled step across ranks.

In each collective, a rank waits for all other ranks. So every rank must make all collectives of a step in the same
order, even if the step fails on this rank. A rank that fails makes the remaining collectives with empty data and
reports its error in the next handshake. All ranks then raise that error in the same step. If a rank fails after the
vote, during updates, the other ranks do not notice. The failed rank then refuses to train until a load.
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

from ...distributed.dense_gradients import AllReduceResult, all_reduce_in_order, broadcast_parameters, describe_tensors
from ...distributed.rank_group import CollectiveSequence
from ...distributed.world import World, try_call
from ...engine.errors import GraphError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.options.lookup import Lookup
from ..passes.collectives import CollectiveCall, sum_over_ranks
from ..passes.step_epilogue import DenseGrads, RowGrads, StepEpilogue, accumulate, apply_gradients, read_settings
from .rollback import DynamicStepError


class RankStepState:
    """What a graph that trains over several ranks keeps between two steps."""

    def __init__(self) -> None:
        # the modes of steps that copied rank 0's tensors to all ranks: True is training, False is evaluation
        self.synced_modes: set[bool] = set()
        # (graph is in train() mode, step has updates) -> the `join_step` method of the last such step, held weakly
        self._join_methods: dict[tuple[bool, bool], weakref.WeakMethod[Callable[[], None]]] = {}
        self.update_error = ""  # error in a step's updates on this rank; no step trains until a load clears it

    def remember_join_method(self, is_training: bool, has_updates: bool, method: Callable[[], None]) -> None:
        self._join_methods[is_training, has_updates] = weakref.WeakMethod(method)

    def join_step(self, root: nn.Module) -> None:
        """This rank lacks a batch: join the other ranks' step. Raises GraphError if no step ran in `root`'s mode."""
        for has_updates in (True, False):  # prefer a step that trains
            join_method = self._join_methods.get((root.training, has_updates), lambda: None)()
            if join_method is not None:
                join_method()
                return
        mode = "train()" if root.training else "eval()"
        error = GraphError(
            f"this rank's loader gave no batch, and this rank has not run a step in {mode} mode yet. Give every loader "
            "at least one batch: a rank must run a step before it can join other ranks' steps"
        )
        raise_on_ranks(root, error)


@dataclass(eq=False)
class StepCollectives:
    """The collectives of one compiled step. All ranks make these collectives in the same order."""

    _world: World
    rank_state: RankStepState
    _graph_name: str
    _epilogue: StepEpilogue
    _trained_embeddings: list[EmbeddingBase]  # this field and the next two hold what the step trains; `join` needs them
    _dense_grads: list[DenseGrads]  # without gradient values
    _schedulers: list[LRScheduler]
    has_updates: bool
    _calls: list[CollectiveCall]
    parameters: InitVar[list[tuple[str, Tensor]]]  # (name, dense parameter), in the order of summation
    _first_call: int = 0  # the world's collective count when the step began
    _first_batch: int = 0  # number of pinned batches when the step began
    _step_label: str = ""  # the step's number, for error texts

    def __post_init__(self, parameters: list[tuple[str, Tensor]]) -> None:
        self._sequence = CollectiveSequence([*map(str, self._calls)], describe_tensors(parameters))
        embeddings = (call.embedding for call in self._calls if call.embedding is not None)
        self._embeddings: list[Any] = [*dict.fromkeys(embeddings)]

    def vote(self, dense_grads: list[DenseGrads], *, is_finite: bool, has_batch: bool = True) -> AllReduceResult:
        """Sum dense gradients across ranks. If the step failed on one rank, raise that rank's error on all ranks."""
        grads = [grad for part in dense_grads for grad in part.grads]
        world, label, settings = self._world, self._describe("vote"), read_settings([g.optimizer for g in dense_grads])
        embeddings: list[Any] = self._trained_embeddings
        _, error = try_call(lambda: [embedding.table_handle().open_table for embedding in embeddings])
        return all_reduce_in_order(
            world, label, grads, error, contributes=has_batch, is_finite=is_finite, shared_values=settings
        )

    def pin_accumulated(self, epilogue: StepEpilogue) -> tuple[list[RowGrads], list[DenseGrads], AllReduceResult]:
        """Pin the rows of accumulated gradients, and sum dense gradients over ranks. Returns gradients and the sum."""
        embeddings = epilogue.embeddings
        operations = [*(("pin", e) for e in embeddings), *((kind, e) for e in embeddings for kind in ("rows", "send"))]
        calls = [CollectiveCall(kind, e) for kind, e in [*operations, ("vote", None)]]
        parameters = [("accumulated", parameter) for parameter in epilogue.parameters]
        context = self._world, self.rank_state, self._graph_name, epilogue
        update = StepCollectives(*context, embeddings, [], [], True, calls, parameters)
        with update.step((), is_nested=True):
            row_grads, dense_grads = epilogue.pin_accumulated_rows()
            for batch, grads, weights in row_grads:
                sharded_batch: Any = batch
                sharded_batch.send(grads, weights)
            return row_grads, dense_grads, sum_over_ranks(update, epilogue, row_grads, dense_grads, epilogue.has_batch)

    def join_step(self) -> None:
        """Run the step without a batch: there are no lookups, and this rank's gradients are ignored."""
        batches: dict[EmbeddingBase | None, Any] = {}
        pins: dict[int, Any] = {}
        was_updated = True
        for index, (kind, embedding, ids_from) in enumerate(self._calls):
            if kind == "vote":
                was_updated = self._join_update(batches)
            elif embedding is not None and kind == "pin":
                pins[index] = batches[embedding] = embedding.pin([], None if ids_from is None else pins[ids_from])
            elif embedding is not None and kind == "read":
                embedding.read(Lookup(torch.empty(0, dtype=embedding.spec.key_type, device=embedding.device)))
            elif kind == "rows":
                batches[embedding].wait_for_rows()
            else:
                batches[embedding].send([], [])
        for scheduler in self._schedulers if was_updated else ():
            scheduler.step()

    def _join_update(self, batches: dict[EmbeddingBase | None, Any]) -> bool:
        epilogue = self._epilogue
        if epilogue.accumulate_steps == 1:
            row_grads = [RowGrads(batches[e], [], []) for e in self._trained_embeddings]  # in the order of the step
            sums = sum_over_ranks(self, epilogue, row_grads, self._dense_grads, has_batch=False)
            return apply_gradients(epilogue, row_grads, self._dense_grads, sums)
        zero_grads = [part._replace(grads=[torch.zeros_like(p) for p in part.params]) for part in self._dense_grads]
        empty_grads: list[Any] = [(embedding, [], [], []) for embedding in self._trained_embeddings]
        return accumulate(epilogue, empty_grads, zero_grads, self, has_batch=False)

    @contextmanager
    def step(self, synced_tensors: Iterable[tuple[str, Tensor]], is_nested: bool = False) -> Iterator[None]:
        """Context manager around a step. If the step raises before its last collective, all ranks raise the error.

        synced_tensors: named tensors. The first step copies them from rank 0. is_nested: True in another `step` block.
        """
        world = self._world
        world.check_thread()
        self._first_call = world.num_step_collectives
        world.begin_step(self._sequence, is_nested)
        self._first_batch = len(world.pinned_batches or ())
        self._step_label = ""
        try:
            if all(embedding.is_open for embedding in self._embeddings):  # ranks open and close embeddings at any time
                steps = [embedding.table_handle().open_table.step for embedding in self._embeddings]
                self._step_label = f", step {max(steps, default=0) + 1}"
            if self.has_updates and self.rank_state.update_error:
                raise GraphError(
                    f"a step of {self._graph_name} raised {self.rank_state.update_error} during its updates, and other "
                    "ranks finished their updates; load a checkpoint on all ranks"
                )
            if not is_nested and self.has_updates not in self.rank_state.synced_modes:
                broadcast_parameters(world, f"parameters of {self._graph_name}", [*synced_tensors])
                self.rank_state.synced_modes.add(self.has_updates)
            yield
        except BaseException as error:
            if world.must_report(error):
                self._raise_on_ranks(error)
                if self.has_updates and not isinstance(error, DynamicStepError):
                    self.rank_state.update_error = self.rank_state.update_error or repr(error)
                    for batch in (world.pinned_batches or [])[self._first_batch :]:
                        batch.mark_diverged(error)
            raise
        finally:
            world.end_step(is_nested)

    def _raise_on_ranks(self, error: BaseException) -> None:
        """Make the remaining collectives of the step. If there are any, raise the error on all ranks."""
        if not isinstance(error, DynamicStepError):
            self._finish_collectives(error)
            return
        try:
            self._finish_collectives(error.cause)
        except BaseException as shared_error:
            raise DynamicStepError(error.cause, shared_error) from error.cause
        if self._world.num_step_collectives > self._first_call:  # other ranks finished the step and will not retry it
            raise DynamicStepError(error.cause, error.cause) from error.cause

    def _finish_collectives(self, error: BaseException) -> None:
        """Make the remaining collectives. If one fails, abort the process group, so no rank waits for this rank."""
        try:
            self._run_remaining(error)
        except BaseException as new_error:
            if not self._world.must_report(new_error):
                raise
            raise self._world.abort(self._describe("rest"), f"failed with {new_error!r} after {error!r}") from new_error

    def _run_remaining(self, error: BaseException) -> None:
        num_made = self._world.num_step_collectives - self._first_call
        pinned_batches = iter((self._world.pinned_batches or [])[self._first_batch :])
        batches: dict[EmbeddingBase | None, Any] = {}
        for kind, embedding, _ in self._calls:
            if kind == "pin" and num_made:
                batches[embedding] = next(pinned_batches)
            batch = batches.get(embedding)
            if kind == "rows":
                if batch is not None:
                    batch.wait_for_rows()  # raises on all ranks if any rank could not send its rows
            elif num_made:
                num_made -= 1
            elif kind == "send":
                assert batch is not None  # pinned earlier in this step
                batch.send_nothing()
            else:
                self._world.handshake(self._describe(kind), error)

    def _describe(self, kind: str) -> str:
        return f"{kind} of {self._graph_name}{self._step_label}"


def raise_on_ranks(root: nn.Module, error: BaseException) -> None:
    """Raise `error` on all ranks: this rank cannot run the step, and the others wait in its first collective."""
    world = find_world(root)
    is_tracing = detect_fake_mode() is not None  # in a trace, the outer graph reports the error
    if world is not None and world.failure is None and not is_tracing:
        world.handshake(f"a step of {type(root).__name__}", error)


def find_world(root: nn.Module) -> World | None:
    """Return the world that embeddings under `root` use, or None."""
    worlds = (module.world for module in root.modules() if isinstance(module, EmbeddingBase))
    return next((world for world in worlds if world is not None), None)
