"""Refuses to train modules that share training among ranks, since rows do not talk to other ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import FrameType

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...distributed.world import World
from ...engine.errors import GraphError, OptimizerError, OptionError, TierbedError
from ...engine.ops.rows_contract import EmbeddingBase

log = logging.getLogger("tierbed")

# by name: most of these modules are imported only by programs that use them
_TORCHREC = "torchrec.distributed.model_parallel"
_WRAPPERS = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed._composable", _TORCHREC)
_TENSORS = "torch.distributed.tensor"
LEAVES_ROWS = "tierbed_leaves_rows"  # the attribute of a DistributedDataParallel that ignores embeddings with a world


def check_world(world: World | None, name: str) -> World | None:
    """The world of embedding `name`; None for one of this process alone. OptionError for what is no World."""
    if world is None:
        return None
    if not isinstance(world, World):
        raise OptionError(f"world={type(world).__name__}: give a World of tierbed.distributed, or None")
    return world if world.size > 1 else None


def warn_alone(name: str) -> None:
    """Log, at the first use of embedding `name` without a world, that each of several processes has rows of its own."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        log.warning(
            "embedding %r has no world, and torch's process group has %d processes: each has rows of its own; give "
            "world=World.from_env() to share them",
            name,
            dist.get_world_size(),
        )


def refuse_ranks(root: nn.Module) -> None:
    """GraphError for a module or parameter under a graph that is split or kept equal over ranks."""
    if (shared := _shared(root, "the graph")) is not None:
        raise _refused(shared)


def refuse_eager_ranks(root: nn.Module, embeddings: Sequence[EmbeddingBase]) -> World | None:
    """The world of the trained embeddings of an EagerOptimizer, or None. OptimizerError where rows would drift apart.

    They would in a module or parameter that is split or kept equal over ranks, unless that is beside embeddings which
    have a world; and where embeddings differ in their worlds.
    """
    worlds = {id(embedding.world): embedding.world for embedding in embeddings}
    if len(worlds) > 1:
        names = ", ".join(repr(embedding.name) for embedding in embeddings)
        raise OptimizerError(f"embeddings {names} have different worlds; give all of them one, or none")
    world: World | None = next(iter(worlds.values()), None)
    if world is None and embeddings and (shared := _shared(root, "the module")) is not None:
        raise _refusal(OptimizerError, shared, "an EagerOptimizer", "EagerOptimizer")
    for path, module in root.named_modules():
        wrapped = next((one for one in module.modules() if one in embeddings), None) if _is_wrapper(module) else None
        if isinstance(wrapped, EmbeddingBase):
            raise OptimizerError(
                f"embedding {wrapped.name!r} is in {path or 'the module'}, a {type(module).__name__}, and its world "
                "exchanges its rows; wrap the other modules instead"
            )
    return world


def refuse_lookup(name: str) -> None:
    """OptimizerError where a lookup of embedding `name` for training is called within a DistributedDataParallel."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and not hasattr(around, LEAVES_ROWS):
        raise _refusal(OptimizerError, f"embedding {name!r} is in {_calling()}", "its training", "the loop")


def _shared(root: nn.Module, name: str) -> str | None:
    for path, module in root.named_modules():
        if _is_wrapper(module):
            return f"{path or name} is {_described(module)}"
    for path, parameter in root.named_parameters():
        if type(parameter).__module__.startswith(_TENSORS):
            return f"{path} is a {type(parameter).__name__}"
    return None


def _is_wrapper(module: nn.Module) -> bool:
    of_torch = any(kind.__module__.startswith(_WRAPPERS) for kind in type(module).__mro__)
    return of_torch and not hasattr(module, LEAVES_ROWS)


def refuse_around(root: nn.Module) -> None:
    """GraphError where a DistributedDataParallel around `root` calls it."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(module is root for module in around.modules()):
        raise _refused(f"{type(root).__name__} is in {_calling()}")


def _calling() -> str:
    """The DistributedDataParallel that calls, or TorchRec's module that made it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and _is_of_torchrec(module):
            return _described(module)
        frame = frame.f_back
    return "a DistributedDataParallel"


def _is_of_torchrec(module: nn.Module) -> bool:
    return any(kind.__module__ == _TORCHREC for kind in type(module).__mro__)


def _described(wrapper: nn.Module) -> str:
    """A wrapper, and why its sharders leave collections of tierbed as they are."""
    of_torchrec = ", which shards TorchRec's own collections alone" if _is_of_torchrec(wrapper) else ""
    return f"a {type(wrapper).__name__}{of_torchrec}"


def _refused(what: str) -> TierbedError:
    return _refusal(GraphError, what, "a graph's step", "the graph")


def _refusal(kind: type[TierbedError], what: str, who: str, taker: str) -> TierbedError:
    return kind(
        f"{what}: {who} does not talk to other ranks, whose parameters and rows would diverge; give {taker} the "
        "module without it, and train in one process, or give its embeddings a World of tierbed.distributed"
    )
