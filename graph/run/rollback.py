"""How a dynamic-shape step runs: in two halves, one that computes, and one that updates parameters and rows.

If the first half fails, what it changed is restored, and another step may run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...engine.errors import TierbedError
from ..passes.rewrite import EFFECTS, bind_ops
from ..trace.alias import called, is_random, storages, written

Forward = Callable[[fx.GraphModule, list[Any]], Any]


def split_updates(module: fx.GraphModule, graph: fx.Graph, last: set[Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A step in two modules: `graph` without the calls of what is in `last`, and these calls, in their order.

    `graph` is a copy of the graph of `module`, and is changed here. The first module returns (results, the arguments of
    the second).
    """
    output, end = graph.output_node(), fx.Graph()
    moving = [node for node in graph.nodes if called(node) in last]
    sources = dict.fromkeys(source for node in moving for source in node.all_input_nodes if source not in moving)
    passed = [source for source in sources if source.op != "get_attr"]
    copies: dict[fx.Node, fx.Node] = {}
    for source in passed:
        copies[source] = end.placeholder(source.name)
        copies[source].meta.update(source.meta)
    for node in graph.nodes:
        if node in moving or (node in sources and node.op == "get_attr"):
            copies[node] = end.node_copy(node, copies.__getitem__)
    end.output(None)
    output.update_arg(0, (output.args[0], passed))
    for node in reversed(moving):
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    return fx.GraphModule(module, graph), fx.GraphModule(module, end)


class DynamicStepFailed(Exception):
    """A dynamic-shape step failed, and what it changed is restored.

    cause: what torch raised. shared_error: over ranks, what all of them raise instead of running another step.
    """

    def __init__(self, cause: BaseException, shared_error: BaseException | None = None) -> None:
        self.cause, self.shared_error = cause, shared_error


class RollbackStep:
    """A compiled step in two halves: its first half, up to the updates, can be undone."""

    def __init__(self, module: fx.GraphModule) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        self._first, self._last = split_updates(module, graph, EFFECTS)
        computing = self._first.graph
        changed: set[int] = set().union(*map(written, computing.nodes))
        placeholders = computing.find_nodes(op="placeholder")
        self._changed = [i for i, node in enumerate(placeholders) if storages(node) & changed]
        attributes = {node: getattr(self._first, str(node.target)) for node in computing.find_nodes(op="get_attr")}
        self._constants: list[Tensor] = [value for node, value in attributes.items() if storages(node) & changed]
        self._generators = [value for value in attributes.values() if isinstance(value, torch.Generator)]
        self._generators += _generators(computing)
        bind_ops(self._first)
        bind_ops(self._last)

    def run(self, tensors: list[Tensor], forward: Forward) -> Any:
        """Run the step, each half by `forward(module, tensors)`, and return its result.

        Raises DynamicStepFailed for what torch raises before parameters or rows change; buffers, arguments and random
        generators are restored. tierbed's own errors, and later errors, are raised as they are.
        """
        changed = [*(tensors[i] for i in self._changed), *self._constants]
        before = [tensor.clone() for tensor in changed]
        random = [generator.get_state() for generator in self._generators]
        try:
            outputs, arguments = forward(self._first, tensors)
        except TierbedError:
            raise  # an error of rows or of the graph, which another step would raise as well
        except Exception as error:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            for generator, state in zip(self._generators, random, strict=True):
                generator.set_state(state)
            raise DynamicStepFailed(error) from error
        forward(self._last, arguments)
        return outputs


def _generators(graph: fx.Graph) -> list[torch.Generator]:
    """The random generators of the devices on which a step draws random numbers."""
    drawn = [node.meta.get("val") for node in graph.nodes if is_random(node.target, node.args)]
    devices = {value.device for value in pytree.tree_leaves(drawn) if isinstance(value, Tensor)}
    on_gpu = [torch.cuda.default_generators[device.index] for device in devices if device.type == "cuda"]
    return [torch.default_generator, *on_gpu] if devices else []
