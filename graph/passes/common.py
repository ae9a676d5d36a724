"""What turns a recorded step into a compiled one: passes over an FX graph whose nodes carry fake tensors in `meta`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...engine.ops import row_ops
from ...engine.options.inputs import Lookup
from ..trace.alias import external, live_nodes, reshaped, stable, storages
from ..trace.names import identifiers
from ..trace.trace import LIVE
from .dense import dense_step
from .ranks import sum_over_ranks
from .step_end import DenseGrads, RowGrads, StepEnd, accumulate, end_step, schedule

# the nodes that move rows and parameters
EFFECTS: set[Callable[..., Any]] = {row_ops.update, sum_over_ranks, dense_step, end_step, accumulate, schedule}


def name_placeholders(nodes: list[fx.Node], names: list[str]) -> None:
    """Let the printed step show an argument by its name and a parameter by its path."""
    for node, name in zip(nodes, identifiers(names), strict=True):
        node._rename(name)
        node.target = node.name


def drop_detach(graph: fx.Graph) -> None:
    """Remove detach, without autograd the identity, unless its input or its result is reshaped alone.

    A detach of an argument is removed always. The trace made it, and build reshapes the very tensor of the call.
    """
    apart = reshaped(graph)
    detaches = graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    arguments = [n for n in detaches if n.args[0].op == "placeholder" and LIVE not in n.args[0].meta]
    for node in detaches:
        if node in arguments or not storages(node) & apart:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def drop_double_transpose(graph: fx.Graph) -> None:
    """Remove pairs of transposes. The backward of a linear layer has them, for its weight and the weight's gradient."""
    transpose = torch.ops.aten.t.default
    apart = reshaped(graph)
    for node in graph.find_nodes(op="call_function", target=transpose):
        if node.args[0].target is transpose and not storages(node) & apart:
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
    """Add a node for each optimizer at the end of the step. grads: each parameter's optimizer, node and gradient."""
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        for name, optimizer in optimizers.items():
            setattr(module, name, optimizer)
            node = graph.create_node("get_attr", name)
            own = [(parameter, grad) for holder, parameter, grad in grads if holder is optimizer]
            graph.call_function(dense_step, (node, [p for p, _ in own], [g for _, g in own]))


def end_together(module: fx.GraphModule, end: StepEnd) -> fx.Node:
    """Replace all updates and dense steps by one node, which scales and clips their gradients together."""
    graph = module.graph
    accumulates = end.every > 1
    rows: list[Any] = []
    dense: list[Any] = []
    for node in graph.find_nodes(op="call_function", target=row_ops.update):
        given: Any
        batch, grads, *given = node.args
        weights = given[0] if given else [None] * len(grads)
        if accumulates:
            embedding, lookups = batch.args
            kept = [Lookup(*(stable(graph, batch, part) for part in lookup)) for lookup in lookups]
            rows.append((embedding, kept, grads, weights))
        else:
            rows.append(RowGrads(batch, grads, weights))
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=dense_step):
        optimizer, params, grads = node.args
        dense.append(DenseGrads(optimizer, params, grads))
        graph.erase_node(node)
    module.step_end = end  # type: ignore[assignment]  # torch allows any
    with graph.inserting_before(graph.output_node()):
        held = graph.create_node("get_attr", "step_end")
        last = graph.call_function(accumulate if accumulates else end_step, (held, rows, dense))
    if accumulates:
        for node in graph.find_nodes(op="call_function", target=row_ops.pin):
            _read_instead(graph, node)
    return last


def _read_instead(graph: fx.Graph, pin: fx.Node) -> None:
    """Let the uses of a pinned batch read instead: accumulated rows are pinned when their gradients are complete."""
    arguments: Any = pin.args
    embedding, lookups = arguments
    reads: dict[Any, Callable[..., Any]] = {
        row_ops.gather: row_ops.read,
        row_ops.weights_grad: row_ops.read_weights_grad,
    }
    for node in list(pin.users):
        index: Any = node.args[1]
        with graph.inserting_before(node):
            read = graph.call_function(reads[node.target], (embedding, lookups[index], *node.args[2:]))
        read.meta.update(node.meta)
        node.replace_all_uses_with(read)
        graph.erase_node(node)
    graph.erase_node(pin)


def add_schedules(module: fx.GraphModule, schedulers: dict[str, LRScheduler], stepped: fx.Node | None) -> None:
    """Add a step of each learning rate schedule at the end. stepped: a node that says whether optimizers had a step."""
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        for name, scheduler in schedulers.items():
            setattr(module, name, scheduler)
            node = graph.create_node("get_attr", name)
            graph.call_function(schedule, (node,) if stepped is None else (node, stepped))


def drop_dead(graph: fx.Graph) -> None:
    """Remove nodes that nothing depends on, and in-place ops on memory that nobody reads, unlike FX's own pass."""
    live = live_nodes(graph, EFFECTS)
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)
