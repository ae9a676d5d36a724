"""What a graph's state_dict holds beside parameters and buffers, and whether one fits a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...engine.errors import GraphError
from ...engine.modules.saved_rows import EXTRA, SavedRows
from ...engine.persist.saved_as import SavedAs
from ..passes.ranks import refuse_worlds
from ..passes.step_end import StepEnd
from .optimizers import OptimizerSet, embeddings_of
from .saving import Saving


def extra_state(optimizers: OptimizerSet, end: StepEnd) -> dict[str, Any]:
    """States of optimizers, schedules, scaler and random numbers.

    GraphError while gradients of several steps wait for their update, since no state holds these.
    """
    if end.steps:
        raise GraphError(
            f"gradients of {end.steps} of {end.every} steps wait for their update, and a state holds none; take it "
            "after the last of them, or call drop_grads() first"
        )
    return {
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedules": [scheduler.state_dict() for scheduler in optimizers.schedulers()],
        "scaler": None if end.scaler is None else end.scaler.state_dict(),
        "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])],
    }


def check_extra_state(optimizers: OptimizerSet, end: StepEnd, state: dict[str, Any]) -> None:
    """GraphError where the graph has other numbers of optimizers, schedules, parameters in a group, or scalers."""
    for what, mine in (("optimizers", list(optimizers)), ("schedules", optimizers.schedulers())):
        if len(mine) != len(state[what]):
            raise GraphError(
                f"the state has {len(state[what])} {what}, and this graph {len(mine)}; add the same by add_optimizer, "
                "or where it only scores, graph.load(path, optimizers=False)"
            )
    for number, (optimizer, held) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        theirs, ours = ([len(g["params"]) for g in groups] for groups in (held["param_groups"], optimizer.param_groups))
        if theirs != ours:
            raise GraphError(
                f"optimizer {number} of the state, the first being 0, has groups of {theirs} parameters, and that of "
                f"this graph of {ours}; make it over the same parameters"
            )
    scales, scaled = end.scaler is not None and end.scaler.is_enabled(), bool(state["scaler"])
    if scales != scaled:
        has, lacks = ("the state", "this graph") if scaled else ("this graph", "the state")
        raise GraphError(
            f"{has} has a gradient scaler, and {lacks} has none, or one that is not enabled; call "
            f"set_grad_scaler({'scaler' if scaled else None}) before loading"
        )


def check_state(
    root: nn.Module, optimizers: OptimizerSet, end: StepEnd, state: dict[str, Any], with_optimizers: bool = True
) -> None:
    """GraphError where a state_dict has other names, shapes, or numbers of optimizers than that of the graph.

    Modules of another version migrate their tensors themselves, and shapes of lazy modules are not known yet.
    """
    versions = getattr(state, "_metadata", None) or {}
    own: dict[str, Any] = {EXTRA: None}
    for name, tensor in [*root._parameters.items(), *root._buffers.items()]:
        if tensor is not None and name not in root._non_persistent_buffers_set:
            own[name] = tensor
    for name, child in root._modules.items():
        own.update({} if child is None else child.state_dict(prefix=f"{name}."))
    migrating = tuple(
        f"{path}." if path else ""
        for path, module in root.named_modules(remove_duplicate=False)
        if path in versions and versions[path].get("version") != module._version
    )
    mine, theirs = ({k: v for k, v in one.items() if not k.startswith(migrating)} for one in (own, state))
    lacking, foreign = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if lacking or foreign:
        raise GraphError(
            f"the state lacks {lacking}, and has {foreign} that the graph has not; load it into a graph with the "
            "modules of the one that saved it"
        )
    for name, value in mine.items():
        if not isinstance(value, Tensor) or is_lazy(value) or name.endswith(EXTRA):
            continue
        held = theirs[name].shape if isinstance(theirs[name], Tensor) else ()
        if value.shape != held:
            raise GraphError(
                f"{name} has shape {list(held)} in the state, and {list(value.shape)} in the graph; give its module "
                "the size that it was saved with"
            )
    if EXTRA in state and with_optimizers:
        check_extra_state(optimizers, end, state[EXTRA])


def without_rows(root: nn.Module, state: dict[str, Any], optimizers: bool) -> dict[str, Any]:
    """The state_dict of a checkpoint, without the rows, which were loaded; optimizers: whether with optimizers."""
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, SavedRows):
            state.pop(f"{path}.{EXTRA}", None)
    if EXTRA in state:
        state[EXTRA] = {field: of for field, of in state[EXTRA].items() if field != "embeddings"} if optimizers else {}
    return state


def of_all_ranks(root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The extra state with the random numbers of all ranks that share the rows, which all call this."""
    others = _saving(root).others_random(state["random"])
    return {**state, "ranks": others} if others else state


def of_this_rank(root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """What `of_all_ranks` made, with the random numbers of this rank alone."""
    if "ranks" not in state:
        return state
    return {**state, "random": _saving(root).own_random(state["random"], state["ranks"])}


def _saving(root: nn.Module) -> Saving:
    return Saving(refuse_worlds(embeddings_of(root)), "state_dict() of a graph")


def load_extra_state(root: nn.Module, optimizers: OptimizerSet, end: StepEnd, state: dict[str, Any]) -> None:
    """Put back what `extra_state` gave, or nothing for an empty one. Rows stay as they are.

    Raises what `check_extra_state` raises, before anything is put back.
    """
    if not state:  # empty: a load without optimizers
        return
    check_extra_state(optimizers, end, state)
    for optimizer, held in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(held)
    for scheduler, held in zip(optimizers.schedulers(), state["schedules"], strict=True):
        scheduler.load_state_dict(held)
    if end.scaler is not None and state["scaler"]:
        end.scaler.load_state_dict(state["scaler"])
    end.clear()
    cpu, *cuda = state["random"]
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(cuda)
    embeddings = embeddings_of(root)
    for path, held in state.get("embeddings", {}).items():  # of an older state, without that of embeddings
        embedding = embeddings.get(path)
        if isinstance(embedding, SavedRows):
            embedding.await_rows(SavedAs(held["step"], held["snapshot"], None))
