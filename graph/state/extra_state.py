"""The extra state in a graph's state_dict, next to parameters and buffers, and the check that one fits a graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...embedding.rows_reference import RowsReference
from ...embedding.saved_rows import EXTRA, SavedRows
from ...engine.errors import GraphError
from ..passes.collectives import refuse_worlds
from ..passes.step_epilogue import StepEpilogue
from .checkpoint import CheckpointRanks
from .optimizer_set import OptimizerSet, embeddings_of


def extra_state(optimizers: OptimizerSet, end: StepEpilogue) -> dict[str, Any]:
    """States of optimizers, schedules, scaler and random numbers.

    GraphError while accumulated gradients wait for their update, since no state holds these.
    """
    if end.waiting_calls:
        raise GraphError(
            f"gradients of {end.waiting_calls} of {end.accumulate_steps} accumulated calls wait for their update, and "
            "a state cannot hold them; take it after the last of these calls, or call drop_grads() first"
        )
    return _of_graph(optimizers, end).state()


class Training(NamedTuple):
    """What trains a model. of: what has it. remedies: how the user gives it the same as before."""

    optimizers: Sequence[Optimizer]
    schedules: Sequence[Any]
    scaler: Any
    of: str
    remedy: str
    remedy_of_scaler: str

    def state(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [scheduler.state_dict() for scheduler in self.schedules],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned, from a copy: optimizers train the tensors that they are given."""
        state = copy.deepcopy(state)
        for optimizer, loaded in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(loaded)
        for scheduler, loaded in zip(self.schedules, state["schedules"], strict=True):
            scheduler.load_state_dict(loaded)
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        cpu, *cuda = state["random"]
        torch.set_rng_state(cpu)
        if cuda and torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all(cuda)


def _of_graph(optimizers: OptimizerSet, end: StepEpilogue) -> Training:
    remedy = "add the same by add_optimizer, or if it only scores, graph.load(path, optimizers=False)"
    return Training(
        [*optimizers], optimizers.schedulers(), end.scaler, "this graph", remedy, "call set_grad_scaler({})"
    )


def check_extra_state(training: Training, state: dict[str, Any]) -> None:
    """GraphError if the numbers of optimizers, schedules, parameters in a group, or scalers differ."""
    optimizers = training.optimizers
    for what, mine in (("optimizers", optimizers), ("schedules", training.schedules)):
        if len(mine) != len(state[what]):
            raise GraphError(
                f"the state has {len(state[what])} {what}, and {training.of} {len(mine)}; {training.remedy}"
            )
    for number, (optimizer, saved) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        theirs, ours = (
            [len(g["params"]) for g in groups] for groups in (saved["param_groups"], optimizer.param_groups)
        )
        if theirs != ours:
            raise GraphError(
                f"optimizer {number} of the state, the first being 0, has groups of {theirs} parameters, and that of "
                f"{training.of} of {ours}; make it over the same parameters"
            )
    scales, scaled = training.scaler is not None and training.scaler.is_enabled(), bool(state["scaler"])
    if scales != scaled:
        has, lacks = ("the state", training.of) if scaled else (training.of, "the state")
        raise GraphError(
            f"{has} has a gradient scaler, and {lacks} has none, or one that is not enabled; "
            f"{training.remedy_of_scaler.format('scaler' if scaled else None)} before loading"
        )


def check_state(
    root: nn.Module, optimizers: OptimizerSet, end: StepEpilogue, state: dict[str, Any], with_optimizers: bool = True
) -> None:
    """GraphError if a state_dict has other names, shapes, or numbers of optimizers than that of the graph.

    Modules of another version migrate their tensors themselves, and shapes of lazy modules are not known yet.
    """
    own: dict[str, Any] = {EXTRA: None}
    for name, tensor in [*root._parameters.items(), *root._buffers.items()]:
        if tensor is not None and name not in root._non_persistent_buffers_set:
            own[name] = tensor
    for name, child in root._modules.items():
        own.update({} if child is None else child.state_dict(prefix=f"{name}."))
    check_modules(root, own, state, "graph")
    if EXTRA in state and with_optimizers:
        check_extra_state(_of_graph(optimizers, end), state[EXTRA])


def check_modules(root: nn.Module, own: dict[str, Any], state: dict[str, Any], thing: str) -> None:
    """GraphError if a state_dict has other names or shapes than `own`, that of `root`."""
    versions = getattr(state, "_metadata", None) or {}
    migrating = tuple(
        f"{path}." if path else ""
        for path, module in root.named_modules(remove_duplicate=False)
        if path in versions and versions[path].get("version") != module._version
    )
    mine, theirs = ({k: v for k, v in one.items() if not k.startswith(migrating)} for one in (own, state))
    lacking, foreign = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if lacking or foreign:
        raise GraphError(
            f"the state lacks {lacking}, and has {foreign} that the {thing} lacks; load it into a {thing} with the "
            "modules of the one that saved it"
        )
    for name, value in mine.items():
        if not isinstance(value, Tensor) or is_lazy(value) or name.endswith(EXTRA):
            continue
        shape = theirs[name].shape if isinstance(theirs[name], Tensor) else ()
        if value.shape != shape:
            raise GraphError(
                f"{name} has shape {list(shape)} in the state, and {list(value.shape)} in the {thing}; give its module "
                "the size that it was saved with"
            )


def without_rows(root: nn.Module, state: dict[str, Any], optimizers: bool) -> dict[str, Any]:
    """The state_dict of a checkpoint without rows, which were loaded before. optimizers: whether with optimizers."""
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, SavedRows):
            state.pop(f"{path}.{EXTRA}", None)
    if EXTRA in state:
        state[EXTRA] = {field: of for field, of in state[EXTRA].items() if field != "embeddings"} if optimizers else {}
    return state


def of_all_ranks(root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The extra state with the random states of all ranks, which all call this."""
    others = _saving(root).others_random(state["random"])
    return {**state, "ranks": others} if others else state


def of_this_rank(root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The extra state of `of_all_ranks`, with the random state of this rank alone."""
    if "ranks" not in state:
        return state
    return {**state, "random": _saving(root).own_random(state["random"], state["ranks"])}


def _saving(root: nn.Module) -> CheckpointRanks:
    return CheckpointRanks(refuse_worlds(embeddings_of(root)), "state_dict() of a graph")


def load_extra_state(root: nn.Module, optimizers: OptimizerSet, end: StepEpilogue, state: dict[str, Any]) -> None:
    """Load what `extra_state` returned, nothing if it is empty. Rows do not change.

    Raises what `check_extra_state` raises, before anything is loaded.
    """
    if not state:  # empty: a load without optimizers
        return
    training = _of_graph(optimizers, end)
    check_extra_state(training, state)
    training.load(state)
    end.clear()
    embeddings = embeddings_of(root)
    for path, saved in state.get("embeddings", {}).items():  # of an older state, in which embeddings had none
        embedding = embeddings.get(path)
        if isinstance(embedding, SavedRows):
            embedding.await_rows(RowsReference(saved["step"], saved["snapshot"], None))
