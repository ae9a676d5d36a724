"""The extra state in a graph's state_dict, next to parameters and buffers, and the check that one fits a graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...embedding.optim.eager import EagerOptimizer
from ...embedding.saving.rows_reference import RowsReference
from ...embedding.state_dict.saved_rows import EXTRA, SavedRows
from ...engine.errors import GraphError, TierbedError
from ...engine.optim.row_optimizer import RowOptimizer
from ..passes.step_epilogue import StepEpilogue
from ..trace.swap import set_grads
from .checkpoint import copied, error_text, others_random, own_random, shared_world, versions_of
from .kept import MALFORMED
from .optimizer_set import OptimizerSet, embeddings_of

_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # that schedules add to param groups


def check_not_waiting(end: StepEpilogue) -> None:
    """GraphError while accumulated gradients wait for their update, since no state holds these."""
    if end.waiting_calls:
        raise GraphError(
            f"gradients of {end.waiting_calls} of {end.accumulate_steps} accumulated calls wait for their update, and "
            "a state cannot hold them; take it after the last of these calls, or call drop_grads() first"
        )


class Training(NamedTuple):
    """What trains a model. of: what has it. remedies: how the user gives it the same as before."""

    optimizers: Sequence[Optimizer]
    rows: Sequence[RowOptimizer]
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
        """Load what `state` returned, from a copy: optimizers train the tensors that they are given.

        Raises one of MALFORMED or GraphError in the middle if a value is of another type.
        """
        state = copy.deepcopy(state)
        for number, (optimizer, loaded) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            optimizer.load_state_dict(loaded)
            try_step(optimizer, f"optimizer {number} of the state")
        for rows in self.rows:
            rows.hyper(1)  # the errors of its group
        for scheduler, loaded in zip(self.schedules, state["schedules"], strict=True):
            scheduler.load_state_dict(loaded)
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        cpu, *cuda = state["random"]
        torch.set_rng_state(cpu)
        if cuda and torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all(cuda[: torch.cuda.device_count()])


def training_of(optimizers: OptimizerSet, end: StepEpilogue) -> Training:
    """What trains a graph."""
    remedy = "add the same by add_optimizer, or if it only scores, graph.load(path, optimizers=False)"
    return Training(
        [*optimizers],
        [*optimizers.rows.values()],
        optimizers.schedulers(),
        end.scaler,
        "this graph",
        remedy,
        "call set_grad_scaler({})",
    )


def check_extra_state(training: Training, state: dict[str, Any]) -> None:
    """GraphError if the numbers of optimizers, schedules, parameters in a group, or scalers differ.

    One of MALFORMED or GraphError for a value of another type.
    """
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
        check_like({}, saved["state"], f"optimizer {number}: state")
        for key, of_parameter in saved["state"].items():
            if type(key) is int:  # another key is an optimizer's own
                check_like({}, of_parameter, f"optimizer {number}: state")
        scheduled = _SCHEDULED if training.schedules else ()  # else no state is of a schedule
        optional = [name for name, value in optimizer.defaults.items() if value is None]
        for group, theirs in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
            typed = group | dict.fromkeys(optional)
            check_like(typed, theirs, f"optimizer {number}: param group", typed.keys() - scheduled)
            if any(_kind(theirs.get(name)) not in ("NoneType", "bool", "number") for name in optional):
                raise _malformed(f"optimizer {number}: one of {optional} is neither a number nor None in the state")
            if group["params"] != theirs["params"] and all(type(one) is int for one in group["params"]):
                raise _malformed(f"optimizer {number} has parameters {theirs['params']} in the state")
    for scheduler, saved in zip(training.schedules, state["schedules"], strict=True):
        mine = scheduler.state_dict()
        if type(scheduler).__module__ == LRScheduler.__module__:  # a user's own may change types
            check_like(mine, saved, type(scheduler).__name__, mine.keys())
            phases = saved.get("_schedule_phases", [])  # OneCycleLR's, which name numbers of param groups
            if {one for phase in phases for one in phase.values() if isinstance(one, str)} - _SCHEDULED:
                raise _malformed(f"{type(scheduler).__name__}: a phase names no number of param groups in the state")
        for name in saved.keys() & {"base_lrs", "_last_lr"}:
            if len(saved[name]) != len(scheduler.optimizer.param_groups):
                raise _malformed(f"{type(scheduler).__name__} has {len(saved[name])} learning rates in the state")
    for of_rank in [state["random"], *state.get("ranks", [])]:
        check_like([None], of_rank, "the random states")
        if any(not isinstance(one, Tensor) or one.dtype != torch.uint8 for one in of_rank):
            raise _malformed("a random state is no tensor of bytes")
    scales, scaled = training.scaler is not None and training.scaler.is_enabled(), bool(state["scaler"])
    if scales != scaled:
        has, lacks = ("the state", training.of) if scaled else (training.of, "the state")
        raise GraphError(
            f"{has} has a gradient scaler, and {lacks} has none, or one that is not enabled; "
            f"{training.remedy_of_scaler.format('scaler' if scaled else None)} before loading"
        )
    if scaled:
        mine = training.scaler.state_dict()
        check_like(mine, state["scaler"], "the gradient scaler")
        if any(type(state["scaler"][name]) is not int for name in ("growth_interval", "_growth_tracker")):
            raise _malformed("the gradient scaler counts in fractions in the state")


def _malformed(what: str) -> GraphError:
    return GraphError(f"{what}: the state is malformed; load another")


def check_like(mine: Any, theirs: Any, where: str, may_lack: Collection[Any] = ()) -> None:
    """GraphError if a saved value is of another kind than the one it replaces, or lacks a name. None takes any.

    may_lack: names that it may lack. A list has items like those that it replaces, any number of them.
    """
    if isinstance(mine, dict):
        fits = isinstance(theirs, dict) and (not mine or {*map(type, theirs)} <= {*map(type, mine)})
        for key in mine if fits else ():
            if key in theirs:
                check_like(mine[key], theirs[key], f"{where}[{key!r}]")
            elif isinstance(key, str) and key not in may_lack:
                raise _malformed(f"{where} lacks {key!r} in the state")
    elif isinstance(mine, list | tuple):
        fits = isinstance(theirs, list | tuple) and bool(theirs) >= bool(mine)
        for place, item in enumerate(theirs if fits and mine else ()):
            check_like(mine[min(place, len(mine) - 1)], item, f"{where}[{place}]")
    else:
        are_tensors = isinstance(mine, Tensor) and isinstance(theirs, Tensor)
        fits = mine is None or are_tensors or _kind(mine) == _kind(theirs)
    if not fits:
        raise _malformed(f"{where} is {type(theirs).__name__} {theirs!r:.80} in the state, and not a {_kind(mine)}")


def _kind(value: Any) -> str:
    """How values of types that stand for each other are called."""
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return "number" if is_number and not isinstance(value, bool) else type(value).__name__


def try_step(optimizer: Optimizer, where: str) -> None:
    """GraphError or one of MALFORMED if an optimizer cannot step with what it has loaded.

    A torch optimizer takes any value, and raises in the step. One of torch's own tries a step with a parameter of two
    numbers a dimension, whose state then shows what that of the others needs.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, EagerOptimizer) else optimizer
    kind: Any = type(optimizer)
    tried: dict[Any, dict[str, Any]] = {}
    if not kind.__module__.startswith("torch.optim.") or kind.__name__ in ("LBFGS", "SparseAdam"):
        return
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        raise _malformed(f"{where} has state of parameters that it lacks")
    for number, group in enumerate(optimizer.param_groups):
        if lacking := optimizer.defaults.keys() - group.keys():
            raise _malformed(f"{where}: group {number} lacks {sorted(lacking)}")
        for parameter in group["params"]:
            form = number, parameter.dim(), parameter.dtype, parameter.device
            if form not in tried:
                one = torch.zeros([2] * parameter.dim(), dtype=form[2], device=form[3], requires_grad=True)
                set_grads([one], [torch.zeros_like(one)])
                trial = kind([{**group, "params": [one]}])
                trial.step()
                tried[form] = {k: (v, getattr(v, "shape", None) == one.shape) for k, v in trial.state[one].items()}
            loaded = optimizer.state.get(parameter, {})
            check_like(dict.fromkeys(tried[form] if loaded else ()), loaded, where)
            for name in tried[form].keys() & loaded.keys():
                value, is_like_parameter = tried[form][name]
                check_like(value, loaded[name], f"{where}: {name}")
                shapes = [loaded[name].shape, parameter.shape] if is_like_parameter else []
                if len({*shapes}) > 1 and {shape.numel() for shape in shapes} != {1}:  # an old shadow is [1]
                    raise _malformed(f"{where}: {name} has shape {list(loaded[name].shape)}")
                if name == "step" and not 0 <= float(loaded[name]) < math.inf:
                    raise _malformed(f"{where}: its step is {float(loaded[name])}")


def check_modules(root: nn.Module, state: dict[str, Any], thing: str) -> None:
    """GraphError if a state_dict has other names or shapes than that of `root`.

    Modules of another version migrate their tensors themselves, and shapes of lazy modules are not known yet.
    """
    versions = versions_of(state) or {}
    migrating = tuple(
        f"{path}." if path else ""
        for path, module in root.named_modules(remove_duplicate=False)
        if path in versions and versions[path].get("version") != module._version
    )
    mine, theirs = ({k: v for k, v in one.items() if not k.startswith(migrating)} for one in (root.state_dict(), state))
    lacking, foreign = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if lacking or foreign:
        raise GraphError(
            f"the state lacks {lacking}, and has {foreign} that the {thing} lacks; load it into a {thing} with the "
            "modules of the one that saved it"
        )
    for name, value in mine.items():
        if not isinstance(value, Tensor) or is_lazy(value) or name.endswith(EXTRA):
            continue
        if not isinstance(theirs[name], Tensor):
            raise _malformed(f"{name} is a {type(theirs[name]).__name__} in the state, and not a tensor")
        shape = theirs[name].shape
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
    others = others_random(shared_world(embeddings_of(root)), "state_dict() of a graph", state["random"])
    return {**state, "ranks": others} if others else state


def load_extra_state(root: nn.Module, optimizers: OptimizerSet, end: StepEpilogue, state: Any) -> None:
    """Load what `extra_state` returned, or a tuple of `of_all_ranks`; nothing if it is empty. Rows do not change.

    GraphError for a state that does not fit or is malformed; nothing is replaced then.
    """
    training = training_of(optimizers, end)
    before: Any = None
    try:
        (state,) = state if isinstance(state, tuple) else (state,)
        if state == {}:  # a load without optimizers
            return
        check_extra_state(training, state)
        if "ranks" in state:
            world = shared_world(embeddings_of(root))
            state = {**state, "random": own_random(world, state["random"], state["ranks"])}
        before = copied(training.state())
        training.load(state)
    except MALFORMED as error:
        if before is not None:
            training.load(before)
        if isinstance(error, TierbedError):
            raise
        raise GraphError(f"the state is malformed: {error_text(error)}; load one that state_dict() returned") from error
    end.clear()
    embeddings = embeddings_of(root)
    for path, saved in state.get("embeddings", {}).items():  # of an older state, in which embeddings had none
        embedding = embeddings.get(path)
        if isinstance(embedding, SavedRows):
            embedding.await_rows(RowsReference(saved["step"], saved["snapshot"], None))
