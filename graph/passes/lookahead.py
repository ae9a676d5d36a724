"""What a coming batch will look up: hints for the embeddings, as each step computes its ids itself.

A pass cuts the ops that make the ids of training lookups from a compiled step. They run on the inputs of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...engine.ops import row_ops
from ...engine.ops.rows_contract import Rows
from ...engine.options.inputs import Lookup
from ..trace.alias import external, is_random, storages, written
from .step_end import accumulate

Coming = list[tuple[Rows, list[Lookup]]]


def cut_lookups(module: fx.GraphModule) -> fx.GraphModule | None:
    """A module with the placeholders of the compiled `module`, which returns (embedding, lookups) for all it trains.

    A lookup is the tuple of its fields there, since a module of torch 2.11 returns no NamedTuple. Left out
    are lookups whose ids depend on rows, on random numbers, on what this step changes outside of it, or on an op that
    is not torch's own. None where nothing is left.
    """
    known = known_ahead(module)
    if not known:
        return None
    needed = set().union(*(sources_of(node, lookups) for node, lookups in known))
    cut = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = cut.node_copy(node, copies.__getitem__)
    found = [(rows, [tuple(lookup) for lookup in lookups]) for _, (rows, lookups) in known]
    cut.output(fx.map_arg(found, copies.__getitem__))
    return fx.GraphModule(module, cut)


def known_ahead(module: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """The nodes that pin rows which can be brought up before the step runs, with their (embedding, lookups)."""
    trained: list[tuple[fx.Node, Any]] = []
    for node in module.graph.find_nodes(op="call_function", target=row_ops.pin):
        trained.append((node, node.args[:2]))
    for node in module.graph.find_nodes(op="call_function", target=accumulate):
        rows: Any = node.args[1]
        trained += [(node, row[:2]) for row in rows]
    outside = external(module.graph)
    return [
        (node, lookups)
        for node, lookups in trained
        if all(is_repeatable(source, outside) for source in sources_of(node, lookups))
    ]


def sources_of(user: fx.Node, arguments: Any) -> set[fx.Node]:
    """The nodes that make these arguments of `user`, and the nodes that wrote to their memory before `user`."""
    writers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in user.graph.nodes:
        if node is user:
            break
        for storage in written(node):
            writers[storage].append(node)
    sources: set[fx.Node] = set()
    pending = [node for node in pytree.tree_leaves(arguments) if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in sources:
            sources.add(node)
            pending += node.all_input_nodes
            pending += [writer for storage in storages(node) for writer in writers[storage]]
    return sources


def is_repeatable(node: fx.Node, outside: set[int]) -> bool:
    if node.op != "call_function" or isinstance(node.meta.get("val"), torch.SymInt):
        return True
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return is_torch and not (is_random(node.target, node.args) or written(node) & outside)
