"""Refuses modules that keep parameters equal across ranks, because such modules do not synchronize rows."""

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
from ...engine.ops.embedding_base import EmbeddingBase

log = logging.getLogger("tierbed")

# wrapper classes are recognized by their module's name, so that this file imports none of those modules
_TORCHREC_MODULE = "torchrec.distributed.model_parallel"
_TORCH_WRAPPERS = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed._composable")
_DTENSOR_MODULE = "torch.distributed.tensor"
IGNORES_EMBEDDINGS_ATTR = "tierbed_leaves_rows"  # marks a DistributedDataParallel that ignores embeddings with a world


def normalize_world(world: World | None, name: str) -> World | None:
    """Return embedding `name`'s world, or None for a world of one rank. Raises OptionError if `world` is no World."""
    if world is None:
        return None
    if not isinstance(world, World):
        raise OptionError(f"world={type(world).__name__}: give a World of tierbed.distributed, or None")
    return world if world.size > 1 else None


def warn_without_world(name: str) -> None:
    """Warn if a job has several processes but embedding `name` lacks a world: each process trains separate rows."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        log.warning(
            "embedding %r has no world, and torch's process group has %d processes: each process has separate rows; "
            "give world=World.from_env() to share the rows",
            name,
            dist.get_world_size(),
        )


def check_not_sharded(root: nn.Module) -> None:
    """Raise GraphError if a module or parameter in a graph is sharded or kept equal across ranks."""
    if (problem := _find_sharded(root, "the graph")) is not None:
        raise _make_graph_error(problem)


def check_eager_world(root: nn.Module, embeddings: Sequence[EmbeddingBase]) -> World | None:
    """Return the common world of an EagerOptimizer's embeddings, or None. Raises OptimizerError if rows would diverge.

    Rows diverge if the embeddings have different worlds. Without a world, rows also diverge if `root` contains a module
    that shards or replicates parameters across ranks. Such a module must not contain an embedding with a world.
    """
    worlds = {id(embedding.world): embedding.world for embedding in embeddings}
    if len(worlds) > 1:
        names = ", ".join(repr(embedding.name) for embedding in embeddings)
        raise OptimizerError(f"embeddings {names} have different worlds; give all of them the same world, or none")
    world: World | None = next(iter(worlds.values()), None)
    if world is None and embeddings and (problem := _find_sharded(root, "the module")) is not None:
        raise _make_error(OptimizerError, problem, "an EagerOptimizer", "EagerOptimizer")
    for path, module in root.named_modules():
        children = module.modules() if _is_wrapper(module) else ()
        inner = next((child for child in children if child in embeddings), None)
        if isinstance(inner, EmbeddingBase):
            raise OptimizerError(
                f"embedding {inner.name!r} exchanges its rows by a World, so it must not be in {path or 'the module'}, "
                f"a {type(module).__name__}; wrap the other modules instead"
            )
    return world


def check_lookup_outside_ddp(name: str) -> None:
    """Raise OptimizerError if a training lookup of embedding `name` runs inside a DistributedDataParallel."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and not hasattr(wrapper, IGNORES_EMBEDDINGS_ATTR):
        raise _make_error(OptimizerError, f"embedding {name!r} is in {_describe_ddp()}", "its training", "the loop")


def _find_sharded(root: nn.Module, root_name: str) -> str | None:
    """Describe the first module or parameter that is sharded or kept equal across ranks; None without one."""
    for path, module in root.named_modules():
        if _is_wrapper(module):
            return f"{path or root_name} is {_describe_wrapper(module)}"
    for path, parameter in root.named_parameters():
        if type(parameter).__module__.startswith(_DTENSOR_MODULE):
            return f"{path} is a {type(parameter).__name__}"
    return None


def _is_wrapper(module: nn.Module) -> bool:
    is_wrapper = any(kind.__module__.startswith((*_TORCH_WRAPPERS, _TORCHREC_MODULE)) for kind in type(module).__mro__)
    return is_wrapper and not hasattr(module, IGNORES_EMBEDDINGS_ATTR)


def check_not_in_ddp(root: nn.Module) -> None:
    """Raise GraphError if `root` is called by a DistributedDataParallel that contains `root`."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and any(module is root for module in wrapper.modules()):
        raise _make_graph_error(f"{type(root).__name__} is in {_describe_ddp()}")


def _describe_ddp() -> str:
    """Describe the DistributedDataParallel in the call stack, or the TorchRec module that created this wrapper."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and _is_from_torchrec(module):
            return _describe_wrapper(module)
        frame = frame.f_back
    return "a DistributedDataParallel"


def _is_from_torchrec(module: nn.Module) -> bool:
    return any(kind.__module__ == _TORCHREC_MODULE for kind in type(module).__mro__)


def _describe_wrapper(wrapper: nn.Module) -> str:
    note = ", which shards TorchRec's own collections alone" if _is_from_torchrec(wrapper) else ""
    return f"a {type(wrapper).__name__}{note}"


def _make_graph_error(problem: str) -> TierbedError:
    return _make_error(GraphError, problem, "a graph's step", "the graph")


def _make_error(error: type[TierbedError], problem: str, trainer: str, owner: str) -> TierbedError:
    return error(
        f"{problem}: {trainer} does not talk to other ranks, whose parameters and rows would diverge; give {owner} the "
        "module without it, and train in one process, or give its embeddings a World of tierbed.distributed"
    )
