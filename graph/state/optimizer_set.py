"""A graph's optimizers, the optimizers' parameters, and the embeddings with rows that the optimizers train."""

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

from ...embedding.optim.eager import IN_BACKWARD, EagerOptimizer
from ...embedding.optim.resumed_rows import ResumedRowsCheck, remember_versions
from ...embedding.state_dict.saved_rows import SnapshotEmbedding
from ...embedding.tables.names import name_embeddings
from ...embedding.tables.training_group import train_together
from ...engine.errors import GraphError, OptimizerError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.optim.row_optimizer import RowOptimizer, check_has_param_groups, warn_if_lazy
from ..trace.names import HasBuild, find_tensor_name

log = logging.getLogger("tierbed")


def find_embeddings(root: nn.Module) -> dict[str, EmbeddingBase]:
    """Return the embeddings under `root` by path, and name unnamed embeddings. Raises GraphError if names repeat."""
    names = [name for name, part in root.named_children() if any(isinstance(m, EmbeddingBase) for m in part.modules())]
    name_embeddings(root, GraphError, names[0] if len(names) == 1 else "")  # the same names as in a plain loop
    return {path: m for path, m in root.named_modules() if isinstance(m, EmbeddingBase)}


def map_shadow_embeddings(root: nn.Module) -> dict[int, EmbeddingBase]:
    """Return the embeddings under `root` by `id(embedding.shadow)`. Otherwise the same as `find_embeddings`."""
    return {id(embedding.shadow): embedding for embedding in find_embeddings(root).values()}


class OptimizerSet:
    """Torch optimizers, in the order they were added."""

    def __init__(self) -> None:
        self.optimizers: dict[Optimizer, LRScheduler | None] = {}  # optimizer -> its scheduler
        self.row_optimizers: dict[int, RowOptimizer] = {}  # id(shadow) -> row optimizer, for attached embeddings
        self._has_checked_training = False  # True after a step trained, or after the warning that no step trains

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def add(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        """Add an optimizer and its scheduler. Raises OptimizerError if the graph cannot use them."""
        if isinstance(optimizer, EagerOptimizer):
            raise OptimizerError(
                "add_optimizer got an EagerOptimizer, but a graph needs the wrapped optimizer; pass "
                "the attribute `optimizer` of the EagerOptimizer"
            )
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(
                f"add_optimizer got a {type(optimizer).__name__}; pass a torch.optim optimizer, such as torch.optim.SGD"
            )
        check_has_param_groups(optimizer)
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # true for TorchRec's WarmupOptimizer, for example
            raise OptimizerError(
                f"{type(optimizer).__name__} is not a complete torch optimizer. Pass the optimizer that it wraps, "
                "with any scheduler as lr_sch. Or train in a loop with an EagerOptimizer"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimizerError(
                f"{type(optimizer).__name__} calls the model several times per step, which a static graph cannot do; "
                "use an optimizer whose step() needs no closure"
            )
        if optimizer in self.optimizers:
            raise OptimizerError(f"this {type(optimizer).__name__} was already added; add each optimizer once")
        kind = type(scheduler).__name__
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise OptimizerError(f"lr_sch={kind}: give a scheduler of torch.optim.lr_scheduler that uses the optimizer")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise OptimizerError(f"lr_sch={kind}: its step() needs a metric; call step() yourself after the graph")
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise OptimizerError(f"lr_sch={kind} belongs to another optimizer; create it with the optimizer you add")
        self.optimizers[optimizer] = scheduler
        remember_versions(parameter for group in optimizer.param_groups for parameter in group["params"])

    def add_in_backward_optimizers(self, root: nn.Module) -> None:
        """Add the optimizers that `apply_optimizer_in_backward` set on embeddings in `root`. Raises OptimizerError."""
        for embedding in find_embeddings(root).values():
            for entry in getattr(embedding.shadow, IN_BACKWARD, ()):
                optimizer = entry.optimizer if isinstance(entry, EagerOptimizer) else entry
                if optimizer not in self.optimizers:
                    self.add(optimizer, None)

    def list_schedulers(self) -> list[LRScheduler]:
        return [scheduler for scheduler in self.optimizers.values() if scheduler is not None]

    def attach(self, root: HasBuild) -> None:
        """Attach each embedding to its param group. Raises OptimizerError if two optimizers hold one parameter."""
        embedding_by_shadow = map_shadow_embeddings(root)
        if self.optimizers:
            train_together(find_embeddings(root).values())
        optimizer_by_parameter: dict[int, Optimizer] = {}
        new_row_optimizers: dict[int, RowOptimizer] = {}
        for optimizer, group, parameter in self._list_params():
            if optimizer_by_parameter.setdefault(id(parameter), optimizer) is not optimizer:
                names = f"{type(optimizer_by_parameter[id(parameter)]).__name__} and {type(optimizer).__name__}"
                raise OptimizerError(
                    f"parameter {find_tensor_name(root, parameter)} is in two optimizers, {names}; leave it in one"
                )
            if id(parameter) in embedding_by_shadow and id(parameter) not in self.row_optimizers:
                new_row_optimizers[id(parameter)] = embedding_by_shadow[id(parameter)].attach(optimizer, group)
        self.row_optimizers.update(new_row_optimizers)  # last, so that a rejected optimizer changes nothing
        warn_if_lazy(new_row_optimizers.values())

    def move_state(self) -> None:
        """Move optimizer state to the devices of the parameters, because torch does not move it."""
        for optimizer, group, parameter in self._list_params():
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                must_move = name != "step" or group.get("capturable") or group.get("fused")  # as in load_state_dict
                if isinstance(value, Tensor) and must_move:
                    state[name] = value.to(parameter.device)

    def warn_if_rows_mismatched(self, owner: str, embeddings: Sequence[EmbeddingBase]) -> None:
        """When an embedding opens, warn if its rows and the dense part come from different runs."""
        shadows = {id(embedding.shadow) for embedding in embeddings}
        states = {p: optimizer.state.get(p) for optimizer, _, p in self._list_params() if id(p) not in shadows}
        rows_check = ResumedRowsCheck(owner, states, states)
        for embedding in embeddings:
            if isinstance(embedding, SnapshotEmbedding):
                embedding.call_when_open(partial(rows_check.warn_if_mismatched, embedding))

    def map_parameter_optimizers(self) -> dict[int, Optimizer]:
        return {id(parameter): optimizer for optimizer, _, parameter in self._list_params()}

    def check_parameters_in_graph(self, root: HasBuild) -> None:
        """Raise OptimizerError for a parameter that is in no module under `root`, because a trace cannot see it."""
        parameter_ids = {id(parameter) for parameter in root.parameters()}
        for optimizer, _, parameter in self._list_params():
            if id(parameter) not in parameter_ids:
                raise OptimizerError(
                    f"{type(optimizer).__name__} holds parameter {find_tensor_name(root, parameter)}, which the graph "
                    "lacks; assign its module to self in __init__, and create the optimizer after replacing modules"
                )

    def warn_if_untrained(self, root: HasBuild, has_updates: bool) -> None:
        """Warn once if `root` is in training mode but no step has trained anything yet."""
        can_train = root.training and torch.is_grad_enabled() and any(p.requires_grad for *_, p in self._list_params())
        if can_train and not has_updates and not self._has_checked_training:
            log.warning(
                "%s is in training mode, but nothing is trained, because build computes no gradient. To train, call "
                "loss.backward() in build. To evaluate, call graph.eval() first",
                type(root).__name__,
            )
        self._has_checked_training = self._has_checked_training or can_train

    def _list_params(self) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, group, parameter
