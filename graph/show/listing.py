"""A compiled step for people: its stages, the step as text, and `Graph.draw` as a flowchart in Mermaid.

The text is Python, one op a line, with what each op makes as a comment. The flowchart has a group for each stage. A
chain of elementwise ops and views is one box. Parameters are no boxes; the boxes that read them name them.
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

from ...engine.ops.rows_contract import EmbeddingBase
from ..passes.collectives import sum_over_ranks
from ..passes.lookups import prefetchable_lookups
from ..passes.step_epilogue import accumulate, apply_gradients, dense_step, schedule
from ..trace.alias import called
from ..trace.trace import BACKWARD, LIVE

# compiled: forward and backward together, as `compile_dense` makes it
STAGES = ("inputs", "pin", "gather", "forward", "compiled", "backward", "exchange", "update", "dense step", "outputs")
_OF_OP = {"placeholder": "inputs", "get_attr": "inputs", "call_module": "compiled", "output": "outputs"}
_OF_CALL: dict[Any, str] = {
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
_MAX_NAMED = 3  # the most parameters that a box names


def stages(graph: fx.Graph) -> dict[fx.Node, str]:
    """The stage of each node, one of `STAGES`. What is made of gradients, such as clipping, counts as backward."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        known = _OF_OP.get(node.op) or _OF_CALL.get(called(node))
        of_inputs = [found[source] for source in node.all_input_nodes]
        if node.target is operator.getitem:
            known = of_inputs[0]
        after = BACKWARD in node.meta or "backward" in of_inputs
        found[node] = known or ("backward" if after else "forward")
    return found


def rows_at(module: fx.GraphModule, node: fx.Node) -> str | None:
    """The embedding whose rows a node pins, reads or updates, and its store: `users in cached_ssd`. Else None."""
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        is_embedding = isinstance(value, EmbeddingBase)
        return f"{node.target} in {value.store_options.store}" if is_embedding else None
    if called(node) not in _OF_CALL:
        return None
    fetched = called(node) != "pin"  # the batch that a pin is like has rows of another embedding
    sources = [n for n in node.all_input_nodes if n.op == "get_attr" or (fetched and called(n) == "pin")]
    found = [rows for source in sources if (rows := rows_at(module, source)) is not None]
    return ", ".join(dict.fromkeys(found)) or None


def draw(module: fx.GraphModule, title: str, ahead: bool) -> str:
    """The step as a flowchart in Mermaid. ahead: whether `Graph.run` fetches rows before the step begins."""
    stage_of, named = stages(module.graph), _names_without_box(module)
    box_of = _boxes(module.graph, stage_of, named)
    boxes = [box for node, box in box_of.items() if node is box[-1]]
    fetched = {node: source.target for node, (source, _) in prefetchable_lookups(module)} if ahead else {}
    name_of = {box[-1]: f"n{number}" for number, box in enumerate(boxes)}
    lines = ["---", f"title: {json.dumps(title)}", "---", "flowchart TB"]
    for number, stage in enumerate(STAGES):
        if own := [box for box in boxes if stage_of[box[-1]] == stage]:
            lines.append(f'subgraph s{number}["{stage}"]')
            for box in own:
                texts = [*_lines(module, box, named)]
                if box[-1] in fetched:  # all other work is done in order, on one stream
                    on_gpu = getattr(module, fetched[box[-1]]).shadow.is_cuda
                    texts.append(f"ahead, on a separate {'stream' if on_gpu else 'thread'}")
                lines.append(f"    {name_of[box[-1]]}{_shape(texts, rows_at(module, box[-1]) is not None)}")
            lines.append("end")
    for box in boxes:
        sources = dict.fromkeys(box_of[s][-1] for node in box for s in node.all_input_nodes if s in box_of)
        lines += (f"{name_of[source]} --> {name_of[box[-1]]}" for source in sources if source is not box[-1])
    return "\n".join(lines) + "\n"


def _shape(lines: list[str], is_of_store: bool) -> str:
    """The text of a box in brackets; those of a store draw a cylinder."""
    escaped = (html.escape(line.replace("#", "#35;"), quote=False).replace("&", "#") for line in lines)
    text = "<br>".join(escaped).replace('"', "#quot;")
    return f'[("{text}")]' if is_of_store else f'["{text}"]'


def _boxes(graph: fx.Graph, stage_of: dict[fx.Node, str], named: dict[fx.Node, str]) -> dict[fx.Node, list[fx.Node]]:
    """The box of each node that has one: the nodes that are drawn together, in their order."""
    box_of: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in named or (node.op == "placeholder" and not node.users):
            continue
        chained = (s for s in node.all_input_nodes if s in box_of and stage_of[s] == stage_of[node])
        joined = next((source for source in chained if _continues(source, node)), None)
        box_of[node] = box = [] if joined is None else box_of[joined]
        box.append(node)
    return box_of


def _names_without_box(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Names of nodes without boxes: parameters and other tensors that a step keeps, their views, optimizers."""
    named: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if LIVE in node.meta or (node.op == "get_attr" and rows_at(module, node) is None):
            named[node] = node.name
        elif _is_view(node) and all(source in named for source in node.all_input_nodes):
            named[node] = named[node.all_input_nodes[0]]
    return named


def _continues(source: fx.Node, node: fx.Node) -> bool:
    """Whether both nodes belong to one chain of ops, drawn as one box."""
    are_simple = all(_is_view(op) or torch.Tag.pointwise in getattr(op.target, "tags", ()) for op in (source, node))
    return len(source.users) == 1 and are_simple


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _lines(module: fx.GraphModule, nodes: list[fx.Node], named: dict[fx.Node, str]) -> Iterator[str]:
    """The text of a box: its ops, what the last op makes, and the parameters that they read."""
    last = nodes[-1]
    if last.op.startswith("call"):
        names = [_op_name(node.target).removeprefix("aten.").split(".")[0] for node in nodes]
        yield " \N{RIGHTWARDS ARROW} ".join(
            names if len(names) <= 4 else [*names[:3], f"({len(names) - 4})", names[-1]]
        )
    else:
        yield last.name
    if made := describe(module, last):
        yield made
    reads = list(dict.fromkeys(named[s] for node in nodes for s in node.all_input_nodes if s in named))
    yield from reads[:_MAX_NAMED]
    if len(reads) > _MAX_NAMED:
        yield f"and {len(reads) - _MAX_NAMED} more"


def listing(module: fx.GraphModule) -> str:
    """The step: a heading for each stage, and after each op the dtype and shape of its result, or its store."""
    stage_of = stages(module.graph)
    arguments = ["self", *(node.name for node in module.graph.find_nodes(op="placeholder"))]
    lines = [f"def forward({', '.join(arguments)}):"]
    stage = "inputs"
    for node in module.graph.nodes:
        if node.op == "placeholder":
            lines += [f"    # {node.name}: {describe(module, node)}"] if node.users else []
            continue
        if stage_of[node] not in ("inputs", stage):
            stage = stage_of[node]
            lines.append(f"    # {stage}")
        comment = describe(module, node)
        lines.append(f"    {statement(node)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines)


def statement(node: fx.Node) -> str:
    """The line of Python for a node."""
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.target is operator.getitem:
        return f"{node.name} = {node.args[0]}[{node.args[1]}]"
    arguments = [*map(_text, node.args), *(f"{name}={_text(value)}" for name, value in node.kwargs.items())]
    owner = f"{arguments.pop(0)}." if node.op == "call_method" else "self." * (node.op == "call_module")
    return f"{node.name} = {owner}{_op_name(node.target)}({', '.join(arguments)})"


def _op_name(target: Callable[..., Any] | str) -> str:
    """The name of an op, such as `aten.addmm.default`, `gather` or `dense_0`."""
    return str(target) if isinstance(target, torch._ops.OpOverload | str) else target.__name__


def describe(module: fx.GraphModule, node: fx.Node) -> str:
    """What a node returns, and of which rows: `float32 [8, 12]`, `float32 [8, 3, 4], users in cached_ssd`."""
    values = pytree.tree_leaves(node.meta.get("val"))
    parts = [tensor_text(value) for value in values if isinstance(value, Tensor)]
    rows = rows_at(module, node)
    return ", ".join(parts if rows is None else [*parts, rows])


def tensor_text(value: Tensor) -> str:
    """Dtype and shape of a tensor, such as `float32 [8, 12]`, with the device unless it is the CPU."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)}" + ("" if value.device.type == "cpu" else f" {value.device}")


def _text(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a Lookup, without unused fields at its end
        used = max((count for count, part in enumerate(value, 1) if part is not None), default=0)
        return f"{type(value).__name__}({', '.join(map(_text, value[:used]))})"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
