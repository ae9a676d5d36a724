"""Passes that turn a trace into a compiled step. A trace is an FX graph with fake tensors in its nodes' `meta`.

A dynamic-shape step computes all sizes and strides from its inputs' sizes when it begins (`compute_sizes`). A trace
instead reads each size when needed, from the first tensor with this size. Late reads are unsafe: an op may have changed
the tensor's shape in place, and a kernel may choose another stride than in the trace.
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
from ..trace import alias
from ..trace.alias import find_node_storages, is_reshape, preserve_value
from ..trace.names import make_identifiers
from ..trace.trace import MODULE_TENSOR
from .collectives import sum_over_ranks
from .nodes import add_attribute, replace_node
from .step_epilogue import DenseGrads, RowGrads, StepEpilogue, accumulate, apply_gradients, dense_step, schedule

# calls that change rows or parameters: functions, and the method `update` of pinned batches
SIDE_EFFECT_TARGETS: set[Any] = {"update", sum_over_ranks, dense_step, apply_gradients, accumulate, schedule}
_OP_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def name_placeholders(nodes: list[fx.Node], names: list[str]) -> None:
    """Rename placeholders for the printed step. An argument gets its name in `build`; a parameter gets its path."""
    for node, name in zip(nodes, make_identifiers(names), strict=True):
        node._rename(name)
        node.target = node.name


def drop_detach(graph: fx.Graph) -> None:
    """Remove detach nodes: no-ops without autograd. Keep a detach node whose input or result is reshaped in place."""
    reshaped_storages = alias.find_reshaped_storages(graph)
    detaches = graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    # the trace added a detach for each argument, but build reshapes the caller's tensor itself
    arguments = [n for n in detaches if n.args[0].op == "placeholder" and MODULE_TENSOR not in n.args[0].meta]
    for node in detaches:
        if node in arguments or not find_node_storages(node) & reshaped_storages:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def drop_double_transpose(graph: fx.Graph) -> None:
    """Remove pairs of transposes that cancel. Autograd inserts them for weights and gradients of linear layers."""
    transpose = torch.ops.aten.t.default
    reshaped_storages = alias.find_reshaped_storages(graph)
    for node in graph.find_nodes(op="call_function", target=transpose):
        if node.args[0].target is transpose and not find_node_storages(node) & reshaped_storages:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)


def cut_outputs(graph: fx.Graph, count: int) -> list[fx.Node]:
    """Keep the step's first `count` outputs, detached from arguments and parameters. Returns the remaining outputs."""
    output, external_storages = graph.output_node(), alias.find_external_storages(graph)
    results: Any = output.args[0]
    outputs = [*results]
    for i, value in enumerate(outputs[:count]):
        if find_node_storages(value) & external_storages:
            with graph.inserting_before(output):
                outputs[i] = graph.call_function(torch.ops.aten.detach.default, (value,))
    output.update_arg(0, outputs[:count])
    return outputs[count:]


def add_dense_steps(
    module: fx.GraphModule, optimizers: Iterable[Optimizer], grads: list[tuple[Optimizer, fx.Node, fx.Node]]
) -> None:
    """Append a `dense_step` node for each optimizer. grads: (optimizer, parameter node, gradient node) triples."""
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        for optimizer in optimizers:
            node = add_attribute(module, type(optimizer).__name__.lower(), optimizer)
            own_grads = [(parameter, grad) for owner, parameter, grad in grads if owner is optimizer]
            graph.call_function(dense_step, (node, [p for p, _ in own_grads], [g for _, g in own_grads]))


def merge_updates(module: fx.GraphModule, epilogue: StepEpilogue) -> fx.Node:
    """Replace all updates and dense steps with one node that scales and clips their gradients together."""
    graph = module.graph
    is_accumulating = epilogue.accumulate_steps > 1
    row_grads: list[Any] = []
    for node in graph.find_nodes(op="call_method", target="update"):
        other_args: Any
        batch, grads, *other_args = node.args
        weights = other_args[0] if other_args else [None] * len(grads)
        if is_accumulating:
            embedding, lookups = batch.args
            preserved_lookups = [Lookup(*(preserve_value(graph, batch, part) for part in lookup)) for lookup in lookups]
            row_grads.append((embedding, preserved_lookups, grads, weights))
        else:
            row_grads.append(RowGrads(batch, grads, weights))
        graph.erase_node(node)
    dense_step_nodes = graph.find_nodes(op="call_function", target=dense_step)
    dense_grads: list[Any] = [DenseGrads(*node.args) for node in dense_step_nodes]
    for node in dense_step_nodes:
        graph.erase_node(node)
    with graph.inserting_before(graph.output_node()):
        epilogue_node = add_attribute(module, "step_end", epilogue)
        target = accumulate if is_accumulating else apply_gradients
        update_node = graph.call_function(target, (epilogue_node, row_grads, dense_grads))
    if is_accumulating:
        for node in graph.find_nodes(op="call_method", target="pin"):
            _replace_pin_by_reads(graph, node)
    return update_node


def _replace_pin_by_reads(graph: fx.Graph, pin: fx.Node) -> None:
    """Replace uses of a pinned batch with reads, because accumulated rows are pinned only for their update."""
    arguments: Any = pin.args
    embedding, lookups = arguments
    reads: dict[Any, str] = {"gather": "read", "weights_grad": "read_weights_grad"}
    for node in list(pin.users):
        index: Any = node.args[1]
        with graph.inserting_before(node):
            replace_node(node, graph.call_method(reads[node.target], (embedding, lookups[index], *node.args[2:])))
    graph.erase_node(pin)


def add_schedules(module: fx.GraphModule, schedulers: Iterable[LRScheduler], update_node: fx.Node | None) -> None:
    """Call each learning rate scheduler at the end. update_node: its value is True if the optimizers stepped."""
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        for scheduler in schedulers:
            node = add_attribute(module, type(scheduler).__name__.lower(), scheduler)
            graph.call_function(schedule, (node,) if update_node is None else (node, update_node))


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Remove dead nodes. Unlike FX's own pass, also remove in-place ops on memory that no node reads."""
    live_nodes = alias.find_live_nodes(graph, SIDE_EFFECT_TARGETS)
    for node in reversed(list(graph.nodes)):
        if node not in live_nodes:
            graph.erase_node(node)


def compute_sizes(module: fx.GraphModule) -> None:
    """Compute all sizes, strides and offsets from the inputs' sizes, instead of reading them from other tensors.

    Raises GraphError if build reshapes an argument, parameter or buffer in place, because other calls have other sizes.
    """
    graph = module.graph
    if any(is_reshape(node) and node.args[0].op != "call_function" for node in graph.nodes):
        raise GraphError("build changes the shape of an argument, a parameter or a buffer in place")
    size_nodes = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), torch.SymInt)]
    size_reads = [n for n in size_nodes if any(isinstance(arg.meta.get("val"), Tensor) for arg in n.all_input_nodes)]
    old_nodes = set(graph.nodes)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        values = _read_dynamic_sizes(graph)
        symbols = dict(values)
        for node in size_reads:
            expression = node.meta["val"].node.expr
            if expression not in values:
                values[expression] = sympy_interp(PythonReferenceAnalysis, symbols, expression)
            replacement = values[expression]
            node.replace_all_uses_with(replacement.node if isinstance(replacement, fx.Proxy) else replacement)
    for node in size_reads:
        graph.erase_node(node)
    for node in graph.nodes:
        if node not in old_nodes and "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)


def _read_dynamic_sizes(graph: fx.Graph) -> dict[Any, Any]:
    """Insert nodes that read dynamic sizes from placeholders. Returns {sympy symbol: FX proxy of the inserted node}."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies: dict[Any, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in proxies:
                size_node = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                size_node.meta["val"] = size
                proxies[size.node.expr] = fx.Proxy(size_node, tracer)
    return proxies


def bind_ops(module: fx.GraphModule) -> None:
    """Make `module.forward` call torch ops through global names, to save attribute lookups. `recompile` undoes this."""
    code = module.graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    used_names = {str(name) for node in module.graph.nodes for name in (node.name, node.target)}

    def bind(match: re.Match[str]) -> str:
        namespace, op, overload = match.groups()
        name = f"{namespace}_{op}_{overload}_op"
        while name in used_names:  # a parameter of build may already use this name
            name += "_"
        names[name] = getattr(getattr(getattr(torch.ops, namespace), op), overload)._op  # `_op` avoids a Python call
        return f"{name}("

    _exec_with_source(_OP_CALL.sub(bind, code.src), names)
    type(module).forward = names["forward"]  # every GraphModule has its own class
