"""How a compiled step keeps to its exchanges with other ranks, also where this rank's part of it fails.

Other ranks wait for each exchange in its turn. A rank whose step raises goes through the rest of them with nothing to
give, and says so where all ranks agree next. So all raise in the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.optim.lr_scheduler import LRScheduler

from ...distributed.dense import Vote, all_reduce_in_order, broadcast_parameters
from ...distributed.rank_group import NO_COLLECTIVES
from ...distributed.world import catch
from ...engine.errors import GraphError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from ..passes.collectives import CollectiveCall, in_words, sum_over_ranks
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

if TYPE_CHECKING:
    from ...distributed.world import World


class RankStepState:
    """What a graph did with other ranks so far."""

    def __init__(self) -> None:
        self.began: set[bool] = set()  # by whether steps train: in those, tensors have begun as those of rank 0
        self._last: dict[tuple[bool, bool], weakref.ref[SharedStep]] = {}  # weak: the step holds this object
        self.torn = ""  # what this rank alone raised amid the updates of a step

    def runs(self, step: SharedStep) -> None:
        """Note the step that ran last of its kind: in this mode, and whether it trains."""
        self._last[step.in_training, step.trains] = weakref.ref(step)

    def join(self, root: nn.Module) -> None:
        """Take part in a step for which this rank has no batch, and the others do.

        It is the last step in the mode of `root`, of those that train if there are any. GraphError where there is none.
        """
        for trains in (True, False):
            last = self._last.get((root.training, trains), lambda: None)()
            if last is not None:
                last.join()
                return
        mode = "train()" if root.training else "eval()"
        tell_ranks(
            root,
            GraphError(
                f"a loader gave no batch at all, and this rank made no step in the mode of {mode} yet: to join the "
                "steps of others it takes one at least"
            ),
        )


class SharedStep(Protocol):
    @property
    def in_training(self) -> bool:
        """Whether it is for a graph in the mode of `train()`."""

    @property
    def trains(self) -> bool:
        """Whether it updates rows or parameters."""

    def join(self) -> None:
        """Take part in the step without a batch."""


class Exchanges:
    """The exchanges of one compiled step, in the order of its script."""

    def __init__(self, world: World, together: RankStepState, owner: str, end: StepEpilogue, trains: bool) -> None:
        """owner: the name of the graph. trains: whether the step does."""
        self._world, self._together, self._owner = world, together, owner
        self._end, self.trains = end, trains
        self._script: list[CollectiveCall] = []
        self._in_words = NO_COLLECTIVES
        self._embeddings: list[EmbeddingBase] = []
        self._trained: list[EmbeddingBase] = []
        self._dense: list[DenseGrads] = []
        self._schedulers: list[LRScheduler] = []
        self._passed = 0  # the world's count of exchanges when the step began
        self._pinned = 0  # and how many batches were pinned
        self._number = ""  # of the step, for errors

    def follow(
        self,
        script: list[CollectiveCall],
        parameters: list[tuple[str, Tensor]],
        trained: list[EmbeddingBase],
        dense: list[DenseGrads],
        schedulers: list[LRScheduler],
    ) -> None:
        """Set the script, and what the step trains, for a rank without a batch.

        parameters: by name, in the order in which gradients are summed. dense: the same by optimizer, their gradients
        of any value.
        """
        self._script, self._in_words = script, in_words(script, parameters)
        self._embeddings = list(dict.fromkeys(embedding for _, embedding, _ in script if embedding is not None))
        self._trained, self._dense, self._schedulers = trained, dense, schedulers

    def vote(self, dense: list[DenseGrads], *, finite: bool, present: bool = True) -> Vote:
        """Sum dense gradients over ranks, unless the step failed on one of them: that is raised on all."""
        grads = [grad for part in dense for grad in part.grads]
        same = numbers_of([part.optimizer for part in dense])
        trained: list[Any] = self._trained
        _, error = catch(lambda: [embedding.opened().own_table for embedding in trained])
        return all_reduce_in_order(
            self._world, self._named("vote"), grads, error, present=present, finite=finite, same=same
        )

    def pin(self, end: StepEpilogue) -> tuple[list[RowGrads], list[DenseGrads], Vote]:
        """The gradients that wait on all ranks, with their rows pinned, and the vote of this update."""
        embeddings = end.embeddings
        kinds = [*(("pin", e) for e in embeddings), *((k, e) for e in embeddings for k in ("rows", "send"))]
        update = Exchanges(self._world, self._together, self._owner, end, trains=True)
        parameters = [("accumulated", parameter) for parameter in end.parameters]
        update.follow(
            [*(CollectiveCall(kind, e) for kind, e in kinds), CollectiveCall("vote", None)],
            parameters,
            embeddings,
            [],
            [],
        )
        with update.step(tuple, nested=True):
            rows, dense = end.pin()
            for batch, grads, weights in rows:
                shared: Any = batch
                shared.send(grads, weights)
            return rows, dense, sum_over_ranks(update, end, rows, dense, end.present)

    def join(self) -> None:
        """Do as the step without a batch: no lookups, and gradients that do not count."""
        batches: dict[EmbeddingBase | None, Any] = {}
        pinned: dict[int, Any] = {}
        stepped = True
        for place, (kind, embedding, like) in enumerate(self._script):
            if kind == "vote":
                stepped = self._join_end(batches)
            elif embedding is not None and kind == "pin":
                pinned[place] = batches[embedding] = embedding.pin([], None if like is None else pinned[like])
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
        if end.every == 1:
            rows = [RowGrads(batches[embedding], [], []) for embedding in self._trained]  # as the step has them
            return apply_gradients(end, rows, self._dense, sum_over_ranks(self, end, rows, self._dense, present=False))
        nothing = [part._replace(grads=[torch.zeros_like(p) for p in part.params]) for part in self._dense]
        none: list[LookupGrads] = [(embedding, [], [], []) for embedding in self._trained]
        return accumulate(end, none, nothing, self, present=False)

    @contextmanager
    def step(self, first_values: Callable[[], Sequence[tuple[str, Tensor]]], nested: bool = False) -> Iterator[None]:
        """A block that runs the step. What it raises on this rank is raised on all, while one of them waits for it.

        first_values: gives the tensors that begin as those of rank 0, by name. nested: whether it is in another block.
        """
        world = self._world
        world.check_thread()
        world.collectives, self._passed, world.shared_error = self._in_words, world.step_collectives, None
        if not nested:
            world.pinned_batches = []
        self._pinned = len(world.pinned_batches or ())
        self._number = ""
        try:
            self._number = self._number_of(self._embeddings)
            if self.trains and self._together.torn:
                raise GraphError(
                    f"a step of {self._owner} raised {self._together.torn} amid its updates, which other ranks made; "
                    "load a checkpoint on all ranks"
                )
            if not nested and self.trains not in self._together.began:
                broadcast_parameters(world, f"parameters of {self._owner}", first_values())
                self._together.began.add(self.trains)
            yield
        except BaseException as error:
            if world.must_report(error):
                self._tell(error)
                if self.trains and not isinstance(error, DynamicStepFailed):
                    self._together.torn = self._together.torn or repr(error)
                    for batch in (world.pinned_batches or [])[self._pinned :]:
                        batch.fall_behind(error)
            raise
        finally:
            world.collectives = NO_COLLECTIVES
            if not nested:
                world.shared_error = None  # its frames hold what the step computed
                world.pinned_batches = None

    def _tell(self, error: BaseException) -> None:
        """Go through the rest of the script. Raises on all ranks, but where no exchange is left."""
        if not isinstance(error, DynamicStepFailed):
            self._go_through(error)
            return
        try:
            assert error.__cause__ is not None
            self._go_through(error.__cause__)
            if self._world.step_collectives > self._passed:  # other ranks are done, and make no exchange again
                error.told = error.__cause__
        except BaseException as told:
            error.told = told

    def _go_through(self, error: BaseException) -> None:
        """Go through the rest of the script. What keeps this rank from that ends the group, which would wait for it."""
        try:
            self._make_rest(error)
        except BaseException as wrong:
            if not self._world.must_report(wrong):
                raise
            raise self._world.abort(self._named("rest"), f"failed with {wrong!r} after {error!r}") from wrong

    def _make_rest(self, error: BaseException) -> None:
        passed = self._world.step_collectives - self._passed
        pinned = iter((self._world.pinned_batches or [])[self._pinned :])
        batches: dict[EmbeddingBase | None, Any] = {}
        for kind, embedding, _ in self._script:
            if kind == "pin" and passed:
                batches[embedding] = next(pinned)
            batch = batches.get(embedding)
            if kind == "rows":
                if batch is not None:
                    batch.arrive()  # raises on all ranks where one could not give its rows
            elif passed:
                passed -= 1
            elif kind == "send":
                assert batch is not None  # pinned before, in the same step
                batch.send_nothing()
            else:
                self._world.handshake(self._named(kind), error)

    def _named(self, kind: str) -> str:
        """What errors call an exchange that is of no embedding."""
        return f"{kind} of {self._owner}{self._number}"

    def _number_of(self, embeddings: list[Any]) -> str:
        """The number of the coming step, where all its embeddings are open: ranks open and close them at any time."""
        if not all(embedding.is_open for embedding in embeddings):
            return ""
        steps = [embedding.opened().own_table.step for embedding in embeddings]
        return f", step {max(steps, default=0) + 1}"


def tell_ranks(root: nn.Module, error: BaseException) -> None:
    """Raise on all ranks what keeps this one from a step: they wait in the first exchange of theirs."""
    world = world_of(root)
    if world is not None and world.failure is None and detect_fake_mode() is None:  # a graph around this one tells
        world.handshake(f"a step of {type(root).__name__}", error)


def world_of(root: nn.Module) -> World | None:
    """The world of the embeddings under `root`, None where they have none."""
    worlds = (module.world for module in root.modules() if isinstance(module, EmbeddingBase))
    return next((world for world in worlds if world is not None), None)
