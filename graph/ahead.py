"""The pass that cuts from a compiled step what the ids of its training lookups are made of.

Run on the inputs of a batch to come, it gives the lookups to announce. What it gives is a hint: the step computes its
ids itself.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from ..engine.ops import step
from .alias import external, is_random, storages, written


def cut_lookups(module: fx.GraphModule) -> fx.GraphModule | None:
    """A module with the placeholders of the compiled `module` that returns (embedding, lookups) for each prefetch.

    Left out are prefetches whose ids depend on rows, on random numbers, on what this step changes outside of it, or on
    an op that is not torch's own. None where no prefetch is left.
    """
    prefetches = module.graph.find_nodes(op="call_function", target=step.prefetch)
    needed: set[fx.Node] = set()
    outside = external(module.graph)
    known = []
    for prefetch in prefetches:
        sources = _sources(prefetch)
        if all(_is_repeatable(node, outside) for node in sources):
            needed |= sources
            known.append(prefetch)
    if not known:
        return None
    cut = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = cut.node_copy(node, copies.__getitem__)
    cut.output([fx.map_arg(prefetch.args, copies.__getitem__) for prefetch in known])
    return fx.GraphModule(module, cut)


def _sources(prefetch: fx.Node) -> set[fx.Node]:
    """The nodes that its arguments are made of, with those that wrote to their memory before it."""
    writers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in prefetch.graph.nodes:
        if node is prefetch:
            break
        for storage in written(node):
            writers[storage].append(node)
    sources: set[fx.Node] = set()
    pending = prefetch.all_input_nodes
    while pending:
        node = pending.pop()
        if node not in sources:
            sources.add(node)
            pending += node.all_input_nodes
            pending += [writer for storage in storages(node) for writer in writers[storage]]
    return sources


def _is_repeatable(node: fx.Node, outside: set[int]) -> bool:
    if node.op != "call_function" or isinstance(node.meta.get("val"), torch.SymInt):
        return True
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return is_torch and not (is_random(node.target, node.args) or written(node) & outside)
