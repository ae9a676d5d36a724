"""Changes of a step's graph that several passes make."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..trace.names import identifiers


def add_attribute(module: fx.GraphModule, name: str, value: Any) -> fx.Node:
    """Keep a value, of any type, by this name or one like it, and return a node for it at the insertion point."""
    (name,) = identifiers([name], dir(module))
    setattr(module, name, value)
    return module.graph.create_node("get_attr", name)


def replace(node: fx.Node, by: fx.Node) -> None:
    by.meta.update(node.meta)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
