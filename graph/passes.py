"""What turns a recorded step into a compiled one: passes over an FX graph whose nodes carry fake tensors in `meta`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from ..engine.ops.step import update
from .alias import external, live_nodes, storages
from .dense import dense_step
from .names import identifiers

_EFFECTS: set[Callable[..., Any]] = {update, dense_step}


def name_placeholders(nodes: list[fx.Node], names: list[str]) -> None:
    """Let the printed step show an argument by its name and a parameter by its path."""
    for node, name in zip(nodes, identifiers(names), strict=True):
        node._rename(name)
        node.target = node.name


def drop_detach(graph: fx.Graph) -> None:
    """A compiled step runs without autograd, where detach is the identity."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def drop_double_transpose(graph: fx.Graph) -> None:
    """The backward of a linear layer transposes its weight, and its weight's gradient, there and back."""
    transpose = torch.ops.aten.t.default
    for node in graph.find_nodes(op="call_function", target=transpose):
        if node.args[0].target is transpose:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)


def keep_outputs(graph: fx.Graph, count: int) -> list[fx.Node]:
    """Cut the output to its first `count` values, detached from the live tensors, and return the rest."""
    output = graph.output_node()
    outside = external(graph)
    returned: Any = output.args[0]
    values = list(returned)
    for i, value in enumerate(values[:count]):
        if storages(value) & outside:
            with graph.inserting_before(output):
                values[i] = graph.call_function(torch.ops.aten.detach.default, (value,))
    output.args = (values[:count],)
    return values[count:]


def add_dense_steps(
    module: fx.GraphModule, optimizers: dict[str, Optimizer], grads: list[tuple[Optimizer, fx.Node, fx.Node]]
) -> None:
    """One node an optimizer at the end of the step. `grads` gives each parameter's optimizer, node and gradient."""
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        for name, optimizer in optimizers.items():
            setattr(module, name, optimizer)
            node = graph.create_node("get_attr", name)
            own = [(parameter, grad) for holder, parameter, grad in grads if holder is optimizer]
            graph.call_function(dense_step, (node, [p for p, _ in own], [g for _, g in own]))


def drop_dead(graph: fx.Graph) -> None:
    """Remove what nothing depends on. Unlike FX's own pass it also removes in-place ops on memory that nobody reads."""
    live = live_nodes(graph, _EFFECTS)
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)
