"""A compiled step in two: what computes, and what moves parameters and rows by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def split(
    module: fx.GraphModule, graph: fx.Graph, last: set[Callable[..., Any]]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A step in two modules: `graph` without the calls of functions in `last`, and these calls, in their order.

    `graph` was made of the graph of `module`, and is used up here. The first module returns (results, the arguments of
    the second).
    """
    output, end = graph.output_node(), fx.Graph()
    moving = [node for node in graph.nodes if node.target in last]
    sources = dict.fromkeys(source for node in moving for source in node.all_input_nodes if source not in moving)
    taken = [source for source in sources if source.op != "get_attr"]
    copies: dict[fx.Node, fx.Node] = {}
    for source in taken:
        copies[source] = end.placeholder(source.name)
        copies[source].meta.update(source.meta)
    for node in graph.nodes:
        if node in moving or (node in sources and node.op == "get_attr"):
            copies[node] = end.node_copy(node, copies.__getitem__)
    end.output(None)
    output.args = ((output.args[0], taken),)
    for node in reversed(moving):
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    return fx.GraphModule(module, graph), fx.GraphModule(module, end)
