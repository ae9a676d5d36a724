"""The end of a step: accumulate, unscale and clip gradients, then update rows and dense parameters.

Without accumulation, scaling, clipping and ranks, a step ends with a node per embedding and a node per optimizer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunctionSubclass
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...distributed.dense_gradients import AllReduceResult
from ...engine.checks import as_int, check_flags
from ...engine.errors import GraphError, InputError, OptimizerError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.ops.exact_sum import sum_squares
from ...engine.options.lookup import Lookup
from ..trace.swap import set_grads, trace_lock

# (embedding, lookups, gradients, pooling weights); a plain tuple, because FX cannot print a nested named tuple
LookupGrads = tuple[Any, list[Lookup], list[Tensor], list[Tensor | None]]

_NO_EFFECT_WITHOUT_GRADIENTS = ("torch.optim.", "tierbed.engine.optim.")  # modules of optimizers


class _DenseStepCounter(threading.local):
    """The number of optimizer steps that this thread has started."""

    count = 0


dense_step_counter = _DenseStepCounter()


def dense_step(optimizer: Optimizer, params: list[Tensor], grads: list[Tensor]) -> None:
    """Call `optimizer.step()` with these gradients. The call uses the present learning rates and step counts."""
    with trace_lock, DisableTorchFunctionSubclass():  # else each access to a shadow parameter runs Python code
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # so that torch changes no parameter outside `params`
        if not params and _has_no_effect(optimizer):
            return
        try:
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
            dense_step_counter.count += 1
            optimizer.step()
        finally:
            for parameter in params:
                parameter.grad = None


def _has_no_effect(optimizer: Optimizer) -> bool:
    """True if `step()` does nothing when all gradients are None. Hooks and optimizers of other libraries may act."""
    return (
        type(optimizer).__module__.startswith(_NO_EFFECT_WITHOUT_GRADIENTS)
        and "step" not in vars(optimizer)  # a scheduler wraps `step` to count steps
        and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    )


def read_settings(optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the optimizers' settings by name and param group. Ranks compare these settings."""
    return {
        f"{type(optimizer).__name__} {number}, group {index}": {
            name: _simplify_setting(value) for name, value in group.items() if name != "params"
        }
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
    }


def _simplify_setting(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return [_simplify_setting(item) for item in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


class DenseGrads(NamedTuple):
    """An optimizer's gradients, for the parameters that backward() reached."""

    optimizer: Optimizer
    params: list[Tensor]
    grads: list[Tensor]


class RowGrads(NamedTuple):
    """The gradients of all lookups in a pinned batch, and each lookup's pooling weights (or None)."""

    batch: Any
    grads: list[Tensor]
    weights: list[Tensor | None]


class StepEpilogue:
    """A graph's settings for gradients, and the gradients of accumulated calls until their update."""

    def __init__(self) -> None:
        self.max_norm: float | None = None
        self.clip_value: float | None = None
        self.scaler: GradScaler | None = None
        self.accumulate_steps = 1  # the number of calls whose gradients are summed
        self.uses_mean = False  # True to divide the sums by `accumulate_steps`
        self.num_waiting_calls = 0  # the number of calls whose gradients are not applied yet
        self.has_batch = False  # True if this rank got a batch in any call whose gradients are not applied yet
        self._dense_grads: dict[Optimizer, dict[Tensor, Tensor]] = {}
        self._row_grads: dict[EmbeddingBase, list[tuple[Lookup, Tensor]]] = {}  # per call: (unique rows, gradients)

    @property
    def is_identity(self) -> bool:
        """True if optimizers get the gradients unchanged."""
        return self.max_norm is None and self.clip_value is None and self.scaler is None and self.accumulate_steps == 1

    def make_settings_key(self) -> Hashable:
        """Return a key for the settings that a compiled step depends on."""
        return self.is_identity, self.accumulate_steps > 1, None if self.scaler is None else self.make_scale_key()

    def set_accumulation(self, steps: int, mean: bool) -> None:
        """Sum, or average, the gradients of `steps` calls before each update. Raises OptimizerError."""
        count = as_int(steps, minimum=1)
        if count is None:
            raise OptimizerError(f"steps={steps!r}: give a whole number of calls > 0")
        check_flags(OptimizerError, mean=mean)
        if self.num_waiting_calls:
            raise OptimizerError(
                f"steps={steps}: gradients of {self.num_waiting_calls} of {self.accumulate_steps} calls wait for their "
                "update; change steps after the last of these calls, or call drop_grads() first"
            )
        self.accumulate_steps, self.uses_mean = count, mean

    def make_scale_key(self) -> Hashable:
        """Return a key for the scale tensor. A compiled step uses this tensor, and keeps the tensor alive."""
        return None if self._scale is None else id(self._scale)

    @property
    def _scale(self) -> Tensor | None:
        return None if self.scaler is None or not self.scaler.is_enabled() else self.scaler._scale

    def check_scaled(self, module: fx.GraphModule) -> None:
        """Raise GraphError if a traced step does not multiply its loss by the scale that later divides gradients."""
        scale = self._scale
        nodes = module.graph.find_nodes(op="get_attr")
        if scale is not None and not any(getattr(module, node.target, None) is scale for node in nodes):
            raise GraphError(
                "set_grad_scaler was called, but build does not scale its loss; call scaler.scale(loss).backward() "
                "with that scaler"
            )

    def add_gradients(self, lookup_grads: list[LookupGrads], dense_grads: list[DenseGrads], has_batch: bool) -> None:
        """Add one more call's gradients, summed per row. has_batch: True if this rank got a batch in that call."""
        self.has_batch = self.has_batch or has_batch
        micro_batches = [
            (e, e.table_handle().open_table.sum_gradients(lookups, grads, weights, e.output_dtype))
            for e, lookups, grads, weights in lookup_grads
        ]
        for embedding, micro_batch in micro_batches:
            self._row_grads.setdefault(embedding, []).append(micro_batch)
        for optimizer, params, grads in dense_grads:
            sums = self._dense_grads.setdefault(optimizer, {})
            for param, grad in zip(params, grads, strict=True):
                sums[param] = sums[param] + grad if param in sums else grad.clone()  # grad may be a view of an input
        self.num_waiting_calls += 1

    def pin_accumulated_rows(self) -> tuple[list[RowGrads], list[DenseGrads]]:
        """Return all waiting gradients, and pin their rows."""
        row_grads = []
        for embedding, micro_batches in self._row_grads.items():
            lookups, grads = map(list, zip(*micro_batches, strict=True))
            for lookup in lookups:
                if lookup.ids.device != embedding.device:
                    raise InputError(
                        f"gradients of embedding {embedding.name!r} are on {lookup.ids.device}, but the embedding is "
                        f"on {embedding.device}; call drop_grads() after moving a module"
                    )
            row_grads.append(RowGrads(embedding.pin(lookups, dtype=torch.float32), grads, [None] * len(lookups)))
        dense_grads = [DenseGrads(o, [*sums], [*sums.values()]) for o, sums in self._dense_grads.items()]
        return row_grads, dense_grads

    @property
    def embeddings(self) -> list[EmbeddingBase]:
        """The embeddings with waiting gradients, in the order of `pin_accumulated_rows`."""
        return list(self._row_grads)

    @property
    def parameters(self) -> list[Tensor]:
        """The dense parameters with waiting gradients, in the order of `pin_accumulated_rows`."""
        return [parameter for sums in self._dense_grads.values() for parameter in sums]

    def clear(self) -> None:
        self.num_waiting_calls, self.has_batch = 0, False
        self._dense_grads.clear()
        self._row_grads.clear()


def apply_gradients(
    epilogue: StepEpilogue,
    row_grads: list[RowGrads],
    dense_grads: list[DenseGrads],
    vote: AllReduceResult | None = None,
) -> bool:
    """Unscale and clip all gradients together, then update rows and dense parameters. Returns True after an update.

    With a gradient scaler and a non-finite gradient, nothing is updated and the scale is lowered. Across ranks, the
    update uses the mean of the ranks' gradients; row gradients have already been sent.
    """
    scale, is_finite = 1.0 / epilogue.accumulate_steps if epilogue.uses_mean else 1.0, True
    if vote is not None:
        sums = iter(vote.sums)
        dense_grads = [part._replace(grads=list(islice(sums, len(part.grads)))) for part in dense_grads]
        scale, is_finite = scale / vote.num_contributors, vote.is_finite
    scaler = epilogue.scaler if epilogue.scaler is not None and epilogue.scaler.is_enabled() else None
    grads = [grad for part in dense_grads for grad in part.grads]
    if scaler is not None:
        scale *= 1.0 / scaler.get_scale()
        is_finite = is_finite and are_finite([*grads, *(g for part in row_grads for g in part.grads if vote is None)])
        _update_scaler(scaler, is_finite)
    if not is_finite:
        for batch, *_ in row_grads:
            batch.unpin_rows()
        return False
    if epilogue.max_norm is not None:
        squared_norm = sum_squares(grads) + sum(r.batch.compute_squared_norm(r.grads, r.weights) for r in row_grads)
        factor = epilogue.max_norm / (math.sqrt(squared_norm) * scale + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        scale *= 1.0 if factor > 1.0 else factor
    for batch, lookup_grads, weights in row_grads:
        batch.update(lookup_grads, weights, scale, epilogue.clip_value)
    return step_dense_optimizers(epilogue, dense_grads, scale)


def are_finite(grads: list[Tensor]) -> bool:
    return bool(get_total_norm([grad for grad in grads if grad.numel()], math.inf).isfinite())


def step_dense_optimizers(epilogue: StepEpilogue, dense_grads: list[DenseGrads], scale: float = 1.0) -> bool:
    for optimizer, params, grads in dense_grads:
        dense_step(optimizer, params, _scale_and_clip(grads, scale, epilogue.clip_value))
    return True


def accumulate(
    epilogue: StepEpilogue,
    lookup_grads: list[LookupGrads],
    dense_grads: list[DenseGrads],
    collectives: Any = None,
    has_batch: bool = True,
) -> bool:
    """Add a call's gradients to the sums. The last of `accumulate_steps` calls also applies the sums.

    If applying raises, for example because a table is full, the sums are dropped and accumulation starts again.
    """
    if collectives is not None:
        collectives.vote([], is_finite=True)  # if one rank failed, no rank adds gradients
    epilogue.add_gradients(lookup_grads, dense_grads, has_batch)
    if epilogue.num_waiting_calls < epilogue.accumulate_steps:
        return False
    try:
        pinned_grads = epilogue.pin_accumulated_rows() if collectives is None else collectives.pin_accumulated(epilogue)
        return apply_gradients(epilogue, *pinned_grads)
    except BaseException:
        for embedding in epilogue.embeddings:
            embedding.unpin_rows()
        raise
    finally:
        epilogue.clear()


def schedule(scheduler: LRScheduler, was_updated: bool = True) -> None:
    if was_updated:
        scheduler.step()


def _scale_and_clip(grads: list[Tensor], scale: float, clip_value: float | None) -> list[Tensor]:
    """Return scaled and clipped gradients. Works out of place, because other tensors may share a gradient's memory."""
    if grads and scale != 1.0:
        grads = list(torch._foreach_mul(grads, scale))
    if grads and clip_value is not None:
        grads = list(torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -clip_value), clip_value))
    return grads


def _update_scaler(scaler: GradScaler, is_finite: bool) -> None:
    """Make the scaler adapt its scale. The scaler inspects gradients, so pass it a single dummy gradient: 0 or inf."""
    probe = torch.zeros(())
    set_grads([probe], [torch.tensor(0.0 if is_finite else math.inf)])
    scaler.unscale_(torch.optim.SGD([probe], lr=0.0))
    scaler.update()
