"""The optimizers of a graph: the parameters that each one holds, and the embeddings whose rows they train."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...embedding.optim.dense_part import DensePart, note_versions
from ...embedding.optim.eager import IN_BACKWARD, EagerOptimizer
from ...embedding.state_dict.saved_rows import SavedRows
from ...embedding.tables.names import name_embeddings
from ...embedding.tables.training_group import train_together
from ...engine.errors import GraphError, OptimizerError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.optim.row_optimizer import RowOptimizer, check_is_optimizer, note_lazy
from ..trace.names import HasBuild, name_of

log = logging.getLogger("tierbed")


def embeddings_of(root: nn.Module) -> dict[str, EmbeddingBase]:
    """The embeddings under `root`, by path, each with a name from here on. GraphError for two of one name."""
    parts = [name for name, one in root.named_children() if any(isinstance(m, EmbeddingBase) for m in one.modules())]
    name_embeddings(root, GraphError, parts[0] if len(parts) == 1 else "")  # the name that a plain loop gives
    return {path: m for path, m in root.named_modules() if isinstance(m, EmbeddingBase)}


def embeddings_by_shadow(root: nn.Module) -> dict[int, EmbeddingBase]:
    """`embeddings_of`, by the id of their shadow parameter."""
    return {id(embedding.shadow): embedding for embedding in embeddings_of(root).values()}


class OptimizerSet:
    """Ordinary torch optimizers, in the order in which they were added."""

    def __init__(self) -> None:
        self.optimizers: dict[Optimizer, LRScheduler | None] = {}  # each with its schedule
        self.rows: dict[int, RowOptimizer] = {}  # of each attached embedding, by the id of its shadow
        self._checked = False  # whether a step trains, or a warning said that none does

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def add(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        """Add an optimizer and its schedule.

        OptimizerError for anything but a torch optimizer and a schedule of it, for an optimizer that needs a closure,
        and for one that was added before.
        """
        if isinstance(optimizer, EagerOptimizer):
            raise OptimizerError(
                "add_optimizer got an EagerOptimizer, whose step() is for loops outside a graph; pass the optimizer "
                "that it wraps, its attribute optimizer"
            )
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(
                f"add_optimizer got a {type(optimizer).__name__}; pass a torch.optim optimizer, such as torch.optim.SGD"
            )
        check_is_optimizer(optimizer)
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # as TorchRec's WarmupOptimizer
            raise OptimizerError(
                f"{type(optimizer).__name__} lacks what a torch optimizer has; pass the one that it wraps, with a "
                "schedule as lr_sch, or train in a loop by an EagerOptimizer"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimizerError(
                f"{type(optimizer).__name__} calls the model several times a step, which a static graph cannot do; "
                "use an optimizer whose step() needs no closure"
            )
        if optimizer in self.optimizers:
            raise OptimizerError(f"this {type(optimizer).__name__} was already added; add each optimizer once")
        kind = type(scheduler).__name__
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise OptimizerError(
                f"lr_sch={kind}: give a scheduler of torch.optim.lr_scheduler, made over the optimizer"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise OptimizerError(f"lr_sch={kind}: its step() needs a metric; call it yourself after the graph")
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise OptimizerError(f"lr_sch={kind} is of another optimizer; make it over the one given to add_optimizer")
        self.optimizers[optimizer] = scheduler
        note_versions(parameter for group in optimizer.param_groups for parameter in group["params"])

    def adopt(self, root: nn.Module) -> None:
        """Add the optimizers that `apply_optimizer_in_backward` gave embeddings under `root`. OptimizerError."""
        for embedding in embeddings_of(root).values():
            for given in getattr(embedding.shadow, IN_BACKWARD, ()):
                optimizer = given.optimizer if isinstance(given, EagerOptimizer) else given
                if optimizer not in self.optimizers:
                    self.add(optimizer, None)

    def discard(self, optimizer: Optimizer) -> None:
        self.optimizers.pop(optimizer, None)

    def schedulers(self) -> list[LRScheduler]:
        """The schedules of the optimizers that have one, in the optimizers' order."""
        return [scheduler for scheduler in self.optimizers.values() if scheduler is not None]

    def attach(self, root: HasBuild) -> None:
        """Let the group of an embedding's shadow train its rows, once. OptimizerError for a parameter in two."""
        by_shadow = embeddings_by_shadow(root)
        if self.optimizers:
            train_together(embeddings_of(root).values())
        holders: dict[int, Optimizer] = {}
        rows: dict[int, RowOptimizer] = {}
        for optimizer, group, parameter in self._members():
            if holders.setdefault(id(parameter), optimizer) is not optimizer:
                both = f"{type(holders[id(parameter)]).__name__} and {type(optimizer).__name__}"
                raise OptimizerError(
                    f"parameter {name_of(root, parameter)} is in two optimizers, {both}; leave it in one"
                )
            if id(parameter) in by_shadow and id(parameter) not in self.rows:
                rows[id(parameter)] = by_shadow[id(parameter)].attach(optimizer, group)
        self.rows.update(rows)  # only now: a refused optimizer changes nothing
        note_lazy(rows.values())

    def follow_parameters(self) -> None:
        """Move the state that optimizers have of a parameter to its device, which torch does not do."""
        for optimizer, group, parameter in self._members():
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                stays = name == "step" and not (group.get("capturable") or group.get("fused"))  # as in load_state_dict
                if isinstance(value, Tensor) and not stays:
                    state[name] = value.to(parameter.device)

    def meet_dense(self, owner: str, embeddings: Sequence[EmbeddingBase]) -> None:
        """Warn if embeddings resume rows of a run that the dense part is not of, once they are open."""
        shadows = {id(embedding.shadow) for embedding in embeddings}
        states = {one: optimizer.state.get(one) for optimizer, _, one in self._members() if id(one) not in shadows}
        part = DensePart(owner, states, states)
        for embedding in embeddings:
            if isinstance(embedding, SavedRows):
                embedding.when_open(partial(part.meet, embedding))

    def holders(self) -> dict[int, Optimizer]:
        """The optimizer of each parameter, by the parameter's id."""
        return {id(parameter): optimizer for optimizer, _, parameter in self._members()}

    def refuse_foreign(self, root: HasBuild) -> None:
        """OptimizerError for a parameter that no module under `root` holds: a trace could not see it."""
        known = {id(parameter) for parameter in root.parameters()}
        for optimizer, _, parameter in self._members():
            if id(parameter) not in known:
                raise OptimizerError(
                    f"{type(optimizer).__name__} holds parameter {name_of(root, parameter)}, which is in no module of "
                    "the graph; assign its module to self in __init__, and make the optimizer after replacing any"
                )

    def warn_untrained(self, root: HasBuild, trains: bool) -> None:
        """Warn once if a step of `root` in training mode trains nothing, and no step before it trained."""
        should_train = root.training and torch.is_grad_enabled() and any(p.requires_grad for *_, p in self._members())
        if should_train and not trains and not self._checked:
            log.warning(
                "%s has optimizers and is in training mode, but build leaves no gradient, so nothing is trained: call "
                "loss.backward() in build, or eval() of a graph that only evaluates",
                type(root).__name__,
            )
        self._checked = self._checked or should_train

    def _members(self) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, group, parameter
