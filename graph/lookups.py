"""The pass that turns recorded lookups and their gradients into prefetch, gather and update."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..engine.errors import GraphError
from ..engine.ops import lookup as recorded
from ..engine.ops import step
from .alias import is_random, memory, storages, written

Key = tuple[Any, Any]  # the ids node and the table ids node or None
LOOKUP = torch.ops.tierbed.lookup.default
LOOKUP_GRAD = torch.ops.tierbed.lookup_grad.default
# how autograd adds up the gradients of one parameter, and copies them: the argument that it copies
_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_COPIES = {torch.ops.aten.clone.default: 0, torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}


def expand_reads(module: fx.GraphModule, name_of: Callable[[int], str]) -> None:
    """Every lookup that is left becomes a read, which changes nothing."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=LOOKUP):
        _, ids, table_ids, handle = node.args
        embedding = _attribute(module, handle, name_of)
        with graph.inserting_before(node):
            _replace(node, graph.call_function(step.read, (embedding, ids, table_ids)))


def expand_trained(module: fx.GraphModule, handle: int, grad: fx.Node, name_of: Callable[[int], str]) -> None:
    """One prefetch before the first lookup with a gradient, a gather for each, one update at the end of the step.

    `grad` is what build left as the gradient of the embedding's parameter. GraphError where it is more than a sum of
    lookups' gradients, and where hoisting would change the ids of a lookup or the order of random draws.
    """
    graph = module.graph
    grads: dict[Key, list[fx.Node]] = defaultdict(list)
    for node in _terms(graph, handle, grad, name_of(handle)):
        grads[node.args[1], node.args[2]].append(_stable(graph, node))
    lookups = [n for n in graph.find_nodes(op="call_function", target=LOOKUP) if n.args[3] == handle]
    lookups = [node for node in lookups if (node.args[1], node.args[2]) in grads]
    keys = list(dict.fromkeys((node.args[1], node.args[2]) for node in lookups))
    if len(keys) != len(grads):
        raise GraphError(
            f"embedding {name_of(handle)!r}: the ids that backward() saved are not those of the lookup; leave lookups "
            "out of saved_tensors_hooks"
        )
    embedding = _attribute(module, handle, name_of)
    _hoist_ids(graph, lookups, embedding, name_of(handle))
    with graph.inserting_before(lookups[0]):
        batch = graph.call_function(step.prefetch, (embedding, keys))
    for node in lookups:
        with graph.inserting_before(node):
            _replace(node, graph.call_function(step.gather, (batch, keys.index((node.args[1], node.args[2])))))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(step.update, (batch, [_total(graph, grads[key]) for key in keys]))


def refuse_used(graph: fx.Graph, shadows: dict[fx.Node, str], name_of: Callable[[int], str]) -> None:
    """GraphError if something still uses an embedding's parameter, given by node, or its gradient: neither has a value.

    Runs when lookups are expanded and dead nodes dropped.
    """
    for shadow, name in shadows.items():
        if shadow.users:
            raise _no_tensor(name)
    for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD):
        raise _no_tensor(name_of(node.args[3]))


def _no_tensor(name: str) -> GraphError:
    return GraphError(
        f"build uses the parameter of embedding {name!r}, or its gradient, as a tensor, but no tensor holds the rows; "
        "leave the embedding's parameters out of clip_grad_norm_ and of sums over self.parameters(), and work on the "
        "rows that its lookup returns"
    )


def _terms(graph: fx.Graph, handle: int, grad: fx.Node, name: str) -> list[fx.Node]:
    """The lookup gradients whose plain sum is `grad`, one given twice if it counts twice. GraphError otherwise."""
    counts: Counter[fx.Node] = Counter()
    summed: set[fx.Node] = set()
    pending: list[Any] = [grad]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node):
            raise _no_tensor(name)
        summed.add(node)
        if node.target is LOOKUP_GRAD and node.args[3] == handle:
            counts[node] += 1
        elif node.target in _SUMS and not node.kwargs:
            pending += node.args
        elif node.target in _COPIES:
            pending.append(node.args[_COPIES[node.target]])
        else:
            raise _no_tensor(name)
    changed = memory(summed)
    if any(written(node) & changed for node in graph.nodes if node not in summed):
        raise _no_tensor(name)
    return [node for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD) for _ in range(counts[node])]


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
    read: set[fx.Node] = set()
    while needed:
        node = needed.pop()
        read.add(node)
        if node in inside and node not in sources:
            sources.add(node)
            needed += node.all_input_nodes
    changed = memory(read)
    if any(written(node) & changed for node in between):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are changed in place after the first lookup; "
            "compute the ids of all lookups first, or out of place"
        )
    drawn = [node in sources for node in between if is_random(node.target, node.args)]
    if drawn != sorted(drawn, reverse=True):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are drawn at random after another draw, such as dropout, that "
            "follows the first lookup; draw the ids of all lookups first"
        )
    reads: dict[fx.Node, fx.Node] = {}
    for node in between:
        if node in sources and node in lookups:
            with graph.inserting_before(lookups[0]):
                reads[node] = graph.call_function(step.read, (embedding, *node.args[1:3]))
            reads[node].meta["val"] = node.meta["val"]
        elif node in sources:
            for lookup, early in reads.items():
                node.replace_input_with(lookup, early)
            lookups[0].prepend(node)
