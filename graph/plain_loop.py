"""Checkpoints of plain loops: a model with the rows of its embeddings, and what trains it."""

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
from ..embedding.state_dict.saved_rows import SavedRows, rows_apart
from ..embedding.tables.names import name_embeddings
from ..embedding.tables.training_group import train_together
from ..engine.checks import check_flags
from ..engine.errors import GraphError, InputError
from ..snapshots.store.selection import Selection
from .graph import Graph
from .state import checkpoint
from .state.extra_state import Training, check_extra_state, check_modules
from .trace.names import path_of, unwrapped

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
) -> None:
    """Write a checkpoint, the folder `path`: a model with all its rows, and what trains it. `graph.save` for loops.

    The checkpoint is durable on return. Call it after step(); over ranks, all of them call it.

    model: any module; the rows of all embeddings in it are saved at the same step. Names in a checkpoint leave out
    wrappers such as DistributedModelParallel, DistributedDataParallel and that of torch.compile, so it loads with any
    of them, or none. optimizers: one or several, an
    EagerOptimizer instead of the optimizer that it wraps. schedulers: of torch's learning rates. scaler: a GradScaler.
    extra: plain values and tensors of your own, such as the epoch, which `load_checkpoint` returns. Random states of
    torch are saved as well. overwrite: whether to replace an existing checkpoint, atomically.
    Raises SnapshotError if `path` exists or cannot be written, GraphError for a state that a checkpoint cannot hold,
    InputError for an argument of another type.
    """
    model, training = _training(model, optimizers, schedulers, scaler)
    for one in model.modules():
        if isinstance(one, SavedRows) and isinstance(one.shadow.grad, ShadowGrad) and one.shadow.grad.rows.is_waiting:
            raise GraphError(
                f"gradients of embedding {one.name!r} wait for step(), and a checkpoint holds none; save after step(), "
                "or call zero_grad() first"
            )
    if extra is not None and not isinstance(extra, Mapping):
        raise InputError(f"extra={extra!r}: give a dict of plain values and tensors, or None")
    folder = checkpoint.check_save(model, path, overwrite)
    with rows_apart():
        state = _state(model, training, extra or {})
    checkpoint.save(model, state, folder, overwrite, "loop")


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = (),
    schedulers: Sequence[Any] = (),
    scaler: Any = None,
    *,
    convert: bool = False,
) -> dict[str, Any]:
    """Continue from a checkpoint of `save_checkpoint`: the next steps are those of a run that never stopped.

    The arguments are those of the save. convert: as of `Graph.load`. Returns its `extra`. Raises SnapshotError for a
    checkpoint that is missing, damaged or of another model, before anything is replaced, and InputError for an argument
    of another type.
    """
    check_flags(InputError, convert=convert)
    model, training = _training(model, optimizers, schedulers, scaler)

    def model_state(state: dict[str, Any]) -> OrderedDict[str, Any]:
        return checkpoint.StateDict(state["model"], checkpoint.versions_of(state))

    def check(state: dict[str, Any]) -> None:
        check_modules(model, model_state(state), "model")
        check_extra_state(training, state["training"])

    def put(state: dict[str, Any]) -> None:
        model.load_state_dict(model_state(state))
        training.load(state["training"])
        extra.update(state["extra"])

    extra: dict[str, Any] = {}
    with rows_apart():
        now = partial(_state, model, training, {})
        checkpoint.load(model, path_of(path), check, put, now, Selection(convert=convert), of="loop")
    return extra


def _state(model: nn.Module, training: Training, extra: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """All that a checkpoint holds but rows."""
    of_model = model.state_dict()
    state = {"model": dict(of_model), "training": training.state(), "extra": dict(extra)}
    return checkpoint.StateDict(state, checkpoint.versions_of(of_model))


def _training(model: Any, optimizers: Any, schedulers: Any, scaler: Any) -> tuple[nn.Module, Training]:
    """The model without wrappers around it, and what trains it. InputError for arguments of another type."""
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) or isinstance(model, Graph):
        remedy = "call its save and load" if isinstance(model, Graph) else "give the nn.Module that is trained"
        raise InputError(f"model={type(model).__name__}: {remedy}")
    name_embeddings(model)
    train_together(model.modules())
    given = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    for one in given:
        if not isinstance(one, Optimizer):
            raise InputError(
                f"optimizers: got {type(one).__name__}; give a torch optimizer, an EagerOptimizer, or a list of them"
            )
    wrapped = [one.optimizer if isinstance(one, EagerOptimizer) else one for one in given]
    if len({*map(id, wrapped)}) < len(wrapped):
        raise InputError(
            "optimizers: one is given twice; give an EagerOptimizer instead of the optimizer that it wraps"
        )
    listed = schedulers if isinstance(schedulers, Sequence) else [schedulers]
    for one in listed:
        if not isinstance(one, LRScheduler):
            raise InputError(f"schedulers: got {type(one).__name__}; give schedulers of torch.optim.lr_scheduler")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler={scaler!r}: give a torch.amp.GradScaler, or None")
    remedy, of_scaler = "give those that were saved, in their order", "give scaler={}"
    rows = [row for one in given if isinstance(one, EagerOptimizer) for row in one.row_optimizers()]
    return model, Training(given, rows, listed, scaler, "this call", remedy, of_scaler)
