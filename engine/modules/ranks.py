"""Refuses to train modules that share training among ranks, since rows do not talk to other ranks."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import GraphError, OptimizerError, TierbedError

# by name: most of these modules are imported only by programs that use them
_WRAPPERS = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed._composable")
_TENSORS = "torch.distributed.tensor"


def refuse_ranks(root: nn.Module) -> None:
    """GraphError for a module or parameter under a graph that is split or kept equal over ranks."""
    shared = _shared(root, "the graph")
    if shared is not None:
        raise _refused(shared)


def refuse_eager_ranks(root: nn.Module) -> None:
    """OptimizerError for a module or parameter of an EagerOptimizer that is split or kept equal over ranks."""
    shared = _shared(root, "the module")
    if shared is not None:
        raise _told(OptimizerError, shared, "an EagerOptimizer", "EagerOptimizer")


def refuse_lookup(name: str) -> None:
    """OptimizerError where a lookup of embedding `name` for training is called within a DistributedDataParallel."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise _told(OptimizerError, f"embedding {name!r} is in a DistributedDataParallel", "its training", "the loop")


def _shared(root: nn.Module, name: str) -> str | None:
    for path, module in root.named_modules():
        if any(kind.__module__.startswith(_WRAPPERS) for kind in type(module).__mro__):
            return f"{path or name} is a {type(module).__name__}"
    for path, parameter in root.named_parameters():
        if type(parameter).__module__.startswith(_TENSORS):
            return f"{path} is a {type(parameter).__name__}"
    return None


def refuse_around(root: nn.Module) -> None:
    """GraphError where a DistributedDataParallel around `root` calls it."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(module is root for module in around.modules()):
        raise _refused(f"{type(root).__name__} is in a DistributedDataParallel")


def _refused(what: str) -> TierbedError:
    return _told(GraphError, what, "a graph's step", "the graph")


def _told(kind: type[TierbedError], what: str, who: str, taker: str) -> TierbedError:
    return kind(
        f"{what}: {who} does not talk to other ranks, whose parameters and rows would drift apart; give {taker} the "
        "module without it, and train in one process"
    )
