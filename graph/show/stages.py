"""Which part of a step a node belongs to: for the listing, the drawing and the profile."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from ...engine.ops import row_ops
from ...engine.ops.rows_contract import Rows
from ..passes.dense import dense_step
from ..passes.ranks import sum_over_ranks
from ..passes.step_end import accumulate, end_step, schedule
from ..trace.trace import BACKWARD

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
    end_step: "update",
    accumulate: "update",
    dense_step: "dense step",
    schedule: "dense step",
}


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
        is_embedding = isinstance(value, Rows)
        return f"{node.target} in {value.store_options.store}" if is_embedding else None
    if node.target not in _OF_TARGET:
        return None
    fetched = node.target is not row_ops.pin  # the batch that a pin is like has rows of another embedding
    sources = [n for n in node.all_input_nodes if n.op == "get_attr" or (fetched and n.target is row_ops.pin)]
    found = [rows for source in sources if (rows := rows_at(module, source)) is not None]
    return ", ".join(dict.fromkeys(found)) or None
