"""Run a dynamic-shape step so that it can be undone.

Torch may fail to run a dynamic-shape step. The step therefore has two halves: the first half computes, the second half
updates parameters and rows. If the first half fails, its changes are undone and a static-shape step runs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...engine.errors import TierbedError
from ..passes.rewrite import SIDE_EFFECT_TARGETS, bind_ops
from ..trace.alias import find_node_storages, find_written_storages, get_call_target, is_random

Forward = Callable[[fx.GraphModule, list[Any]], Any]


def split_updates(module: fx.GraphModule, graph: fx.Graph, targets: set[Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split `module`. The second half makes the calls in `targets`, in order. The first half makes all other calls.

    graph: a copy of the module's graph. The first half returns (results, arguments of the second half).
    """
    output, second_graph = graph.output_node(), fx.Graph()
    moved_nodes = [node for node in graph.nodes if get_call_target(node) in targets]
    sources = dict.fromkeys(arg for node in moved_nodes for arg in node.all_input_nodes if arg not in moved_nodes)
    inputs = [source for source in sources if source.op != "get_attr"]
    copies: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        copies[source] = second_graph.placeholder(source.name)
        copies[source].meta.update(source.meta)
    for node in graph.nodes:
        if node in moved_nodes or (node in sources and node.op == "get_attr"):
            copies[node] = second_graph.node_copy(node, copies.__getitem__)
    second_graph.output(None)
    output.update_arg(0, (output.args[0], inputs))
    for node in reversed(moved_nodes):
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    return fx.GraphModule(module, graph), fx.GraphModule(module, second_graph)


class DynamicStepError(Exception):
    """A dynamic-shape step failed with torch's exception `cause`, and its changes were undone.

    shared_error: the error that all ranks raise, or None. If it is set, no static-shape step runs.
    """

    def __init__(self, cause: BaseException, shared_error: BaseException | None = None) -> None:
        self.cause, self.shared_error = cause, shared_error


class RollbackStep:
    """A compiled step in two halves. The first half can be undone."""

    def __init__(self, module: fx.GraphModule) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        self._first_half, self._second_half = split_updates(module, graph, SIDE_EFFECT_TARGETS)
        first_graph = self._first_half.graph
        changed_storages: set[int] = set().union(*map(find_written_storages, first_graph.nodes))
        placeholders = first_graph.find_nodes(op="placeholder")
        self._changed_inputs = [i for i, node in enumerate(placeholders) if find_node_storages(node) & changed_storages]
        attributes = {n: getattr(self._first_half, str(n.target)) for n in first_graph.find_nodes(op="get_attr")}
        self._constants: list[Tensor] = [v for n, v in attributes.items() if find_node_storages(n) & changed_storages]
        self._random_generators = [value for value in attributes.values() if isinstance(value, torch.Generator)]
        self._random_generators += _find_generators(first_graph)
        bind_ops(self._first_half)
        bind_ops(self._second_half)

    def run(self, tensors: list[Tensor], forward: Forward) -> Any:
        """Run both halves with `forward(module, tensors)` and return the step's result.

        If torch raises before parameters or rows change, this method restores buffers, arguments and random generators,
        and raises DynamicStepError. After a TierbedError or an error in the second half, nothing is restored.
        """
        changed_tensors = [*(tensors[i] for i in self._changed_inputs), *self._constants]
        old_values = [tensor.clone() for tensor in changed_tensors]
        random_states = [generator.get_state() for generator in self._random_generators]
        try:
            outputs, arguments = forward(self._first_half, tensors)
        except TierbedError:
            raise  # a static-shape step would raise this error too
        except Exception as error:
            for tensor, value in zip(changed_tensors, old_values, strict=True):
                tensor.copy_(value)
            for generator, state in zip(self._random_generators, random_states, strict=True):
                generator.set_state(state)
            raise DynamicStepError(error) from error
        forward(self._second_half, arguments)
        return outputs


def _find_generators(graph: fx.Graph) -> list[torch.Generator]:
    """Return the random generators that the step's random ops use: the default generators of the ops' devices."""
    results = [node.meta.get("val") for node in graph.nodes if is_random(node.target, node.args)]
    devices = {value.device for value in pytree.tree_leaves(results) if isinstance(value, Tensor)}
    on_gpu = [torch.cuda.default_generators[device.index] for device in devices if device.type == "cuda"]
    return [torch.default_generator, *on_gpu] if devices else []
