"""Checkpoints for plain training loops: a model, its embedding rows, and its optimizers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..embedding.autograd.gradients import ShadowGrad
from ..embedding.optim.eager import EagerOptimizer
from ..embedding.state_dict.saved_rows import SnapshotEmbedding, exclude_rows
from ..embedding.tables.names import name_embeddings
from ..embedding.tables.training_group import train_together
from ..engine.checks import check_flags
from ..engine.errors import GraphError, InputError
from ..engine.table.background_save import SaveHandle
from ..snapshots.store.selection import Selection
from .graph import Graph
from .state import checkpoint
from .state.extra_state import TrainingState, check_extra_state, check_modules
from .trace.names import as_path, unwrap

Optimizers = Optimizer | Sequence[Optimizer]


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = (),
    schedulers: Sequence[Any] = (),
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
    kind: str | None = None,
    background: bool = False,
) -> SaveHandle | None:
    """Write a checkpoint of a plain training loop: a folder with the model, all its rows and its optimizers.

    The checkpoint is durable when the call returns. Call this after `step()`, on all ranks. Torch's random states are
    saved too. Names in the checkpoint leave out wrappers, such as DistributedModelParallel, DistributedDataParallel and
    torch.compile's wrapper, so the checkpoint loads with or without wrappers.

    Args:
        path: The new folder.
        model: Any module. The rows of all its embeddings are saved, all from the same step.
        optimizers: One or several optimizers. Pass an EagerOptimizer, not the optimizer it wraps. Default: none.
        schedulers: Learning rate schedulers of torch. Default: none.
        scaler: A `torch.amp.GradScaler`, or None. Default: None.
        extra: A dict of other plain values and tensors, such as the epoch. `load_checkpoint` returns it.
        overwrite: Replace an existing checkpoint atomically. Default: False.
        kind, background: How to save rows, as in `Graph.save`. Defaults: None, False.

    Returns:
        A `SaveHandle` for a save in the background, otherwise None.

    Raises:
        SnapshotError: If `path` exists or cannot be written.
        GraphError: If a checkpoint cannot hold the state, or row gradients still wait for `step()`.
        InputError: If an argument is of the wrong type.
        OptionError, StoreError: As in `Graph.save`.
    """
    model, training_state = _prepare_training(model, optimizers, schedulers, scaler)
    for m in model.modules():
        grad = m.shadow.grad if isinstance(m, SnapshotEmbedding) else None
        if isinstance(grad, ShadowGrad) and grad.row_gradients.has_pending_grads:
            raise GraphError(
                f"gradients of embedding {m.name!r} wait for step(), and a checkpoint holds no gradients; save "
                "after step(), or call zero_grad() first"
            )
    folder = checkpoint.parse_new_folder(model, path, overwrite, kind, background, extra)
    with exclude_rows():
        state = _collect_state(model, training_state)
    return checkpoint.save(model, state, folder, overwrite, kind, "loop", extra, background)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = (),
    schedulers: Sequence[Any] = (),
    scaler: Any = None,
    *,
    convert: bool = False,
) -> dict[str, Any]:
    """Continue training from a checkpoint of `save_checkpoint`.

    The next steps are the same as if training had never stopped. Everything is checked before anything is replaced.

    Args:
        path: The checkpoint's folder.
        model: The model, as for `save_checkpoint`.
        optimizers, schedulers: As many as in the call of `save_checkpoint`, in the same order.
        scaler: A GradScaler, if the checkpoint has one.
        convert: True converts saved rows to the embeddings' dtype and state_dtype, as in `Graph.load`. Default: False.

    Returns:
        The dict that was saved as `extra`.

    Raises:
        SnapshotError: If the checkpoint is missing, damaged, or belongs to another model.
        InputError: If an argument is of the wrong type.
    """
    check_flags(InputError, convert=convert)
    model, training_state = _prepare_training(model, optimizers, schedulers, scaler)

    def parse_model(state: dict[str, Any]) -> OrderedDict[str, Any]:
        return checkpoint.StateDict(state["model"], checkpoint.read_versions(state))

    def check_state(state: dict[str, Any]) -> None:
        check_modules(model, parse_model(state), "model")
        check_extra_state(training_state, state["training"])

    def apply_state(state: dict[str, Any]) -> None:
        model.load_state_dict(parse_model(state))
        training_state.load_state_dict(state["training"])

    with exclude_rows():
        current_state = partial(_collect_state, model, training_state)
        selection = Selection(converts=convert)
        return checkpoint.load(model, as_path(path), check_state, apply_state, current_state, selection, kind="loop")


def _collect_state(model: nn.Module, training: TrainingState) -> OrderedDict[str, Any]:
    """Return everything that a checkpoint contains except rows and `extra`."""
    model_state = model.state_dict()
    state = {"model": dict(model_state), "training": training.state_dict()}
    return checkpoint.StateDict(state, checkpoint.read_versions(model_state))


def _prepare_training(model: Any, optimizers: Any, schedulers: Any, scaler: Any) -> tuple[nn.Module, TrainingState]:
    """Return the model without wrappers, and its `TrainingState`. Raises InputError for a wrong type."""
    model = unwrap(model) if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) or isinstance(model, Graph):
        remedy = "call its save and load" if isinstance(model, Graph) else "give the nn.Module that is trained"
        raise InputError(f"model={type(model).__name__}: {remedy}")
    name_embeddings(model)
    train_together(model.modules())
    optimizer_list = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    for item in optimizer_list:
        if not isinstance(item, Optimizer):
            raise InputError(
                f"optimizers: got {type(item).__name__}; give a torch optimizer, an EagerOptimizer, or a list of them"
            )
    torch_optimizers = [item.optimizer if isinstance(item, EagerOptimizer) else item for item in optimizer_list]
    if len({*map(id, torch_optimizers)}) < len(torch_optimizers):
        raise InputError("optimizers: one is given twice; pass an EagerOptimizer instead of the optimizer it wraps")
    scheduler_list = schedulers if isinstance(schedulers, Sequence) else [schedulers]
    for item in scheduler_list:
        if not isinstance(item, LRScheduler):
            raise InputError(f"schedulers: got {type(item).__name__}; give schedulers of torch.optim.lr_scheduler")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler={scaler!r}: give a torch.amp.GradScaler, or None")
    remedies = "pass the saved ones, in the same order", "give scaler={}"
    eager = [item for item in optimizer_list if isinstance(item, EagerOptimizer)]
    row_optimizers = [row_optimizer for item in eager for row_optimizer in item.row_optimizers()]
    return model, TrainingState(optimizer_list, row_optimizers, scheduler_list, scaler, "this call", *remedies)
