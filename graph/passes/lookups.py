"""The passes over lookups.

An embedding's trained lookups become one `pin` (deduplicate all ids, fetch and pin their rows), one `gather` per
lookup, and one `update`; other lookups become `read`. Embeddings that train on the same ids share one deduplication.

`extract_id_graph` copies the ops that make ids into a small graph, which `Graph.run` runs on later batches. The
resulting ids are only hints for prefetch: each step computes its ids again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from functools import reduce
from itertools import dropwhile, takewhile
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...embedding.autograd import lookup_op
from ...engine.errors import GraphError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.options.lookup import Lookup
from ..trace.alias import call_target, external_storages, is_random, memory_of, storages, value_at, with_sources, writes
from .nodes import add_attribute, replace_node
from .step_epilogue import accumulate

KnownLookups = list[tuple[EmbeddingBase, list[Lookup]]]
LOOKUP = torch.ops.tierbed.lookup.default
LOOKUP_GRAD = torch.ops.tierbed.lookup_grad.default
WEIGHTS_GRAD = torch.ops.tierbed.lookup_weights_grad.default
# ops by which autograd sums and copies a parameter's gradients, with the argument that is copied
_ADD = torch.ops.aten.add.Tensor
_SUMS = {_ADD, torch.ops.aten.add_.Tensor}
_COPIES = {torch.ops.aten.clone.default: 0, torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}


def share_rows(module: fx.GraphModule) -> None:
    """Make a pin reuse the unique rows of another embedding's earlier pin with the same lookups.

    Two lookups are the same if equal ops make their arguments from the same tensors, and the step never writes those.
    """
    changed = set().union(*map(writes, module.graph.nodes))
    values: dict[Hashable, int] = {}
    value_of: dict[fx.Node, int] = {}
    first: dict[Hashable, fx.Node] = {}
    for node in module.graph.nodes:
        is_constant = not memory_of((node, *node.all_input_nodes)) & changed
        if is_constant and call_target(node) == "pin":
            embedding, lookups = node.args
            spec = getattr(module, embedding.target).spec
            key = (spec.num_tables, spec.key_type, spec.padding_idx, spec.legal_ids, _make_key(lookups, value_of))
            earlier = first.setdefault(key, node)
            if earlier is not node:
                node.update_arg(1, earlier.args[1])
                node.insert_arg(2, earlier)
        value_key: Hashable = (node.op, node.target) if node.op == "get_attr" else node
        if is_constant and node.op == "call_function" and is_repeatable(node, set()):
            value_key = (node.target, _make_key((node.args, *node.kwargs.items()), value_of))
        value_of[node] = values.setdefault(value_key, len(values))


def _make_key(argument: Any, value_of: dict[fx.Node, int]) -> Hashable:
    """Return a key that is equal for equal arguments. Nodes are compared by value, numbers also by type."""
    if isinstance(argument, fx.Node):
        return fx.Node, value_of[argument]
    if isinstance(argument, list | tuple):
        return tuple(_make_key(part, value_of) for part in argument)
    return type(argument), argument


def extract_id_graph(module: fx.GraphModule) -> fx.GraphModule | None:
    """Return a module with the placeholders of `module` that returns its `prefetchable_lookups`, or None.

    The new module returns lookups as plain tuples, because in torch 2.11 modules cannot return a NamedTuple.
    """
    known = prefetchable_lookups(module)
    if not known:
        return None
    needed = set().union(*(sources_of(node, lookups) for node, lookups in known))
    id_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = id_graph.node_copy(node, copies.__getitem__)
    lookups = [(embedding, [tuple(lookup) for lookup in parts]) for _, (embedding, parts) in known]
    id_graph.output(fx.map_arg(lookups, copies.__getitem__))
    return fx.GraphModule(module, id_graph)


def prefetchable_lookups(module: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """Return nodes that train rows with ids known before the step runs, and each node's (embedding, lookups).

    Other ids depend on rows, random numbers, custom ops, or external tensors that the step changes.
    """
    pins = module.graph.find_nodes(op="call_method", target="pin")
    trained: list[tuple[fx.Node, Any]] = [(node, node.args[:2]) for node in pins]
    for node in module.graph.find_nodes(op="call_function", target=accumulate):
        rows: Any = node.args[1]
        trained += [(node, row[:2]) for row in rows]
    external = external_storages(module.graph)
    return [
        (node, lookups)
        for node, lookups in trained
        if all(is_repeatable(source, external) for source in sources_of(node, lookups))
    ]


def sources_of(user: fx.Node, arguments: Any) -> set[fx.Node]:
    """Return the nodes that make `arguments` for `user`, and earlier nodes that write to the same memory."""
    used = (node for node in pytree.tree_leaves(arguments) if isinstance(node, fx.Node))
    return with_sources(used, takewhile(lambda node: node is not user, user.graph.nodes))


def is_repeatable(node: fx.Node, external: set[int]) -> bool:
    """True if a node that runs before the step gives the same result: it uses no rows, random numbers or custom ops."""
    if call_target(node) is None or isinstance(node.meta.get("val"), torch.SymInt):
        return True
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return is_torch and not (is_random(node.target, node.args) or writes(node) & external)


class SharedLookup(NamedTuple):
    """A lookup in a batch. Equal lookups in a step are looked up once; nodes compare by identity."""

    lookup: Lookup
    weights: Any
    changed: fx.Node | None  # the last node that wrote to the weights


def expand_reads(module: fx.GraphModule, path_of: Callable[[int], str]) -> None:
    """Replace all remaining lookups and weight gradients with reads, which change no rows."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=LOOKUP):
        with graph.inserting_before(node):
            replace_node(node, _read(graph, _find_embedding_node(module, node.args[-1], path_of), node))
    for node in graph.find_nodes(op="call_function", target=WEIGHTS_GRAD):
        embedding = _find_embedding_node(module, node.args[-1], path_of)
        with graph.inserting_before(node):
            replace_node(node, graph.call_method("read_weights_grad", (embedding, _read_lookup(node), node.args[0])))


def expand_trained(module: fx.GraphModule, op_id: int, grad: fx.Node, path_of: Callable[[int], str]) -> None:
    """Make one pin before the first trained lookup, a gather for each lookup, and one update at the end of the step.

    grad: the gradient of the embedding's parameter. Raises GraphError if `grad` is not a plain sum of lookup gradients,
    or if computing ids earlier would change a lookup's ids or the order of random draws.
    """
    graph = module.graph
    grads: dict[SharedLookup, list[Any]] = defaultdict(list)
    weights: dict[SharedLookup, Any] = {}
    for node in _find_summands(graph, op_id, grad, path_of(op_id)):
        key = _shared_lookup(node)
        grads[key].append(value_at(graph, node, node.args[0]))
        if key not in weights:
            weights[key] = value_at(graph, node, key.weights)
    lookups = [n for n in graph.find_nodes(op="call_function", target=LOOKUP) if n.args[-1] == op_id]
    trained = {node: key for node in lookups if (key := _shared_lookup(node)) in grads}
    shared = list(dict.fromkeys(trained.values()))
    if len(shared) != len(grads):
        raise GraphError(
            f"embedding {path_of(op_id)!r}: backward() saved other ids or weights than the lookup used; "
            "leave lookups out of saved_tensors_hooks"
        )
    embedding = _find_embedding_node(module, op_id, path_of)
    _move_ids_up(graph, [*trained], embedding, path_of(op_id))
    with graph.inserting_before(next(iter(trained))):
        batch = graph.call_method("pin", (embedding, [key.lookup for key in shared]))
    _expand_weights_grads(graph, op_id, batch, shared)
    for node, key in trained.items():
        with graph.inserting_before(node):
            replace_node(node, graph.call_method("gather", (batch, shared.index(key), *_weights_argument(key.weights))))
    with graph.inserting_before(graph.output_node()):
        used = [weights[key] for key in shared]
        totals = [reduce(lambda a, b: graph.call_function(_ADD, (a, b)), grads[key]) for key in shared]
        graph.call_method("update", (batch, totals, *([used] if any(used) else [])))


def _expand_weights_grads(graph: fx.Graph, op_id: int, batch: fx.Node, shared: list[SharedLookup]) -> None:
    """Compute weight gradients from the batch's rows, if the batch has these rows. Rows do not depend on weights."""
    index_of = {key.lookup: index for index, key in enumerate(shared)}
    for node in graph.find_nodes(op="call_function", target=WEIGHTS_GRAD):
        lookup = _read_lookup(node)
        if node.args[-1] == op_id and node > batch and lookup in index_of:
            with graph.inserting_before(node):
                replace_node(node, graph.call_method("weights_grad", (batch, index_of[lookup], node.args[0])))


def _read_lookup(node: fx.Node) -> Lookup:
    """Return the `Lookup` of a lookup node or of a gradient node of it. Only the nodes' first arguments differ."""
    arguments: Any = node.args[1:6]
    return lookup_op.lookup_of(*arguments)


def _shared_lookup(node: fx.Node) -> SharedLookup:
    weights: Any = node.args[6]
    if weights is None:
        return SharedLookup(_read_lookup(node), None, None)
    changed = node.prev
    while changed.op != "root" and not writes(changed) & storages(weights):
        changed = changed.prev
    return SharedLookup(_read_lookup(node), weights, changed)


def _read(graph: fx.Graph, embedding: fx.Node, node: fx.Node) -> fx.Node:
    return graph.call_method("read", (embedding, _read_lookup(node), *_weights_argument(node.args[6])))


def _weights_argument(weights: Any) -> tuple[Any, ...]:
    return () if weights is None else (weights,)


def refuse_uses(graph: fx.Graph, shadows: dict[fx.Node, str], path_of: Callable[[int], str]) -> None:
    """Raise GraphError if a live node still uses an embedding's parameter (in `shadows`) or its gradient."""
    for shadow, name in shadows.items():
        if shadow.users:
            raise _shadow_error(name)
    for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD):
        raise _shadow_error(path_of(node.args[-1]))


def _shadow_error(name: str) -> GraphError:
    return GraphError(
        f"build uses the parameter of embedding {name!r}, or its gradient, as a tensor, but no tensor holds the rows; "
        "call self.clip_grad_norm(max_norm) in __init__ instead of clip_grad_norm_, leave the embedding out of "
        "sums over self.parameters(), and use the rows that its lookup returns; default_initializer= chooses "
        "initial rows, and load_dense writes rows"
    )


def _find_summands(graph: fx.Graph, op_id: int, grad: fx.Node, name: str) -> list[fx.Node]:
    """Return the lookup gradients whose plain sum is `grad`, with repeats. GraphError if `grad` is no such sum."""
    counts: Counter[fx.Node] = Counter()
    summed: set[fx.Node] = set()
    pending: list[Any] = [grad]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node):
            raise _shadow_error(name)
        summed.add(node)
        if node.target is LOOKUP_GRAD and node.args[-1] == op_id:
            counts[node] += 1
        elif node.target in _SUMS and not node.kwargs:
            pending += node.args
        elif node.target in _COPIES:
            pending.append(node.args[_COPIES[node.target]])
        else:
            raise _shadow_error(name)
    changed = memory_of(summed)
    if any(writes(node) & changed for node in graph.nodes if node not in summed):
        raise _shadow_error(name)
    return [node for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD) for _ in range(counts[node])]


def _find_embedding_node(module: fx.GraphModule, op_id: int, path_of: Callable[[int], str]) -> fx.Node:
    """Return the embedding's node. Each step has one node per embedding, at the top of the step."""
    embedding = lookup_op.embedding_of(op_id)
    for node in module.graph.find_nodes(op="get_attr"):
        if getattr(module, node.target) is embedding:
            return node
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        return add_attribute(module, path_of(op_id), embedding)


def _move_ids_up(graph: fx.Graph, lookups: list[fx.Node], embedding: fx.Node, name: str) -> None:
    """Move the ops that make later lookups' ids before the first lookup, because a batch is pinned as a whole.

    If ids are computed from an earlier lookup's rows, these rows are read first.
    """
    from_first = dropwhile(lambda node: node is not lookups[0], graph.nodes)
    between = [*takewhile(lambda node: node is not lookups[-1], from_first)]
    operands = [operand for lookup in lookups for operand in lookup.args[1:4]]  # without the weights
    id_sources = {operand for operand in operands if isinstance(operand, fx.Node)}
    for node in reversed(between):
        if node in id_sources:
            id_sources.update(node.all_input_nodes)
    changed = memory_of(id_sources)
    if any(writes(node) & changed for node in between):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are changed in place after the first lookup; "
            "compute the ids of all lookups first, or do not change them in place"
        )
    draws_ids = [node in id_sources for node in between if is_random(node.target, node.args)]
    if draws_ids != sorted(draws_ids, reverse=True):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are drawn at random after another draw, such as dropout, "
            "that follows the first lookup; draw the ids of all lookups first"
        )
    reads: dict[fx.Node, fx.Node] = {}
    for node in between:
        if node in id_sources and node in lookups:
            with graph.inserting_before(lookups[0]):
                reads[node] = _read(graph, embedding, node)
            reads[node].meta["val"] = node.meta["val"]
        elif node in id_sources:
            for lookup, early in reads.items():
                node.replace_input_with(lookup, early)
            lookups[0].prepend(node)
