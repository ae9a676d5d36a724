"""The passes over lookups: pin, gather and update; one deduplication of ids that embeddings share; ids known ahead.

For the last, the ops that make the ids of training lookups are extracted from a compiled step and run on the inputs of
a later batch. These ids are hints: each step computes its ids itself.
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
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from ..trace.alias import called, external, is_random, memory, stable, storages, with_sources, written
from .nodes import add_attribute, replace
from .step_epilogue import accumulate

KnownLookups = list[tuple[EmbeddingBase, list[Lookup]]]
LOOKUP = torch.ops.tierbed.lookup.default
LOOKUP_GRAD = torch.ops.tierbed.lookup_grad.default
WEIGHTS_GRAD = torch.ops.tierbed.lookup_weights_grad.default
# ops by which autograd adds up and copies the gradients of one parameter, and the argument that an op copies
_ADD = torch.ops.aten.add.Tensor
_SUMS = {_ADD, torch.ops.aten.add_.Tensor}
_COPIES = {torch.ops.aten.clone.default: 0, torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}


def share_batches(module: fx.GraphModule) -> None:
    """Let a pin take the unique rows of an earlier pin of the same lookups by another embedding.

    Lookups are the same if the same ops of torch make their tensors of the same tensors. Nothing may write to these
    tensors anywhere in the step. Embeddings must agree in their number of tables, key type, padding and legal ids.
    """
    changed = set().union(*map(written, module.graph.nodes))
    values: dict[Hashable, int] = {}
    value_of: dict[fx.Node, int] = {}
    first: dict[Hashable, fx.Node] = {}
    for node in module.graph.nodes:
        is_constant = not memory((node, *node.all_input_nodes)) & changed
        if is_constant and called(node) == "pin":
            embedding, lookups = node.args
            spec = getattr(module, embedding.target).spec
            key = (spec.num_tables, spec.key_type, spec.padding_idx, spec.legal_ids, _key(lookups, value_of))
            earlier = first.setdefault(key, node)
            if earlier is not node:
                node.update_arg(1, earlier.args[1])
                node.insert_arg(2, earlier)
        same: Hashable = (node.op, node.target) if node.op == "get_attr" else node
        if is_constant and node.op == "call_function" and is_repeatable(node, set()):
            same = (node.target, _key((node.args, *node.kwargs.items()), value_of))
        value_of[node] = values.setdefault(same, len(values))


def _key(argument: Any, value_of: dict[fx.Node, int]) -> Hashable:
    """A key that is equal for arguments of equal values: of a node by its value, of a number by its type as well."""
    if isinstance(argument, fx.Node):
        return fx.Node, value_of[argument]
    if isinstance(argument, list | tuple):
        return tuple(_key(part, value_of) for part in argument)
    return type(argument), argument


def extract_id_graph(module: fx.GraphModule) -> fx.GraphModule | None:
    """A module with the placeholders of the compiled `module`, which returns (embedding, lookups) for all it trains.

    A lookup is the tuple of its fields there, since a module of torch 2.11 returns no NamedTuple. Lookups are left out
    if their ids depend on rows, on random numbers, on what this step changes outside of it, or on an op that is not
    torch's own. None if no lookup remains.
    """
    known = prefetchable_lookups(module)
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


def prefetchable_lookups(module: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """The nodes that pin rows which can be fetched before the step runs, with their (embedding, lookups)."""
    trained: list[tuple[fx.Node, Any]] = []
    for node in module.graph.find_nodes(op="call_method", target="pin"):
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
    used = (node for node in pytree.tree_leaves(arguments) if isinstance(node, fx.Node))
    return with_sources(used, takewhile(lambda node: node is not user, user.graph.nodes))


def is_repeatable(node: fx.Node, outside: set[int]) -> bool:
    """Whether a node computes the same again if nothing of the step ran before: no rows, random numbers, own ops."""
    if called(node) is None or isinstance(node.meta.get("val"), torch.SymInt):
        return True
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return is_torch and not (is_random(node.target, node.args) or written(node) & outside)


class SharedLookup(NamedTuple):
    """A lookup of a batch, which equal lookups of the step share. Nodes compare by identity."""

    lookup: Lookup
    weights: Any
    changed: fx.Node | None  # the node that wrote to the weights last


def expand_reads(module: fx.GraphModule, name_of: Callable[[int], str]) -> None:
    """Replace every remaining lookup, and every remaining gradient of weights, by a read, which changes nothing."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=LOOKUP):
        with graph.inserting_before(node):
            replace(node, _read(graph, _attribute(module, node.args[-1], name_of), node))
    for node in graph.find_nodes(op="call_function", target=WEIGHTS_GRAD):
        embedding = _attribute(module, node.args[-1], name_of)
        with graph.inserting_before(node):
            read = graph.call_method("read_weights_grad", (embedding, _lookup(node), node.args[0]))
            replace(node, read)


def expand_trained(module: fx.GraphModule, handle: int, grad: fx.Node, name_of: Callable[[int], str]) -> None:
    """Make one pin before the first lookup with a gradient, a gather for each, and one update at the step's end.

    Gradients of weights are computed in between, where build needs them, from the rows as they were gathered.

    grad: what build left as the gradient of the embedding's parameter. Raises GraphError if `grad` is more than a sum
    of lookups' gradients, or if hoisting would change the ids of a lookup or the order of random draws.
    """
    graph = module.graph
    grads: dict[SharedLookup, list[Any]] = defaultdict(list)
    weights: dict[SharedLookup, Any] = {}
    for node in _terms(graph, handle, grad, name_of(handle)):
        one = _shared_lookup(node)
        grads[one].append(stable(graph, node, node.args[0]))
        if one not in weights:
            weights[one] = stable(graph, node, one.weights)
    lookups = [n for n in graph.find_nodes(op="call_function", target=LOOKUP) if n.args[-1] == handle]
    trained = {node: one for node in lookups if (one := _shared_lookup(node)) in grads}
    shared = list(dict.fromkeys(trained.values()))
    if len(shared) != len(grads):
        raise GraphError(
            f"embedding {name_of(handle)!r}: the ids or weights that backward() saved are not those of the lookup; "
            "leave lookups out of saved_tensors_hooks"
        )
    embedding = _attribute(module, handle, name_of)
    lookups = list(trained)
    _hoist_ids(graph, lookups, embedding, name_of(handle))
    with graph.inserting_before(lookups[0]):
        batch = graph.call_method("pin", (embedding, [one.lookup for one in shared]))
    _expand_weights_grads(graph, handle, batch, shared)
    for node, one in trained.items():
        with graph.inserting_before(node):
            replace(node, graph.call_method("gather", (batch, shared.index(one), *_weights_argument(one.weights))))
    with graph.inserting_before(graph.output_node()):
        used = [weights[one] for one in shared]
        totals = [reduce(lambda a, b: graph.call_function(_ADD, (a, b)), grads[one]) for one in shared]
        graph.call_method("update", (batch, totals, *([used] if any(used) else [])))


def _expand_weights_grads(graph: fx.Graph, handle: int, batch: fx.Node, shared: list[SharedLookup]) -> None:
    """Let the gradients of weights use the rows of the batch if it has them. Rows do not depend on the weights."""
    index_of = {one.lookup: index for index, one in enumerate(shared)}
    for node in graph.find_nodes(op="call_function", target=WEIGHTS_GRAD):
        lookup = _lookup(node)
        if node.args[-1] == handle and node > batch and lookup in index_of:
            with graph.inserting_before(node):
                replace(node, graph.call_method("weights_grad", (batch, index_of[lookup], node.args[0])))


def _lookup(node: fx.Node) -> Lookup:
    """The `Lookup` of a node, a lookup or one of its gradients. Their arguments differ in the first alone."""
    arguments: Any = node.args[1:6]
    return lookup_op.lookup_of(*arguments)


def _shared_lookup(node: fx.Node) -> SharedLookup:
    weights: Any = node.args[6]
    changed = None
    if weights is not None:
        changed = node.prev
        while changed.op != "root" and not written(changed) & storages(weights):
            changed = changed.prev
    return SharedLookup(_lookup(node), weights, changed)


def _read(graph: fx.Graph, embedding: fx.Node, node: fx.Node) -> fx.Node:
    return graph.call_method("read", (embedding, _lookup(node), *_weights_argument(node.args[6])))


def _weights_argument(weights: Any) -> tuple[Any, ...]:
    return () if weights is None else (weights,)


def refuse_used(graph: fx.Graph, shadows: dict[fx.Node, str], name_of: Callable[[int], str]) -> None:
    """GraphError if a node still uses an embedding's parameter or its gradient, since neither has a value.

    shadows: the nodes of these parameters. Runs after lookups are expanded and dead nodes are dropped.
    """
    for shadow, name in shadows.items():
        if shadow.users:
            raise _no_tensor(name)
    for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD):
        raise _no_tensor(name_of(node.args[-1]))


def _no_tensor(name: str) -> GraphError:
    return GraphError(
        f"build uses the parameter of embedding {name!r}, or its gradient, as a tensor, but no tensor holds the rows; "
        "clip by self.clip_grad_norm(max_norm) in __init__ instead of clip_grad_norm_, leave the embedding's "
        "parameters out of sums over self.parameters(), and work on the rows that its lookup returns; "
        "default_initializer= chooses initial rows, and load_dense writes them"
    )


def _terms(graph: fx.Graph, handle: int, grad: fx.Node, name: str) -> list[fx.Node]:
    """The lookup gradients whose plain sum is `grad`, one that counts twice listed twice. GraphError otherwise."""
    counts: Counter[fx.Node] = Counter()
    summed: set[fx.Node] = set()
    pending: list[Any] = [grad]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node):
            raise _no_tensor(name)
        summed.add(node)
        if node.target is LOOKUP_GRAD and node.args[-1] == handle:
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
    embedding = lookup_op.embedding_of(handle)
    for node in module.graph.find_nodes(op="get_attr"):
        if getattr(module, node.target) is embedding:
            return node
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        return add_attribute(module, name_of(handle), embedding)


def _hoist_ids(graph: fx.Graph, lookups: list[fx.Node], embedding: fx.Node, name: str) -> None:
    """Move the ops that make the ids of later lookups before the first lookup.

    If ids are made from rows of an earlier lookup, those rows are read first, since a batch is pinned as a whole.
    """
    from_first = dropwhile(lambda node: node is not lookups[0], graph.nodes)
    between = [*takewhile(lambda node: node is not lookups[-1], from_first)]
    read = {n for lookup in lookups for n in lookup.args[1:4] if isinstance(n, fx.Node)}  # not their weights
    for node in reversed(between):
        if node in read:
            read.update(node.all_input_nodes)
    changed = memory(read)
    if any(written(node) & changed for node in between):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are changed in place after the first lookup; "
            "compute the ids of all lookups first, or out of place"
        )
    drawn = [node in read for node in between if is_random(node.target, node.args)]
    if drawn != sorted(drawn, reverse=True):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are drawn at random after another draw, such as dropout, that "
            "follows the first lookup; draw the ids of all lookups first"
        )
    reads: dict[fx.Node, fx.Node] = {}
    for node in between:
        if node in read and node in lookups:
            with graph.inserting_before(lookups[0]):
                reads[node] = _read(graph, embedding, node)
            reads[node].meta["val"] = node.meta["val"]
        elif node in read:
            for lookup, early in reads.items():
                node.replace_input_with(lookup, early)
            lookups[0].prepend(node)
