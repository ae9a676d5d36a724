"""The pass that turns recorded lookups and their gradients into prefetch, gather and update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..engine.errors import GraphError
from ..engine.ops import lookup as recorded
from ..engine.ops import step
from .alias import storages, written

Key = tuple[Any, Any]  # the ids node and the table ids node or None
LOOKUP = torch.ops.tierbed.lookup.default
LOOKUP_GRAD = torch.ops.tierbed.lookup_grad.default


def trained_handles(graph: fx.Graph) -> set[int]:
    """The embeddings that backward() reached."""
    return {node.args[3] for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD)}


def expand_reads(module: fx.GraphModule, name_of: Callable[[int], str]) -> None:
    """Every lookup that is left becomes a read, which changes nothing."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=LOOKUP):
        _, ids, table_ids, handle = node.args
        embedding = _attribute(module, handle, name_of)
        with graph.inserting_before(node):
            _replace(node, graph.call_function(step.read, (embedding, ids, table_ids)))


def expand_trained(module: fx.GraphModule, handle: int, name_of: Callable[[int], str]) -> None:
    """One prefetch before the first lookup with a gradient, a gather for each, one update at the end of the step.

    GraphError where the ids of a later lookup are changed in place after the first.
    """
    graph = module.graph
    grads: dict[Key, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD):
        if node.args[3] == handle:
            grads[node.args[1], node.args[2]].append(_stable(graph, node))
    lookups = [n for n in graph.find_nodes(op="call_function", target=LOOKUP) if n.args[3] == handle]
    lookups = [node for node in lookups if (node.args[1], node.args[2]) in grads]
    keys = list(dict.fromkeys((node.args[1], node.args[2]) for node in lookups))
    embedding = _attribute(module, handle, name_of)
    _hoist_ids(graph, lookups, embedding, name_of(handle))
    with graph.inserting_before(lookups[0]):
        batch = graph.call_function(step.prefetch, (embedding, keys))
    for node in lookups:
        with graph.inserting_before(node):
            _replace(node, graph.call_function(step.gather, (batch, keys.index((node.args[1], node.args[2])))))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(step.update, (batch, [_total(graph, grads[key]) for key in keys]))


def refuse_used_grads(graph: fx.Graph, name_of: Callable[[int], str]) -> None:
    """GraphError if something reads the gradient of an embedding's parameter: it has no value."""
    for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD):
        raise GraphError(
            f"build reads the gradient of embedding {name_of(node.args[3])!r}, which is not computed as one tensor; "
            "leave the embedding's parameters out, for example of clip_grad_norm_"
        )


def _attribute(module: fx.GraphModule, handle: int, name_of: Callable[[int], str]) -> fx.Node:
    """The node of an embedding: one for the whole step, at its top."""
    name = name_of(handle)
    for node in module.graph.find_nodes(op="get_attr", target=name):
        return node
    setattr(module, name, recorded.embedding_of(handle))
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        return module.graph.get_attr(name)


def _replace(node: fx.Node, by: fx.Node) -> None:
    by.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _total(graph: fx.Graph, grads: list[fx.Node]) -> fx.Node:
    total = grads[0]
    for grad in grads[1:]:
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, grad))
    return total


def _stable(graph: fx.Graph, node: fx.Node) -> Any:
    """The gradient of a lookup_grad as it is at that node: a copy where a later op writes to its memory."""
    grad: Any = node.args[0]
    later = node.next
    while later.op != "output":
        if written(later) & storages(grad):
            with graph.inserting_before(node):
                return graph.call_function(torch.ops.aten.clone.default, (grad,))
        later = later.next
    return grad


def _hoist_ids(graph: fx.Graph, lookups: list[fx.Node], embedding: fx.Node, name: str) -> None:
    """Move what the ids of the later lookups are made from before the first lookup.

    Where they are made from rows of an earlier lookup, those rows are read first: a batch is fetched as a whole.
    """
    between: list[fx.Node] = []
    node = lookups[0]
    while node is not lookups[-1]:
        between.append(node)
        node = node.next
    needed = [n for lookup in lookups for n in lookup.args[1:3] if isinstance(n, fx.Node)]
    inside = set(between)
    sources: set[fx.Node] = set()
    memory: set[int] = set()
    while needed:
        node = needed.pop()
        memory |= storages(node)
        if node in inside and node not in sources:
            sources.add(node)
            needed += node.all_input_nodes
    if any(written(node) & memory for node in between):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are changed in place after the first lookup; "
            "compute the ids of all lookups first, or out of place"
        )
    reads: dict[fx.Node, fx.Node] = {}
    for node in between:
        if node in sources and node in lookups:
            with graph.inserting_before(lookups[0]):
                reads[node] = graph.call_function(step.read, (embedding, *node.args[1:3]))
            reads[node].meta["val"] = node.meta["val"]
        elif node in sources:
            for lookup, read in reads.items():
                node.replace_input_with(lookup, read)
            lookups[0].prepend(node)
