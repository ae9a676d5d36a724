"""What a graph refuses, since a recorded step does not talk to other ranks: modules that share training among them."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..engine.errors import GraphError

# by name: most of them are imported by those alone who use them
_WRAPPERS = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed._composable")
_TENSORS = "torch.distributed.tensor"


def refuse_ranks(root: nn.Module) -> None:
    """GraphError for a module or parameter under `root` that is split or kept equal over ranks."""
    for path, module in root.named_modules():
        if any(kind.__module__.startswith(_WRAPPERS) for kind in type(module).__mro__):
            raise _refused(f"{path or 'the graph'} is a {type(module).__name__}")
    for path, parameter in root.named_parameters():
        if type(parameter).__module__.startswith(_TENSORS):
            raise _refused(f"{path} is a {type(parameter).__name__}")


def refuse_around(root: nn.Module) -> None:
    """GraphError where `root` is called by a DistributedDataParallel around it."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(module is root for module in around.modules()):
        raise _refused(f"{type(root).__name__} is in a DistributedDataParallel")


def _refused(what: str) -> GraphError:
    return GraphError(
        f"{what}: a graph's step does not talk to other ranks, whose parameters and rows would drift apart; give the "
        "graph the module without it, and train in one process"
    )
