"""Which memory a node of a trace reads and writes. A trace keeps in-place ops, so liveness is decided by memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

# their schemas hide that running mean and variance (arguments 3 and 4) change when argument 5 (training) is true
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


def storages(node: fx.Node) -> set[int]:
    """The storages of a node's tensors. Views of one tensor share one."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return {
        value.untyped_storage()._cdata
        for value in values
        if isinstance(value, Tensor) and value.layout is torch.strided  # a sparse tensor has no storage
    }


def memory(nodes: Iterable[fx.Node]) -> set[int]:
    return set().union(*map(storages, nodes))


def called(node: fx.Node) -> Callable[..., Any] | str | None:
    """The function that a node calls, or the name of the method; None for other nodes."""
    return node.target if node.op in ("call_function", "call_method") else None


def is_random(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call draws random numbers. Attention without dropout is tagged as if it did."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    return "dropout_p" not in names or any(args[names.index("dropout_p") :][:1])


def written(node: fx.Node) -> set[int]:
    """The storages that a node changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    schema = node.target._schema
    if schema.name in _BATCH_NORMS:
        changed = list(node.args[3:5]) if node.args[5] else []
    else:
        changed = [
            node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    return memory(n for n in pytree.tree_leaves(changed) if isinstance(n, fx.Node))


def reshaped(graph: fx.Graph) -> set[int]:
    """The storages of tensors whose shape the step changes in place."""
    return set().union(*(written(node) for node in graph.nodes if is_reshape(node)))


def is_reshape(node: fx.Node) -> bool:
    """Whether a node changes the shape of its first argument in place, as `transpose_` does."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags


def stable(graph: fx.Graph, node: fx.Node, value: Any) -> Any:
    """An argument with the value that it has at `node`: a copy if a later op writes to its memory."""
    later = node.next
    while isinstance(value, fx.Node) and later.op != "output":
        if written(later) & storages(value):
            with graph.inserting_before(node):
                return graph.call_function(torch.ops.aten.clone.default, (value,))
        later = later.next
    return value


def external(graph: fx.Graph) -> set[int]:
    """The storages that live longer than a call: arguments, parameters, buffers and closure tensors."""
    return memory(node for node in graph.nodes if node.op in ("placeholder", "get_attr"))


def live_nodes(graph: fx.Graph, effects: set[Any]) -> set[fx.Node]:
    """The nodes that an output, a call of one of `effects`, an outside tensor or the random generator depends on."""
    outside = external(graph)
    return with_sources((n for n in graph.nodes if called(n) in effects or _has_effect(n, outside)), graph.nodes)


def with_sources(nodes: Iterable[fx.Node], before: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, the nodes that they depend on, and those of `before` that write to the memory of any of these."""
    writers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in before:
        for storage in written(node):
            writers[storage].append(node)
    found: set[fx.Node] = set()
    pending = [*nodes]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
            pending += [writer for storage in storages(node) for writer in writers[storage]]
    return found


def _has_effect(node: fx.Node, outside: set[int]) -> bool:
    if node.op != "call_function":
        return node.op not in ("call_method", "get_attr")
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.is_impure()
    changed = written(node)
    if changed & outside or is_random(node.target, node.args):
        return True
    return not changed and (node.is_impure() or not node.target._schema.returns)
