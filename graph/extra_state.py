"""What a graph's state_dict holds beside parameters and buffers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..engine.errors import GraphError
from .checkpoint import embeddings_of
from .optimizers import OptimizerSet
from .step_end import StepEnd

log = logging.getLogger("tierbed")


def extra_state(root: nn.Module, optimizers: OptimizerSet, end: StepEnd) -> dict[str, Any]:
    """States of optimizers, schedules, scaler and random numbers; of each open embedding its step and last snapshot.

    GraphError while gradients of several steps wait for their update: they are in no state.
    """
    if end.steps:
        raise GraphError(
            f"gradients of {end.steps} of {end.every} steps wait for their update, and a state holds none; take it "
            "after the last of them"
        )
    return {
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedules": [scheduler.state_dict() for scheduler in optimizers.schedulers()],
        "scaler": None if end.scaler is None else end.scaler.state_dict(),
        "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])],
        "embeddings": {
            path: {"step": int(embedding.metrics()["table"]["step"]), "snapshot": embedding.last_snapshot}
            for path, embedding in embeddings_of(root).items()
            if embedding.is_open
        },
    }


def load_extra_state(root: nn.Module, optimizers: OptimizerSet, end: StepEnd, state: dict[str, Any]) -> None:
    """Put back what `extra_state` gave. Rows stay as they are: it warns where they are not of the same step.

    GraphError where the graph has other numbers of optimizers and schedules.
    """
    holders: dict[str, list[Any]] = {"optimizers": list(optimizers), "schedules": optimizers.schedulers()}
    for what, mine in holders.items():
        if len(mine) != len(state[what]):
            raise GraphError(
                f"the state has {len(state[what])} {what}, and this graph {len(mine)}; add the same by add_optimizer"
            )
        for one, held in zip(mine, state[what], strict=True):
            one.load_state_dict(held)
    if end.scaler is not None and state["scaler"] is not None:
        end.scaler.load_state_dict(state["scaler"])
    end.clear()
    cpu, *cuda = state["random"]
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(cuda)
    embeddings = embeddings_of(root)
    for path, held in state["embeddings"].items():
        embedding = embeddings.get(path)
        if embedding is None or not embedding.is_open:
            continue
        step = int(embedding.metrics()["table"]["step"])
        if step != held["step"]:
            log.warning(
                "embedding %r has rows of step %d, and the state is of step %d; a state_dict holds no rows: load its "
                "snapshot (the last one then was %r), or use graph.save and graph.load",
                embedding.name,
                step,
                held["step"],
                held["snapshot"],
            )
