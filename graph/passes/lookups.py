"""Passes that replace the lookups of a trace by calls that fetch, read and update rows.

An embedding's trained lookups become one `pin`, one `gather` per lookup, and one `update`. `pin` deduplicates ids, then
fetches and pins rows. Other lookups become `read`. Embeddings that train on the same ids share one deduplication.

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
from ..trace import alias
from ..trace.alias import find_storages, find_written_storages, get_call_target, is_random
from .nodes import add_attribute, replace_node
from .step_epilogue import accumulate

KnownLookups = list[tuple[EmbeddingBase, list[Lookup]]]
LOOKUP = torch.ops.tierbed.lookup.default
LOOKUP_GRAD = torch.ops.tierbed.lookup_grad.default
WEIGHTS_GRAD = torch.ops.tierbed.lookup_weights_grad.default
# ops that autograd uses to sum and copy gradients; `_COPIES` maps each copy op to the index of the copied argument
_ADD = torch.ops.aten.add.Tensor
_SUMS = {_ADD, torch.ops.aten.add_.Tensor}
_COPIES = {torch.ops.aten.clone.default: 0, torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}


def share_rows(module: fx.GraphModule) -> None:
    """If two embeddings pin the same lookups, make the second pin reuse the unique rows of the first pin.

    Two lookups are the same if equal ops compute them from the same tensors, and the step never writes these tensors.
    """
    changed_storages = set().union(*map(find_written_storages, module.graph.nodes))
    number_by_key: dict[Hashable, int] = {}
    value_numbers: dict[fx.Node, int] = {}
    first_pins: dict[Hashable, fx.Node] = {}
    for node in module.graph.nodes:
        is_constant = not find_storages((node, *node.all_input_nodes)) & changed_storages
        if is_constant and get_call_target(node) == "pin":
            embedding, lookups = node.args
            spec = getattr(module, embedding.target).spec
            key = (spec.num_tables, spec.key_type, spec.padding_idx, spec.legal_ids, _make_key(lookups, value_numbers))
            first_pin = first_pins.setdefault(key, node)
            if first_pin is not node:
                node.update_arg(1, first_pin.args[1])
                node.insert_arg(2, first_pin)
        value_key: Hashable = (node.op, node.target) if node.op == "get_attr" else node
        if is_constant and node.op == "call_function" and is_repeatable(node, set()):
            value_key = (node.target, _make_key((node.args, *node.kwargs.items()), value_numbers))
        value_numbers[node] = number_by_key.setdefault(value_key, len(number_by_key))


def _make_key(argument: Any, value_numbers: dict[fx.Node, int]) -> Hashable:
    """Return a key that is equal for equal arguments. Nodes with the same value number are equal; 1 and 1.0 are not."""
    if isinstance(argument, fx.Node):
        return fx.Node, value_numbers[argument]
    if isinstance(argument, list | tuple):
        return tuple(_make_key(part, value_numbers) for part in argument)
    return type(argument), argument


def extract_id_graph(module: fx.GraphModule) -> fx.GraphModule | None:
    """Return a module that computes the ids of `find_prefetchable_lookups` from the same inputs, or None."""
    known_lookups = find_prefetchable_lookups(module)
    if not known_lookups:
        return None
    id_sources = set().union(*(find_sources(node, lookups) for node, lookups in known_lookups))
    id_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in id_sources or node.op == "placeholder":
            copies[node] = id_graph.node_copy(node, copies.__getitem__)
    # plain tuples, because in torch 2.11 modules cannot return a NamedTuple
    lookups = [(embedding, [tuple(lookup) for lookup in nodes]) for _, (embedding, nodes) in known_lookups]
    id_graph.output(fx.map_arg(lookups, copies.__getitem__))
    return fx.GraphModule(module, id_graph)


def find_prefetchable_lookups(module: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """Return (node, (embedding, lookups)) for each pin or accumulate node whose ids are known before the step runs.

    Ids are not known if they depend on rows, random numbers, custom ops, or external tensors that the step changes.
    """
    pins = module.graph.find_nodes(op="call_method", target="pin")
    candidates: list[tuple[fx.Node, Any]] = [(node, node.args[:2]) for node in pins]
    for node in module.graph.find_nodes(op="call_function", target=accumulate):
        lookup_grads: Any = node.args[1]
        candidates += [(node, grads[:2]) for grads in lookup_grads]
    external_storages = alias.find_external_storages(module.graph)
    return [
        (node, lookups)
        for node, lookups in candidates
        if all(is_repeatable(source, external_storages) for source in find_sources(node, lookups))
    ]


def find_sources(user: fx.Node, arguments: Any) -> set[fx.Node]:
    """Return the nodes that compute `arguments`, and the nodes before `user` that write to memory of such a node."""
    used_nodes = (node for node in pytree.tree_leaves(arguments) if isinstance(node, fx.Node))
    return alias.add_sources(used_nodes, takewhile(lambda node: node is not user, user.graph.nodes))


def is_repeatable(node: fx.Node, external_storages: set[int]) -> bool:
    """True if a node can run before the step with the same result. False for lookups, random ops and custom ops."""
    if get_call_target(node) is None or isinstance(node.meta.get("val"), torch.SymInt):
        return True
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return is_torch and not (is_random(node.target, node.args) or find_written_storages(node) & external_storages)


class SharedLookup(NamedTuple):
    """A lookup in a batch. A step makes equal lookups once. Lookups are equal if their arguments are the same nodes."""

    lookup: Lookup
    weights: Any
    last_writer: fx.Node | None  # the last node that wrote to the weights


def expand_reads(module: fx.GraphModule, find_path: Callable[[int], str]) -> None:
    """Replace all remaining lookups and weight gradients with reads, which change no rows."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=LOOKUP):
        with graph.inserting_before(node):
            replace_node(node, _insert_read(graph, _find_embedding_node(module, node.args[-1], find_path), node))
    for node in graph.find_nodes(op="call_function", target=WEIGHTS_GRAD):
        embedding = _find_embedding_node(module, node.args[-1], find_path)
        with graph.inserting_before(node):
            replace_node(node, graph.call_method("read_weights_grad", (embedding, _read_lookup(node), node.args[0])))


def expand_trained(module: fx.GraphModule, embedding_id: int, grad: fx.Node, find_path: Callable[[int], str]) -> None:
    """Insert an embedding's pin before its first trained lookup, a gather per lookup, and an update at the step's end.

    Args:
        grad: The gradient of the embedding's parameter.

    Raises:
        GraphError: If `grad` is not a plain sum of lookup gradients, or computing the ids earlier would change the ids
            or the order of random draws.
    """
    graph = module.graph
    grads_by_lookup: dict[SharedLookup, list[Any]] = defaultdict(list)
    weights_by_lookup: dict[SharedLookup, Any] = {}
    for node in _find_summands(graph, embedding_id, grad, find_path(embedding_id)):
        key = _make_shared_lookup(node)
        grads_by_lookup[key].append(alias.preserve_value(graph, node, node.args[0]))
        if key not in weights_by_lookup:
            weights_by_lookup[key] = alias.preserve_value(graph, node, key.weights)
    lookups = [n for n in graph.find_nodes(op="call_function", target=LOOKUP) if n.args[-1] == embedding_id]
    lookup_by_node = {node: key for node in lookups if (key := _make_shared_lookup(node)) in grads_by_lookup}
    keys = list(dict.fromkeys(lookup_by_node.values()))
    if len(keys) != len(grads_by_lookup):
        raise GraphError(
            f"embedding {find_path(embedding_id)!r}: the ids or weights saved for backward() are not the lookup's; "
            "leave lookups out of saved_tensors_hooks"
        )
    embedding = _find_embedding_node(module, embedding_id, find_path)
    _move_ids_up(graph, [*lookup_by_node], embedding, find_path(embedding_id))
    with graph.inserting_before(next(iter(lookup_by_node))):
        batch = graph.call_method("pin", (embedding, [key.lookup for key in keys]))
    _expand_weights_grads(graph, embedding_id, batch, keys)
    for node, key in lookup_by_node.items():
        with graph.inserting_before(node):
            replace_node(node, graph.call_method("gather", (batch, keys.index(key), *_list_weights(key.weights))))
    with graph.inserting_before(graph.output_node()):
        used_weights = [weights_by_lookup[key] for key in keys]
        summed_grads = [reduce(lambda a, b: graph.call_function(_ADD, (a, b)), grads_by_lookup[key]) for key in keys]
        graph.call_method("update", (batch, summed_grads, *([used_weights] if any(used_weights) else [])))


def _expand_weights_grads(graph: fx.Graph, embedding_id: int, batch: fx.Node, keys: list[SharedLookup]) -> None:
    """Compute the gradient of a lookup's pooling weights from pinned rows if the pinned batch contains the lookup."""
    index_by_lookup = {key.lookup: index for index, key in enumerate(keys)}  # pooling weights may differ
    for node in graph.find_nodes(op="call_function", target=WEIGHTS_GRAD):
        lookup = _read_lookup(node)
        if node.args[-1] == embedding_id and node > batch and lookup in index_by_lookup:
            with graph.inserting_before(node):
                replace_node(node, graph.call_method("weights_grad", (batch, index_by_lookup[lookup], node.args[0])))


def _read_lookup(node: fx.Node) -> Lookup:
    """Return the `Lookup` of a lookup node or a lookup gradient node. They differ only in the first argument."""
    arguments: Any = node.args[1:6]
    return lookup_op.make_lookup(*arguments)


def _make_shared_lookup(node: fx.Node) -> SharedLookup:
    weights: Any = node.args[6]
    if weights is None:
        return SharedLookup(_read_lookup(node), None, None)
    last_writer = node.prev
    while last_writer.op != "root" and not find_written_storages(last_writer) & alias.find_node_storages(weights):
        last_writer = last_writer.prev
    return SharedLookup(_read_lookup(node), weights, last_writer)


def _insert_read(graph: fx.Graph, embedding: fx.Node, node: fx.Node) -> fx.Node:
    return graph.call_method("read", (embedding, _read_lookup(node), *_list_weights(node.args[6])))


def _list_weights(weights: Any) -> tuple[Any, ...]:
    return () if weights is None else (weights,)


def check_shadows(graph: fx.Graph, path_by_shadow: dict[fx.Node, str], find_path: Callable[[int], str]) -> None:
    """Raise GraphError if a node still uses an embedding's shadow parameter (in `path_by_shadow`) or its gradient."""
    for shadow, name in path_by_shadow.items():
        if shadow.users:
            raise _make_shadow_error(name)
    for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD):
        raise _make_shadow_error(find_path(node.args[-1]))


def _make_shadow_error(name: str) -> GraphError:
    return GraphError(
        f"build uses the parameter of embedding {name!r} or its gradient as a tensor, but no tensor holds the rows. "
        "Use the rows that a lookup returns, and leave the embedding out of sums over self.parameters(). Instead of "
        "clip_grad_norm_, call self.clip_grad_norm(max_norm) in __init__. Choose initial rows with "
        "default_initializer=. Write rows with load_dense"
    )


def _find_summands(graph: fx.Graph, embedding_id: int, grad: fx.Node, name: str) -> list[fx.Node]:
    """Return the lookup gradients whose sum is `grad`. Raises GraphError if `grad` is not a plain sum."""
    counts: Counter[fx.Node] = Counter()  # lookup gradient -> how often the sum adds it
    visited: set[fx.Node] = set()
    pending_nodes: list[Any] = [grad]
    while pending_nodes:
        node = pending_nodes.pop()
        if not isinstance(node, fx.Node):
            raise _make_shadow_error(name)
        visited.add(node)
        if node.target is LOOKUP_GRAD and node.args[-1] == embedding_id:
            counts[node] += 1
        elif node.target in _SUMS and not node.kwargs:
            pending_nodes += node.args
        elif node.target in _COPIES:
            pending_nodes.append(node.args[_COPIES[node.target]])
        else:
            raise _make_shadow_error(name)
    summed_storages = find_storages(visited)
    if any(find_written_storages(node) & summed_storages for node in graph.nodes if node not in visited):
        raise _make_shadow_error(name)
    return [node for node in graph.find_nodes(op="call_function", target=LOOKUP_GRAD) for _ in range(counts[node])]


def _find_embedding_node(module: fx.GraphModule, embedding_id: int, find_path: Callable[[int], str]) -> fx.Node:
    """Return the embedding's node. Each step has one node per embedding, at the top of the step."""
    embedding = lookup_op.find_embedding(embedding_id)
    for node in module.graph.find_nodes(op="get_attr"):
        if getattr(module, node.target) is embedding:
            return node
    first_node = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first_node):
        return add_attribute(module, find_path(embedding_id), embedding)


def _move_ids_up(graph: fx.Graph, lookups: list[fx.Node], embedding: fx.Node, name: str) -> None:
    """Move ops in front of the first lookup if they compute ids of later lookups. A single pin needs all ids at once.

    If ids are computed from an earlier lookup's rows, a separate read of these rows is inserted before the pin.
    """
    later_nodes = dropwhile(lambda node: node is not lookups[0], graph.nodes)
    nodes_between = [*takewhile(lambda node: node is not lookups[-1], later_nodes)]
    operands = [operand for lookup in lookups for operand in lookup.args[1:4]]  # without the weights
    id_sources = {operand for operand in operands if isinstance(operand, fx.Node)}
    for node in reversed(nodes_between):
        if node in id_sources:
            id_sources.update(node.all_input_nodes)
    id_storages = find_storages(id_sources)
    if any(find_written_storages(node) & id_storages for node in nodes_between):
        raise GraphError(
            f"embedding {name!r}: ids of a later lookup are changed in place after the first lookup; "
            "compute the ids of all lookups first, or do not change them in place"
        )
    are_id_draws = [node in id_sources for node in nodes_between if is_random(node.target, node.args)]
    if are_id_draws != sorted(are_id_draws, reverse=True):
        raise GraphError(
            f"embedding {name!r}: after the first lookup, build draws other random numbers, such as dropout, and "
            "then draws the ids of a later lookup; draw the ids of all lookups first"
        )
    read_by_lookup: dict[fx.Node, fx.Node] = {}
    for node in nodes_between:
        if node in id_sources and node in lookups:
            with graph.inserting_before(lookups[0]):
                read_by_lookup[node] = _insert_read(graph, embedding, node)
            read_by_lookup[node].meta["val"] = node.meta["val"]
        elif node in id_sources:
            for lookup, early_read in read_by_lookup.items():
                node.replace_input_with(lookup, early_read)
            lookups[0].prepend(node)
