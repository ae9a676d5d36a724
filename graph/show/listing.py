"""A compiled step for people: its stages, `Graph.draw` as an SVG picture, and the step as text.

The text is Python, one op a line, with what each op makes as a comment. The picture has stages from top to bottom;
within its stage, an op is below all that it reads. A chain of elementwise ops and views is one box. Parameters are no
boxes; the boxes that read them name them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...engine.ops import row_ops
from ...engine.ops.rows_contract import EmbeddingBase
from ..passes.collectives import sum_over_ranks
from ..passes.lookups import known_ahead
from ..passes.step_epilogue import accumulate, apply_gradients, dense_step, schedule
from ..trace.trace import BACKWARD, LIVE

# compiled: forward and backward together, as `compile_dense` makes it
STAGES = ("inputs", "pin", "gather", "forward", "compiled", "backward", "exchange", "update", "dense step", "outputs")
_OF_OP = {"placeholder": "inputs", "get_attr": "inputs", "call_module": "compiled", "output": "outputs"}
_OF_TARGET: dict[Callable[..., Any] | str, str] = {
    row_ops.pin: "pin",
    row_ops.gather: "gather",
    row_ops.read: "gather",
    row_ops.weights_grad: "backward",
    row_ops.read_weights_grad: "backward",
    row_ops.send: "exchange",
    sum_over_ranks: "exchange",
    row_ops.update: "update",
    apply_gradients: "update",
    accumulate: "update",
    dense_step: "dense step",
    schedule: "dense step",
}
_COLORS = {
    "inputs": "#eceff1",
    "pin": "#d1ecf9",
    "gather": "#d9f2e3",
    "forward": "#eef6d6",
    "compiled": "#e6e6fa",
    "backward": "#fdf0d0",
    "exchange": "#e0ddf5",
    "update": "#fbdfd0",
    "dense step": "#f3dcf0",
    "outputs": "#eceff1",
}
_WIDTH, _LEFT, _GAP, _ROW = 1100.0, 100.0, 18.0, 26.0  # of the rows, of the stages' names, between boxes, between rows
_TOP = 36.0
_STYLE = (
    "text{font:11px monospace;white-space:pre}.stage{font-weight:bold;font-size:12px}"
    "path{fill:none;stroke:#78909c;stroke-opacity:.55}rect{stroke:#607d8b;rx:4px}.band{stroke:none}"
    ".store{stroke-width:2.5}.head{fill:#78909c;stroke:none}"
)
_CHAR, _LINE, _PAD = 6.7, 15.0, 7.0
_LONGEST = 44  # the most characters of a line
_MOST = 3  # the most parameters that a box names


def stages(graph: fx.Graph) -> dict[fx.Node, str]:
    """The stage of each node, one of `STAGES`. What is made of gradients, such as clipping, counts as backward."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        known = _OF_OP.get(node.op) or _OF_TARGET.get(node.target)
        of_inputs = [found[source] for source in node.all_input_nodes]
        if node.target is operator.getitem:
            known = of_inputs[0]
        after = BACKWARD in node.meta or "backward" in of_inputs
        found[node] = known or ("backward" if after else "forward")
    return found


def rows_at(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Whose rows a node fetches, reads or updates, and in which store: `users in cached_ssd`. None for other nodes."""
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        is_embedding = isinstance(value, EmbeddingBase)
        return f"{node.target} in {value.store_options.store}" if is_embedding else None
    if node.target not in _OF_TARGET:
        return None
    fetched = node.target is not row_ops.pin  # the batch that a pin is like has rows of another embedding
    sources = [n for n in node.all_input_nodes if n.op == "get_attr" or (fetched and n.target is row_ops.pin)]
    found = [rows for source in sources if (rows := rows_at(module, source)) is not None]
    return ", ".join(dict.fromkeys(found)) or None


@dataclass
class _Box:
    """Nodes that are drawn as one box, and the place of the box."""

    nodes: list[fx.Node]
    lines: list[str]
    before: list[_Box]
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        return max(map(len, self.lines)) * _CHAR + 2 * _PAD

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 2 * _PAD - 4

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def draw(module: fx.GraphModule, title: str, ahead: bool) -> str:
    """The step as a self-contained SVG file. ahead: whether `Graph.run` has rows brought up ahead of the step."""
    stage_of = stages(module.graph)
    boxes = _boxes(module, stage_of)
    if ahead:
        _say_ahead(module, boxes)
    bands = []
    bottom = _TOP
    for stage in STAGES:
        if own := [box for box in boxes if stage_of[box.nodes[-1]] == stage]:
            bands.append((stage, bottom))
            bottom = _place(own, bottom + _ROW / 2) + _ROW / 2
    right = max(box.x + box.width for box in boxes) + _GAP
    size = {"width": f"{right:.0f}", "height": f"{bottom:.0f}"}
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    ElementTree.SubElement(svg, "style").text = _STYLE
    head = {"id": "head", "viewBox": "0 0 6 6", "refX": "6", "refY": "3", "orient": "auto"}
    marker = ElementTree.SubElement(svg, "marker", {**head, "markerWidth": "6", "markerHeight": "6"})
    ElementTree.SubElement(marker, "polygon", {"class": "head", "points": "0,0 6,3 0,6"})
    _put_rect(svg, 0, 0, right, bottom, "band", "white")
    _put_text(svg, _PAD, 20, title, "stage")
    for (stage, y), end in zip(bands, [y for _, y in bands[1:]] + [bottom], strict=True):
        _put_rect(svg, 0, y, right, end - y - 4, "band", _COLORS[stage])
        _put_text(svg, _PAD, y + 20, stage, "stage")
    for box in boxes:
        for source in box.before:
            _put_edge(svg, source, box)
    for box in boxes:
        _put_box(svg, module, box)
    return ElementTree.tostring(svg, encoding="unicode")


def _boxes(module: fx.GraphModule, stage_of: dict[fx.Node, str]) -> list[_Box]:
    """The boxes of a step. Each comes after all that it reads."""
    named = _named(module)
    box_of: dict[fx.Node, _Box] = {}
    for node in module.graph.nodes:
        if node in named or (node.op == "placeholder" and not node.users):
            continue
        sources = [source for source in node.all_input_nodes if source not in named]
        joined = next((s for s in sources if stage_of[s] == stage_of[node] and _continues(s, node)), None)
        box = box_of[joined] if joined is not None else _Box([], [], [])
        box.nodes.append(node)
        box.before += [box_of[source] for source in sources if box_of[source] is not box]
        box_of[node] = box
    boxes = [box for node, box in box_of.items() if node is box.nodes[-1]]
    for box in boxes:
        box.before = list({id(source): source for source in box.before}.values())
        box.lines = [_short(line) for line in _lines(module, box.nodes, named)]
    return boxes


def _say_ahead(module: fx.GraphModule, boxes: list[_Box]) -> None:
    """Say in boxes where rows come up ahead of their step. All other work is done in order, on one stream."""
    box_of = {node: box for box in boxes for node in box.nodes}
    for node, (source, _) in known_ahead(module):
        embedding = getattr(module, source.target)
        assert isinstance(embedding, EmbeddingBase)
        box_of[node].lines.append(f"ahead, on a {'stream' if embedding.shadow.is_cuda else 'thread'} of its own")


def _named(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Names of nodes without boxes: parameters and other tensors that a step keeps, their views, optimizers."""
    named: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if LIVE in node.meta or (node.op == "get_attr" and rows_at(module, node) is None):
            named[node] = node.name
        elif _is_view(node) and all(source in named for source in node.all_input_nodes):
            named[node] = named[node.all_input_nodes[0]]
    return named


def _continues(source: fx.Node, node: fx.Node) -> bool:
    """Whether both nodes are links of a chain of ops that is one box."""
    return len(source.users) == 1 and all(_is_view(link) or _is_elementwise(link) for link in (source, node))


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_elementwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _lines(module: fx.GraphModule, nodes: list[fx.Node], named: dict[fx.Node, str]) -> Iterator[str]:
    """The text of a box: its ops, what the last op makes, and the parameters that they read."""
    last = nodes[-1]
    if last.op.startswith("call"):
        names = [op_name(node.target).removeprefix("aten.").split(".")[0] for node in nodes]
        yield " \N{RIGHTWARDS ARROW} ".join(
            names if len(names) <= 4 else [*names[:3], f"({len(names) - 4})", names[-1]]
        )
    else:
        yield last.name
    if made := describe(module, last):
        yield made
    reads = list(dict.fromkeys(named[s] for node in nodes for s in node.all_input_nodes if s in named))
    yield from reads[:_MOST]
    if len(reads) > _MOST:
        yield f"and {len(reads) - _MOST} more"


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"


def _place(boxes: list[_Box], y: float) -> float:
    """Give the boxes of a stage their places, from `y` down. Returns where the stage ends."""
    layers: dict[int, int] = {}
    for box in boxes:
        layers[id(box)] = 1 + max((layers[id(source)] for source in box.before if id(source) in layers), default=-1)
    for _, layer in groupby(sorted(boxes, key=lambda box: layers[id(box)]), key=lambda box: layers[id(box)]):
        for row in _rows(sorted(layer, key=_wanted)):
            _place_row(row, y)
            y += max(box.height for box in row) + _ROW
    return y - _ROW


def _rows(layer: list[_Box]) -> Iterator[list[_Box]]:
    """The boxes of a layer, in as many rows as its width needs."""
    row: list[_Box] = []
    for box in layer:
        if row and _total([*row, box]) > _WIDTH:
            yield row
            row = []
        row.append(box)
    yield row


def _place_row(row: list[_Box], y: float) -> None:
    """Place boxes below what they read, as far as the boxes to the left and to the right leave room."""
    x = _LEFT
    for i, box in enumerate(row):
        box.y = y
        box.x = min(max(x, _wanted(box) - box.width / 2), _LEFT + _WIDTH - _total(row[i:]))
        x = box.x + box.width + _GAP


def _total(row: list[_Box]) -> float:
    return sum(box.width for box in row) + _GAP * (len(row) - 1)


def _wanted(box: _Box) -> float:
    return sum(source.middle for source in box.before) / len(box.before) if box.before else 0.0


def _put_box(parent: ElementTree.Element, module: fx.GraphModule, box: _Box) -> None:
    group = ElementTree.SubElement(parent, "g")
    ElementTree.SubElement(group, "title").text = "\n".join(
        " # ".join(filter(None, (node.name if node.op == "placeholder" else statement(node), describe(module, node))))
        for node in box.nodes
    )
    is_store = rows_at(module, box.nodes[-1]) is not None
    _put_rect(group, box.x, box.y, box.width, box.height, "store" if is_store else "op", "white")
    for line, text in zip(count(1), box.lines, strict=False):
        _put_text(group, box.x + _PAD, box.y + line * _LINE, text, "op")


def _put_edge(parent: ElementTree.Element, source: _Box, target: _Box) -> None:
    x, y, to_x, to_y = source.middle, source.y + source.height, target.middle, target.y
    bend = max(abs(to_y - y) / 2, _ROW / 2)
    curve = f"M{x:.1f} {y:.1f}C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}"
    ElementTree.SubElement(parent, "path", {"d": curve, "marker-end": "url(#head)"})


def _put_text(parent: ElementTree.Element, x: float, y: float, text: str, kind: str) -> None:
    attributes: dict[str, Any] = {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}"}
    ElementTree.SubElement(parent, "text", attributes).text = text


def _put_rect(
    parent: ElementTree.Element, x: float, y: float, width: float, height: float, kind: str, fill: str
) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    ElementTree.SubElement(parent, "rect", {"class": kind, "fill": fill, **place})


def listing(module: fx.GraphModule) -> str:
    """The step: a heading for each stage, and behind each op the dtype and shape of its result, or its store."""
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
    return f"{node.name} = {op_name(node.target)}({', '.join(arguments)})"


def op_name(target: Callable[..., Any] | str) -> str:
    """The name of an op, such as `aten.addmm.default`, `gather` or `self.dense_0`."""
    if isinstance(target, str):
        return f"self.{target}"
    return str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__


def describe(module: fx.GraphModule, node: fx.Node) -> str:
    """What a node makes, and of which rows: `float32 [8, 12]`, `float32 [8, 3, 4], users in cached_ssd`."""
    values = pytree.tree_leaves(node.meta.get("val"))
    parts = [tensor_text(value) for value in values if isinstance(value, Tensor)]
    rows = rows_at(module, node)
    return ", ".join(parts if rows is None else [*parts, rows])


def tensor_text(value: Tensor) -> str:
    """Dtype and shape of a tensor, such as `float32 [8, 12]`, with the device where it is not the CPU."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)}" + ("" if value.device.type == "cpu" else f" {value.device}")


def _text(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a Lookup, without what it does not use at its end
        used = max((place for place, part in enumerate(value, 1) if part is not None), default=0)
        return f"{type(value).__name__}({', '.join(map(_text, value[:used]))})"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
