"""The code of a compiled step: what FX generates, with each of torch's ops looked up once instead of at every step."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _exec_with_source

_OP = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def bind_ops(module: fx.GraphModule) -> None:
    """Let `module.forward` call its ops by names of their own. `recompile` undoes it."""
    code = module.graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)

    def bound(match: re.Match[str]) -> str:
        space, op, overload = match.groups()
        name = f"{space}_{op}_{overload}_op"
        names[name] = getattr(getattr(getattr(torch.ops, space), op), overload)._op  # without a frame of Python
        return f"{name}("

    _exec_with_source(_OP.sub(bound, code.src), names)
    type(module).forward = names["forward"]  # each GraphModule has a class of its own
