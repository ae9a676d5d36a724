"""Passes that turn any trace into a compiled step, over an FX graph whose nodes carry fake tensors in `meta`.

A dynamic-shape step computes all numbers from its inputs' sizes at its beginning. A trace reads a size, when it is
needed, from the tensor that had it first. By then an op may have changed the tensor's shape in place, and a stride that
a kernel chooses may differ from the traced one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph_module import _exec_with_source
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ...engine.errors import GraphError
from ...engine.options.lookup import Lookup
from ..trace.alias import external, is_reshape, live_nodes, reshaped, stable, storages
from ..trace.names import identifiers
from ..trace.trace import LIVE
from .collectives import sum_over_ranks
from .nodes import add_attribute, replace
from .step_epilogue import DenseGrads, RowGrads, StepEpilogue, accumulate, apply_gradients, dense_step, schedule

# what the nodes call that change rows and parameters: functions, and a method of a pinned batch
EFFECTS: set[Any] = {"update", sum_over_ranks, dense_step, apply_gradients, accumulate, schedule}
_OP = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def name_placeholders(nodes: list[fx.Node], names: list[str]) -> None:
    """Name placeholders for the printed step: arguments by their names, parameters by their paths."""
    for node, name in zip(nodes, identifiers(names), strict=True):
        node._rename(name)
        node.target = node.name


def drop_detach(graph: fx.Graph) -> None:
    """Remove detach, which is the identity without autograd, unless its input or its result alone is reshaped.

    A detach of an argument is always removed: the trace added it, and build reshapes the tensor of the call itself.
    """
    changed = reshaped(graph)
    detaches = graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    arguments = [n for n in detaches if n.args[0].op == "placeholder" and LIVE not in n.args[0].meta]
    for node in detaches:
        if node in arguments or not storages(node) & changed:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def drop_double_transpose(graph: fx.Graph) -> None:
    """Remove pairs of transposes, which the backward of a linear layer has for its weight and the weight's gradient."""
    transpose = torch.ops.aten.t.default
    changed = reshaped(graph)
    for node in graph.find_nodes(op="call_function", target=transpose):
        if node.args[0].target is transpose and not storages(node) & changed:
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
    output.update_arg(0, values[:count])
    return values[count:]


def add_dense_steps(
    module: fx.GraphModule, optimizers: Iterable[Optimizer], grads: list[tuple[Optimizer, fx.Node, fx.Node]]
) -> None:
    """Add a node for each optimizer at the end of the step. grads: each parameter's optimizer, node and gradient."""
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        for optimizer in optimizers:
            node = add_attribute(module, type(optimizer).__name__.lower(), optimizer)
            own = [(parameter, grad) for holder, parameter, grad in grads if holder is optimizer]
            graph.call_function(dense_step, (node, [p for p, _ in own], [g for _, g in own]))


def end_together(module: fx.GraphModule, end: StepEpilogue) -> fx.Node:
    """Replace all updates and dense steps by one node, which scales and clips their gradients together."""
    graph = module.graph
    accumulates = end.accumulate_steps > 1
    rows: list[Any] = []
    dense: list[Any] = []
    for node in graph.find_nodes(op="call_method", target="update"):
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
    with graph.inserting_before(graph.output_node()):
        epilogue = add_attribute(module, "step_end", end)
        last = graph.call_function(accumulate if accumulates else apply_gradients, (epilogue, rows, dense))
    if accumulates:
        for node in graph.find_nodes(op="call_method", target="pin"):
            _read_instead(graph, node)
    return last


def _read_instead(graph: fx.Graph, pin: fx.Node) -> None:
    """Replace the uses of a pinned batch by reads: accumulated rows are pinned once their gradients are complete."""
    arguments: Any = pin.args
    embedding, lookups = arguments
    reads: dict[Any, str] = {"gather": "read", "weights_grad": "read_weights_grad"}
    for node in list(pin.users):
        index: Any = node.args[1]
        with graph.inserting_before(node):
            read = graph.call_method(reads[node.target], (embedding, lookups[index], *node.args[2:]))
        replace(node, read)
    graph.erase_node(pin)


def add_schedules(module: fx.GraphModule, schedulers: Iterable[LRScheduler], stepped: fx.Node | None) -> None:
    """Add a step of each learning rate schedule at the end. stepped: a node that is true if optimizers had a step."""
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        for scheduler in schedulers:
            node = add_attribute(module, type(scheduler).__name__.lower(), scheduler)
            graph.call_function(schedule, (node,) if stepped is None else (node, stepped))


def drop_dead(graph: fx.Graph) -> None:
    """Remove nodes that nothing depends on and, unlike FX's own pass, in-place ops on memory that no node reads."""
    live = live_nodes(graph, EFFECTS)
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)


def sizes_from_inputs(module: fx.GraphModule) -> None:
    """Replace nodes that read a size, a stride or an offset of a tensor by numbers computed from the inputs' sizes.

    GraphError if the step changes the shape of an input or of a live tensor in place: no other call has that size.
    """
    graph = module.graph
    if any(is_reshape(node) and node.args[0].op != "call_function" for node in graph.nodes):
        raise GraphError("build changes the shape of an argument, a parameter or a buffer in place")
    sizes = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), torch.SymInt)]
    read = [n for n in sizes if any(isinstance(source.meta.get("val"), Tensor) for source in n.all_input_nodes)]
    before = set(graph.nodes)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        known = _dynamic_sizes(graph)
        symbols = dict(known)
        for node in read:
            expression = node.meta["val"].node.expr
            if expression not in known:
                known[expression] = sympy_interp(PythonReferenceAnalysis, symbols, expression)
            value = known[expression]
            node.replace_all_uses_with(value.node if isinstance(value, fx.Proxy) else value)
    for node in read:
        graph.erase_node(node)
    for node in graph.nodes:
        if node not in before and "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)


def _dynamic_sizes(graph: fx.Graph) -> dict[Any, Any]:
    """The sympy symbols of a trace, each with the proxy of a node that reads it from a placeholder."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    found: dict[Any, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in found:
                read = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                read.meta["val"] = size
                found[size.node.expr] = fx.Proxy(read, tracer)
    return found


def bind_ops(module: fx.GraphModule) -> None:
    """Let `module.forward` call each op of torch by a global name, so no step looks ops up. `recompile` undoes it."""
    code = module.graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    used = {str(name) for node in module.graph.nodes for name in (node.name, node.target)}

    def bound(match: re.Match[str]) -> str:
        space, op, overload = match.groups()
        name = f"{space}_{op}_{overload}_op"
        while name in used:  # a parameter of build may have any name
            name += "_"
        names[name] = getattr(getattr(getattr(torch.ops, space), op), overload)._op  # without a frame of Python
        return f"{name}("

    _exec_with_source(_OP.sub(bound, code.src), names)
    type(module).forward = names["forward"]  # each GraphModule has its own class
