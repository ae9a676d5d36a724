"""Functions to edit a step's graph, shared by several passes."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..trace.names import make_identifiers


def add_attribute(module: fx.GraphModule, name: str, value: Any) -> fx.Node:
    """Store `value` as module attribute `name`, or a similar unique name. Returns an inserted node that reads it."""
    (name,) = make_identifiers([name], dir(module))
    setattr(module, name, value)
    return module.graph.create_node("get_attr", name)


def replace_node(node: fx.Node, new_node: fx.Node) -> None:
    new_node.meta.update(node.meta)
    node.replace_all_uses_with(new_node)
    node.graph.erase_node(node)
