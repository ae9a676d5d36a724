"""The pass that lets a step for many sizes take all numbers from its inputs' sizes at its beginning.

A recording takes a size from the tensor where it met that size first, at the time when the size is needed. By then an
op may have changed the tensor's shape in place. A stride that a kernel chooses need not be the recorded one either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ...engine.errors import GraphError
from ..trace.alias import is_reshape


def sizes_from_inputs(module: fx.GraphModule) -> None:
    """Replace nodes that read a size, a stride or an offset of a tensor by numbers made of the placeholders' sizes.

    GraphError where the step changes the shape of an input or of a live tensor in place: no other call has that size.
    """
    graph = module.graph
    if any(is_reshape(node) and node.args[0].op != "call_function" for node in graph.nodes):
        raise GraphError("build changes the shape of an argument, a parameter or a buffer in place")
    read = [node for node in graph.nodes if _is_size(node) and _reads_tensor(node)]
    before = set(graph.nodes)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        known = _open_sizes(graph)
        symbols = dict(known)
        for node in read:
            expression = node.meta["val"].node.expr
            if expression not in known:
                known[expression] = sympy_interp(PythonReferenceAnalysis, symbols, expression)
            value = known[expression]
            node.replace_all_uses_with(value.node if isinstance(value, fx.Proxy) else value)
    for node in read:
        graph.erase_node(node)
    for node in graph.nodes:
        if node not in before and "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)


def _open_sizes(graph: fx.Graph) -> dict[Any, Any]:
    """The sympy symbols of a recording, each with the proxy of a node that reads it from a placeholder."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    found: dict[Any, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in found:
                asked = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                asked.meta["val"] = size
                found[size.node.expr] = fx.Proxy(asked, tracer)
    return found


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def _reads_tensor(node: fx.Node) -> bool:
    return any(isinstance(source.meta.get("val"), Tensor) for source in node.all_input_nodes)
