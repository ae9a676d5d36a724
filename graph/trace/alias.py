"""Find the memory that a node of a trace reads and writes.

A trace keeps in-place ops and views. So a value may change after its node has run, and a node with an unused result may
still matter. Passes therefore ask which storages a node writes, and which nodes read these storages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

# in training (argument 5), these ops write to the running statistics (arguments 3, 4); their schemas do not say this
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


def find_node_storages(node: fx.Node) -> set[int]:
    """Return the storages of a node's tensors. All views of a tensor share one storage."""
    return {
        value.untyped_storage()._cdata
        for value in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(value, Tensor) and value.layout is torch.strided  # sparse tensors lack a storage
    }


def find_storages(nodes: Iterable[fx.Node]) -> set[int]:
    return set().union(*map(find_node_storages, nodes))


def get_call_target(node: fx.Node) -> Callable[..., Any] | str | None:
    """Return the function or the method name that a node calls; None for other nodes."""
    return node.target if node.op in ("call_function", "call_method") else None


def is_random(target: Any, args: Sequence[Any]) -> bool:
    """True if a call draws random numbers. Attention without dropout is tagged as random but is not."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    return "dropout_p" not in names or any(args[names.index("dropout_p") :][:1])


def find_written_storages(node: fx.Node) -> set[int]:
    """Return the storages that a node changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    schema = node.target._schema
    if schema.name in _BATCH_NORMS:
        changed_arguments = list(node.args[3:5]) if node.args[5] else []
    else:
        changed_arguments = [
            node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    return find_storages(n for n in pytree.tree_leaves(changed_arguments) if isinstance(n, fx.Node))


def find_reshaped_storages(graph: fx.Graph) -> set[int]:
    return set().union(*(find_written_storages(node) for node in graph.nodes if is_reshape(node)))


def is_reshape(node: fx.Node) -> bool:
    """True if a node changes the shape of its first argument in place, like `transpose_`."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags


def preserve_value(graph: fx.Graph, node: fx.Node, value: Any) -> Any:
    """Return the argument `value` as it is at `node`: a copy, if a later op writes to the argument's memory."""
    later_node = node.next
    while isinstance(value, fx.Node) and later_node.op != "output":
        if find_written_storages(later_node) & find_node_storages(value):
            with graph.inserting_before(node):
                return graph.call_function(torch.ops.aten.clone.default, (value,))
        later_node = later_node.next
    return value


def find_external_storages(graph: fx.Graph) -> set[int]:
    """Return the storages of all tensors that outlive a call: arguments, module tensors and closure tensors."""
    return find_storages(node for node in graph.nodes if node.op in ("placeholder", "get_attr"))


def find_live_nodes(graph: fx.Graph, effects: set[Any]) -> set[fx.Node]:
    """Return all nodes whose results or side effects matter. effects: calls that a step must keep."""
    external_storages = find_external_storages(graph)
    needed_nodes = (n for n in graph.nodes if get_call_target(n) in effects or _has_effect(n, external_storages))
    return add_sources(needed_nodes, graph.nodes)


def add_sources(nodes: Iterable[fx.Node], earlier_nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `nodes`, all nodes that compute their inputs, and `earlier_nodes` that write to memory of any of these."""
    writers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in earlier_nodes:
        for storage in find_written_storages(node):
            writers[storage].append(node)
    dependencies: set[fx.Node] = set()
    pending_nodes = [*nodes]
    while pending_nodes:
        node = pending_nodes.pop()
        if node not in dependencies:
            dependencies.add(node)
            pending_nodes += node.all_input_nodes
            pending_nodes += [writer for storage in find_node_storages(node) for writer in writers[storage]]
    return dependencies


def _has_effect(node: fx.Node, external_storages: set[int]) -> bool:
    if node.op != "call_function":
        return node.op not in ("call_method", "get_attr")
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.is_impure()
    changed_storages = find_written_storages(node)
    if changed_storages & external_storages or is_random(node.target, node.args):
        return True
    return not changed_storages and (node.is_impure() or not node.target._schema.returns)
