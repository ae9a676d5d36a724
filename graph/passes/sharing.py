"""The pass that lets embeddings which look up the same ids deduplicate them once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ...engine.ops import row_ops
from ..trace.alias import is_random, memory, written


def share_batches(module: fx.GraphModule) -> None:
    """Let a pin take the unique rows of an earlier pin of the same lookups by another embedding.

    Lookups are the same where the same ops of torch make their tensors of the same tensors. Nothing may write to these
    tensors anywhere in the step. Embeddings must agree in their number of tables, key type, padding
    and legal ids.
    """
    changed = set().union(*map(written, module.graph.nodes))
    values: dict[Hashable, int] = {}
    value_of: dict[fx.Node, int] = {}
    first: dict[Hashable, fx.Node] = {}
    for node in module.graph.nodes:
        is_constant = not memory((node, *node.all_input_nodes)) & changed
        if is_constant and node.target is row_ops.pin:
            embedding, lookups = node.args
            spec = getattr(module, embedding.target).spec
            key = (spec.num_tables, spec.key_type, spec.padding_idx, spec.legal_ids, _key(lookups, value_of))
            earlier = first.setdefault(key, node)
            if earlier is not node:
                node.args = (embedding, earlier.args[1], earlier)
        same: Hashable = (node.op, node.target) if node.op == "get_attr" else node
        if is_constant and _is_pure(node):
            same = (node.target, _key((node.args, *node.kwargs.items()), value_of))
        value_of[node] = values.setdefault(same, len(values))


def _key(argument: Any, value_of: dict[fx.Node, int]) -> Hashable:
    """A key that is equal for arguments of equal values. A node goes by its value, a number by its type as well."""
    if isinstance(argument, fx.Node):
        return fx.Node, value_of[argument]
    if isinstance(argument, list | tuple):
        return tuple(_key(part, value_of) for part in argument)
    return type(argument), argument


def _is_pure(node: fx.Node) -> bool:
    if node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt):
        return True  # a size that the trace left open, or a number made of one
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return is_torch and not is_random(node.target, node.args)
