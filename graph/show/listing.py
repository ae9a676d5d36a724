"""Show a compiled step to people: as text, and as a flowchart in Mermaid for `Graph.draw`.

The text is Python, one op per line, with a comment on each result. The flowchart groups ops by stage, and draws a
chain of elementwise ops and views as one box. Parameters get no boxes; boxes list the parameters that they read.
"""

from __future__ import annotations

import html
import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...engine.ops.embedding_base import EmbeddingBase
from ..passes.collectives import sum_over_ranks
from ..passes.lookups import find_prefetchable_lookups
from ..passes.step_epilogue import accumulate, apply_gradients, dense_step, schedule
from ..trace.alias import get_call_target
from ..trace.trace import BACKWARD, MODULE_TENSOR

# the stage "compiled" is forward and backward together, after `compile_dense`
STAGES = ("inputs", "pin", "gather", "forward", "compiled", "backward", "exchange", "update", "dense step", "outputs")
_STAGE_BY_OP = {"placeholder": "inputs", "get_attr": "inputs", "call_module": "compiled", "output": "outputs"}
_STAGE_BY_CALL: dict[Any, str] = {
    "pin": "pin",
    "gather": "gather",
    "read": "gather",
    "weights_grad": "backward",
    "read_weights_grad": "backward",
    "send": "exchange",
    sum_over_ranks: "exchange",
    "update": "update",
    apply_gradients: "update",
    accumulate: "update",
    dense_step: "dense step",
    schedule: "dense step",
}
_MAX_NAMED = 3  # maximum number of parameters that a box names


def find_stages(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return each node's stage, one of `STAGES`. Nodes computed from gradients, such as clipping, count as backward."""
    stage_by_node: dict[fx.Node, str] = {}
    for node in graph.nodes:
        stage = _STAGE_BY_OP.get(node.op) or _STAGE_BY_CALL.get(get_call_target(node))
        input_stages = [stage_by_node[source] for source in node.all_input_nodes]
        if node.target is operator.getitem:
            stage = input_stages[0]
        is_backward = BACKWARD in node.meta or "backward" in input_stages
        stage_by_node[node] = stage or ("backward" if is_backward else "forward")
    return stage_by_node


def describe_rows(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Name the embedding whose rows a node uses, and its store: `users in cached_ssd`. None for nodes without rows."""
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        is_embedding = isinstance(value, EmbeddingBase)
        return f"{node.target} in {value.store_options.store}" if is_embedding else None
    if get_call_target(node) not in _STAGE_BY_CALL:
        return None
    follows_pins = get_call_target(node) != "pin"  # the batch argument of a pin belongs to another embedding
    sources = [n for n in node.all_input_nodes if n.op == "get_attr" or (follows_pins and get_call_target(n) == "pin")]
    row_sources = [text for source in sources if (text := describe_rows(module, source)) is not None]
    return ", ".join(dict.fromkeys(row_sources)) or None


def draw(module: fx.GraphModule, title: str, ahead: bool) -> str:
    """Return the step as a Mermaid flowchart. ahead: True if `Graph.run` fetches rows before the step."""
    stage_by_node, unboxed = find_stages(module.graph), _name_unboxed(module)
    box_by_node = _make_boxes(module.graph, stage_by_node, unboxed)
    boxes = [box for node, box in box_by_node.items() if node is box[-1]]
    prefetched = {node: source.target for node, (source, _) in find_prefetchable_lookups(module)} if ahead else {}
    box_names = {box[-1]: f"n{number}" for number, box in enumerate(boxes)}
    lines = ["---", f"title: {json.dumps(title)}", "---", "flowchart TB"]
    for number, stage in enumerate(STAGES):
        if stage_boxes := [box for box in boxes if stage_by_node[box[-1]] == stage]:
            lines.append(f'subgraph s{number}["{stage}"]')
            for box in stage_boxes:
                texts = [*_format_lines(module, box, unboxed)]
                if box[-1] in prefetched:  # all other ops run in order, on one stream
                    on_gpu = getattr(module, prefetched[box[-1]]).shadow.is_cuda
                    texts.append(f"ahead, on a separate {'stream' if on_gpu else 'thread'}")
                lines.append(f"    {box_names[box[-1]]}{_draw_box(texts, describe_rows(module, box[-1]) is not None)}")
            lines.append("end")
    for box in boxes:
        sources = dict.fromkeys(box_by_node[s][-1] for node in box for s in node.all_input_nodes if s in box_by_node)
        lines += (f"{box_names[source]} --> {box_names[box[-1]]}" for source in sources if source is not box[-1])
    return "\n".join(lines) + "\n"


def _draw_box(lines: list[str], uses_store: bool) -> str:
    """Return a box's text in Mermaid brackets. A box that uses a store is drawn as a cylinder."""
    escaped = (html.escape(line.replace("#", "#35;"), quote=False).replace("&", "#") for line in lines)
    text = "<br>".join(escaped).replace('"', "#quot;")
    return f'[("{text}")]' if uses_store else f'["{text}"]'


def _make_boxes(
    graph: fx.Graph, stage_by_node: dict[fx.Node, str], unboxed: dict[fx.Node, str]
) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to its box, the ordered list of nodes that are drawn together."""
    box_by_node: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in unboxed or (node.op == "placeholder" and not node.users):
            continue
        candidates = (s for s in node.all_input_nodes if s in box_by_node and stage_by_node[s] == stage_by_node[node])
        previous = next((source for source in candidates if _continues_chain(source, node)), None)
        box_by_node[node] = box = [] if previous is None else box_by_node[previous]
        box.append(node)
    return box_by_node


def _name_unboxed(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Return names for nodes without boxes: parameters and other tensors of the graph, their views, and optimizers."""
    name_by_node: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if MODULE_TENSOR in node.meta or (node.op == "get_attr" and describe_rows(module, node) is None):
            name_by_node[node] = node.name
        elif _is_view(node) and all(source in name_by_node for source in node.all_input_nodes):
            name_by_node[node] = name_by_node[node.all_input_nodes[0]]
    return name_by_node


def _continues_chain(source: fx.Node, node: fx.Node) -> bool:
    """True if both nodes belong to one chain of ops, drawn as one box."""
    are_simple = all(_is_view(op) or torch.Tag.pointwise in getattr(op.target, "tags", ()) for op in (source, node))
    return len(source.users) == 1 and are_simple


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _format_lines(module: fx.GraphModule, nodes: list[fx.Node], unboxed: dict[fx.Node, str]) -> Iterator[str]:
    """Yield a box's lines: its ops, the last op's result, and the parameters that it reads."""
    last_node = nodes[-1]
    if last_node.op.startswith("call"):
        names = [_format_op(node.target).removeprefix("aten.").split(".")[0] for node in nodes]
        yield " \N{RIGHTWARDS ARROW} ".join(
            names if len(names) <= 4 else [*names[:3], f"({len(names) - 4})", names[-1]]
        )
    else:
        yield last_node.name
    if result := describe_node(module, last_node):
        yield result
    parameters = list(dict.fromkeys(unboxed[s] for node in nodes for s in node.all_input_nodes if s in unboxed))
    yield from parameters[:_MAX_NAMED]
    if len(parameters) > _MAX_NAMED:
        yield f"and {len(parameters) - _MAX_NAMED} more"


def format_step(module: fx.GraphModule) -> str:
    """Return the step as text, with a heading per stage. A comment after each op describes the op's result and rows."""
    stage_by_node = find_stages(module.graph)
    arguments = ["self", *(node.name for node in module.graph.find_nodes(op="placeholder"))]
    lines = [f"def forward({', '.join(arguments)}):"]
    stage = "inputs"
    for node in module.graph.nodes:
        if node.op == "placeholder":
            lines += [f"    # {node.name}: {describe_node(module, node)}"] if node.users else []
            continue
        if stage_by_node[node] not in ("inputs", stage):
            stage = stage_by_node[node]
            lines.append(f"    # {stage}")
        comment = describe_node(module, node)
        lines.append(f"    {format_statement(node)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines)


def format_statement(node: fx.Node) -> str:
    """Return a node as a line of Python."""
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.target is operator.getitem:
        return f"{node.name} = {node.args[0]}[{node.args[1]}]"
    arguments = [*map(_format_arg, node.args), *(f"{name}={_format_arg(value)}" for name, value in node.kwargs.items())]
    owner = f"{arguments.pop(0)}." if node.op == "call_method" else "self." * (node.op == "call_module")
    return f"{node.name} = {owner}{_format_op(node.target)}({', '.join(arguments)})"


def _format_op(target: Callable[..., Any] | str) -> str:
    """Return an op's name, such as `aten.addmm.default`, `gather` or `dense_0`."""
    return str(target) if isinstance(target, torch._ops.OpOverload | str) else target.__name__


def describe_node(module: fx.GraphModule, node: fx.Node) -> str:
    """Describe a node's result and, if it uses rows, their store, such as `float32 [8, 12], users in cached_ssd`."""
    values = pytree.tree_leaves(node.meta.get("val"))
    parts = [describe_tensor(value) for value in values if isinstance(value, Tensor)]
    rows = describe_rows(module, node)
    return ", ".join(parts if rows is None else [*parts, rows])


def describe_tensor(value: Tensor) -> str:
    """Return a tensor's dtype and shape, such as `float32 [8, 12]`, and its device if it is not the CPU."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)}" + ("" if value.device.type == "cpu" else f" {value.device}")


def _format_arg(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # print a Lookup without trailing None fields
        num_used = max((count for count, part in enumerate(value, 1) if part is not None), default=0)
        return f"{type(value).__name__}({', '.join(map(_format_arg, value[:num_used]))})"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_format_arg, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
