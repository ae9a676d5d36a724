"""Changes of a step's graph that several passes make."""

from __future__ import annotations

from typing import Any

from torch import fx


def add_attribute(module: fx.GraphModule, name: str, value: Any) -> fx.Node:
    """Keep a value, of any type, in the module, and return a node for it at the graph's insertion point."""
    setattr(module, name, value)
    return module.graph.create_node("get_attr", name)


def replace(node: fx.Node, by: fx.Node) -> None:
    by.meta.update(node.meta)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
