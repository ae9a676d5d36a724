"""The pass that compiles the dense part of a step with TorchInductor.

Ops that draw random numbers, change memory in place or work on rows are not compiled and keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import has_free_symbols
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

from ...engine.errors import GraphError
from ..trace.alias import find_storages, find_written_storages, is_random
from .lookups import find_sources


class InductorModule(nn.Module):
    """A subgraph of a step, compiled by Inductor."""

    def __init__(self, subgraph: fx.GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> None:
        super().__init__()
        try:
            self._compiled = torch._inductor.compile(subgraph, inputs, options=dict(options))
        except Exception as error:
            raise GraphError(
                f"compile_dense: TorchInductor could not compile the dense part: {error}; check its options and "
                "the C++ compiler, or leave out compile_dense"
            ) from error

    def forward(self, *inputs: Any) -> Any:
        return self._compiled(*inputs)


def compile_dense(module: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
    """Return the same step with its pure aten ops compiled, in groups as large as possible. Raises GraphError."""
    pure_nodes = _find_pure_nodes(module.graph)
    supported = create_op_support(lambda _, node: node in pure_nodes)
    fused_module = CapabilityBasedPartitioner(module, supported).partition_and_fuse(prefix="dense_")
    for node in fused_module.graph.find_nodes(op="call_module", sort=True):
        subgraph = fused_module.get_submodule(node.target)
        assert isinstance(subgraph, fx.GraphModule)
        inputs = [argument.meta["val"] for argument in node.args]
        fused_module.add_submodule(node.target, InductorModule(subgraph, inputs, options))
    fused_module.recompile()
    return fused_module


def _find_pure_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that Inductor may compile. Nodes that make ids or have dynamic shapes are excluded."""
    changed_storages: set[int] = set().union(*map(find_written_storages, graph.nodes))
    lookups = [node for method in ("pin", "read") for node in graph.find_nodes(op="call_method", target=method)]
    id_sources = set().union(*(find_sources(node, node.args) for node in lookups))
    return {
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node not in id_sources
        and not is_random(node.target, node.args)
        and not find_storages((node, *node.all_input_nodes)) & changed_storages
        and isinstance(node.meta.get("val"), Tensor | tuple | list)
        and not has_free_symbols([operand.meta.get("val") for operand in (node, *node.all_input_nodes)])
    }
