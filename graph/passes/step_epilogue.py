"""The end of a step: gradients accumulated, unscaled or clipped, then optimizers of dense parameters, run as they are.

If gradients are none of these, a step ends in a node for each embedding and each optimizer instead.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...engine.checks import as_int
from ...engine.errors import GraphError, InputError, OptimizerError
from ...engine.ops.exact_sum import sum_of_squares
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from ...engine.signals import uninterrupted
from ..trace.swap import trace_lock

if TYPE_CHECKING:
    from ...distributed.dense import Vote
    from ...engine.ops.rows_contract import Pinned

# of lookups of one embedding that only read; FX writes no named tuple that is inside another
LookupGrads = tuple[EmbeddingBase, list[Lookup], list[Tensor], list[Tensor | None]]


def dense_step(optimizer: Optimizer, params: list[Tensor], grads: list[Tensor]) -> None:
    """`optimizer.step()` with these gradients. Its learning rates, schedulers and step counts are live.

    A parameter of the optimizer that is not in `params` keeps `grad` None, so torch leaves it as it is.
    """
    with trace_lock:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        try:
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        finally:
            for parameter in params:
                parameter.grad = None


def numbers_of(optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Any]]:
    """The settings of optimizers by name and group, to be compared between ranks."""
    return {
        f"{type(optimizer).__name__} {place}, group {index}": {
            name: _plain(value) for name, value in group.items() if name != "params"
        }
        for place, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
    }


def _plain(value: Any) -> Any:
    """A setting as msgpack carries it."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


class DenseGrads(NamedTuple):
    """The gradients of one optimizer's parameters, as far as backward() reached them."""

    optimizer: Optimizer
    params: list[Tensor]
    grads: list[Tensor]


class RowGrads(NamedTuple):
    """The gradients of a pinned batch's lookups, with the weights that pooled them."""

    batch: Pinned
    grads: list[Tensor]
    weights: list[Tensor | None]


class _Same:
    """A part of a key that equals itself alone. It keeps a tensor, so that no other tensor can take its id."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._tensor is self._tensor

    def __hash__(self) -> int:
        return id(self._tensor)


class StepEpilogue:
    """What a graph does with its gradients, and the gradients that wait for an update."""

    def __init__(self) -> None:
        self.max_norm: float | None = None
        self.clip_value: float | None = None
        self.scaler: GradScaler | None = None
        self.every = 1  # how many steps' gradients are summed
        self.mean = False  # whether their sum is divided by `every`
        self.steps = 0  # how many steps' gradients wait
        self.present = False  # whether this one of several ranks had a batch in one of these steps
        self._dense: dict[Optimizer, dict[Tensor, Tensor]] = {}
        self._rows: dict[EmbeddingBase, list[tuple[Lookup, Tensor]]] = {}  # the rows and gradients of each step

    @property
    def is_plain(self) -> bool:
        """Whether gradients go to the optimizers as they are."""
        return self.max_norm is None and self.clip_value is None and self.scaler is None and self.every == 1

    def key(self) -> Hashable:
        """A key that changes with the settings that a compiled step depends on."""
        return self.is_plain, self.every > 1, None if self.scaler is None else self.scaling()

    def accumulate(self, steps: int, mean: bool) -> None:
        """Set how many steps' gradients are summed, and whether their mean is taken. OptimizerError."""
        every = as_int(steps, least=1)
        if every is None:
            raise OptimizerError(f"steps={steps!r}: give a whole number of calls > 0")
        if not isinstance(mean, bool):
            raise OptimizerError(f"mean={mean!r}: give True or False")
        if self.steps:
            raise OptimizerError(
                f"steps={steps}: gradients of {self.steps} of {self.every} calls wait for their update; "
                "change it after the last of them, or call drop_grads() first"
            )
        self.every, self.mean = every, mean

    @property
    def share(self) -> float:
        """What the sum of all gradients is multiplied by."""
        return 1.0 / self.every if self.mean else 1.0

    def scaling(self) -> Hashable:
        """A key that changes with the tensor that a compiled step multiplies its loss by."""
        scale = self._scale
        return None if scale is None else _Same(scale)

    @property
    def _scale(self) -> Tensor | None:
        return None if self.scaler is None or not self.scaler.is_enabled() else self.scaler._scale

    def check_scaled(self, module: fx.GraphModule) -> None:
        """GraphError where the loss of a recorded step is not multiplied by the scale that its end divides by."""
        scale = self._scale
        nodes = module.graph.find_nodes(op="get_attr")
        if scale is not None and not any(getattr(module, node.target, None) is scale for node in nodes):
            raise GraphError(
                "set_grad_scaler was called, but build does not scale its loss; call scaler.scale(loss).backward() "
                "with that scaler"
            )

    def keep(self, rows: list[LookupGrads], dense: list[DenseGrads]) -> None:
        """Add the gradients of one more step to the waiting gradients, those of each row summed."""
        with uninterrupted():
            parts = [
                (embedding, embedding.sum_gradients(lookups, grads, weights))
                for embedding, lookups, grads, weights in rows
            ]
            for embedding, part in parts:
                self._rows.setdefault(embedding, []).append(part)
            for optimizer, params, grads in dense:
                sums = self._dense.setdefault(optimizer, {})
                for param, grad in zip(params, grads, strict=True):
                    sums[param] = sums[param] + grad if param in sums else grad.clone()  # a view of an argument, maybe
            self.steps += 1

    def pin(self) -> tuple[list[RowGrads], list[DenseGrads]]:
        """All waiting gradients, with their rows pinned."""
        rows = []
        for embedding, parts in self._rows.items():
            lookups, grads = ([*of_parts] for of_parts in zip(*parts, strict=True))
            for lookup in lookups:
                if lookup.ids.device != embedding.device:
                    raise InputError(
                        f"gradients of embedding {embedding.name!r} wait on {lookup.ids.device}, and the embedding is "
                        f"on {embedding.device}; call drop_grads() after moving a module"
                    )
            rows.append(RowGrads(embedding.pin(lookups, dtype=torch.float32), grads, [None] * len(parts)))
        dense = [DenseGrads(optimizer, list(sums), list(sums.values())) for optimizer, sums in self._dense.items()]
        return rows, dense

    @property
    def embeddings(self) -> list[EmbeddingBase]:
        """Those whose gradients wait, in the order in which `pin` takes them."""
        return list(self._rows)

    @property
    def parameters(self) -> list[Tensor]:
        """Those whose gradients wait, in the order of these."""
        return [parameter for sums in self._dense.values() for parameter in sums]

    def release(self) -> None:
        """Drop the pins of a failed update."""
        for embedding in self._rows:
            embedding.release()

    def clear(self) -> None:
        """Forget the waiting gradients."""
        self.steps = 0
        self.present = False
        self._dense.clear()
        self._rows.clear()


def apply_gradients(end: StepEpilogue, rows: list[RowGrads], dense: list[DenseGrads], vote: Vote | None = None) -> bool:
    """Unscale and clip all gradients together, then update rows and dense parameters. Returns whether they moved.

    Where a gradient scaler is set and a gradient is not finite, nothing moves, and the scale falls.

    vote: of the ranks that share the rows, whose mean is trained; the gradients of rows are on their way to them.
    """
    scale, finite = end.share, True
    if vote is not None:
        scale, finite, dense = scale / vote.present, vote.finite, _with_grads(dense, vote.sums)
    scaler = end.scaler if end.scaler is not None and end.scaler.is_enabled() else None
    grads = [grad for part in dense for grad in part.grads]
    if scaler is not None:
        scale *= 1.0 / scaler.get_scale()
        finite = finite and are_finite([*grads, *(g for part in rows for g in part.grads if vote is None)])
        _tell(scaler, finite)
    if finite:
        if end.max_norm is not None:
            squares = sum_of_squares(grads) + sum(r.batch.square_gradients(r.grads, r.weights) for r in rows)
            share = end.max_norm / (math.sqrt(squares) * scale + 1e-6)  # as torch.nn.utils.clip_grad_norm_
            scale *= 1.0 if share > 1.0 else share
        for batch, of_rows, weights in rows:
            batch.update(of_rows, weights, scale, end.clip_value)
    else:
        for batch, *_ in rows:
            batch.release()
        return False
    return step_dense(end, dense, scale)


def are_finite(grads: list[Tensor]) -> bool:
    """Whether no element is infinite or NaN."""
    return bool(get_total_norm([grad for grad in grads if grad.numel()], math.inf).isfinite())


def _with_grads(dense: list[DenseGrads], grads: list[Tensor]) -> list[DenseGrads]:
    following = iter(grads)
    return [part._replace(grads=list(islice(following, len(part.grads)))) for part in dense]


def step_dense(end: StepEpilogue, dense: list[DenseGrads], scale: float = 1.0) -> bool:
    """What `apply_gradients` does to dense parameters."""
    for optimizer, params, grads in dense:
        dense_step(optimizer, params, _changed(grads, scale, end.clip_value))
    return True


def accumulate(
    end: StepEpilogue, rows: list[LookupGrads], dense: list[DenseGrads], exchanges: Any = None, present: bool = True
) -> bool:
    """Keep the gradients of a step. After the last of `end.every` steps, do as `apply_gradients` with their sums.

    Where `apply_gradients` raises, as on a full capacity, the gradients are dropped, and the next call begins anew.

    exchanges: with the ranks that share the rows. present: whether this rank has a batch in this step.
    """
    if exchanges is not None:
        exchanges.vote([], finite=True)  # no rank keeps what another one failed to compute
        end.present = end.present or present
    end.keep(rows, dense)
    if end.steps < end.every:
        return False
    try:
        return apply_gradients(end, *(end.pin() if exchanges is None else exchanges.pin(end)))
    except BaseException:
        end.release()
        raise
    finally:
        end.clear()


def schedule(scheduler: LRScheduler, stepped: bool = True) -> None:
    """One step of a learning rate schedule, if the optimizers had a step."""
    if stepped:
        scheduler.step()


def check_schedule(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """OptimizerError for what is no schedule of this optimizer, or a schedule that needs more than the step count."""
    if not isinstance(scheduler, LRScheduler):
        raise OptimizerError(
            f"lr_sch={type(scheduler).__name__}: give a scheduler of torch.optim.lr_scheduler, made over the optimizer"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise OptimizerError("lr_sch=ReduceLROnPlateau: its step() needs a metric; call it yourself after the graph")
    if scheduler.optimizer is not optimizer:
        raise OptimizerError(
            f"lr_sch={type(scheduler).__name__} is of another optimizer; make it over the one given to add_optimizer"
        )


def _changed(grads: list[Tensor], scale: float, clip_value: float | None) -> list[Tensor]:
    """Gradients scaled and clipped. Not in place: a gradient may be a view, or a result of the step."""
    if grads and scale != 1.0:
        grads = list(torch._foreach_mul(grads, scale))
    if grads and clip_value is not None:
        grads = list(torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -clip_value), clip_value))
    return grads


def _tell(scaler: GradScaler, finite: bool) -> None:
    """Let the scaler adapt its scale. It looks at an optimizer's gradients: here at one number that says `finite`."""
    probe = torch.zeros(())
    probe.grad = torch.tensor(0.0 if finite else math.inf)
    scaler.unscale_(torch.optim.SGD([probe], lr=0.0))
    scaler.update()
