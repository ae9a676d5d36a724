"""The code of a compiled step: what FX generates, with each op looked up once instead of at every step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _exec_with_source

from ...engine.ops import row_ops

_OP = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")
# the ops of a step, and the methods of their first argument that they call
_METHODS: dict[Callable[..., Any], str] = {
    row_ops.pin: "pin",
    row_ops.gather: "gather",
    row_ops.weights_grad: "weights_grad",
    row_ops.send: "send",
    row_ops.update: "update",
    row_ops.read: "read",
    row_ops.read_weights_grad: "read_weights_grad",
}


def bind_ops(module: fx.GraphModule) -> None:
    """Let `module.forward` call torch's ops by names of their own, and rows by their methods. `recompile` undoes it."""
    code = module.graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    taken = {str(name) for node in module.graph.nodes for name in (node.name, node.target)}

    def bound(match: re.Match[str]) -> str:
        space, op, overload = match.groups()
        name = f"{space}_{op}_{overload}_op"
        while name in taken:  # a parameter of build may have any name
            name += "_"
        names[name] = getattr(getattr(getattr(torch.ops, space), op), overload)._op  # without a frame of Python
        return f"{name}("

    source = _OP.sub(bound, code.src)
    for name, function in code.globals.items():
        for op, method in _METHODS.items():
            if function is op:
                source = re.sub(rf"\b{name}\((\w+)(?:, )?", rf"\1.{method}(", source)
    _exec_with_source(source, names)
    type(module).forward = names["forward"]  # each GraphModule has a class of its own
