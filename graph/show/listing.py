"""A compiled step as text: Python, one op a line, with what each op makes as a comment."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .stages import rows_at, stages


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
