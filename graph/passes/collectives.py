"""The pass for a step over ranks: rows and gradients are sent as early as possible, and ranks vote once.

Every rank makes the collectives of a step in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ...distributed.dense import Vote
from ...engine.errors import GraphError
from ...engine.ops.rows_contract import EmbeddingBase
from ..trace.alias import called, memory, written
from .lookups import is_repeatable, sources_of
from .nodes import add_attribute
from .step_epilogue import DenseGrads, RowGrads, StepEpilogue, accumulate, apply_gradients, are_finite

_KINDS: dict[Any, str] = {
    "pin": "pin",
    "read": "read",
    "read_weights_grad": "read",
    "send": "send",
    accumulate: "vote",
    apply_gradients: "vote",
}


class CollectiveCall(NamedTuple):
    """One collective: `pin`, `rows` (the wait for those of a pin), `read` or `send` of an embedding, or the `vote`."""

    kind: str
    embedding: EmbeddingBase | None
    like: int | None = None  # of a pin: the index of the pin whose ids it takes

    def __str__(self) -> str:
        """The call in the form that ranks compare."""
        of = "" if self.embedding is None else f" of {self.embedding.name!r}"
        return self.kind + of + ("" if self.like is None else f", ids of {self.like}")


_FIRST_USES = ("gather", "weights_grad", "send")


def sum_over_ranks(
    collectives: Any, end: StepEpilogue, rows: list[RowGrads], dense: list[DenseGrads], present: bool = True
) -> Vote:
    """Sum dense gradients over the ranks that are present. If the step failed on one rank, raises its error on all."""
    finite = end.scaler is None or are_finite([grad for part in rows for grad in part.grads])
    vote: Vote = collectives.vote(dense, finite=finite, present=present)
    return vote


def refuse_worlds(embeddings: dict[str, EmbeddingBase]) -> Any:
    """The world of a graph's embeddings, None if they have none. GraphError if they differ."""
    by_world = {id(embedding.world): (name, embedding.world) for name, embedding in embeddings.items()}
    if len(by_world) > 1:
        (one, first), (other, second) = list(by_world.values())[:2]
        raise GraphError(
            f"embeddings {one!r} and {other!r}: {_described(first)}, and {_described(second)}; one step is over one "
            "group: give all embeddings of a graph the same world"
        )
    return next((world for _, world in by_world.values()), None)


def _described(world: Any) -> str:
    return "one is in this process alone" if world is None else f"one is over a world of {world.size} ranks"


def pin_early(module: fx.GraphModule) -> None:
    """Move each pin to the top of the step if torch's pure ops make its ids from tensors that the step never writes to.

    A read of the same embedding stays before its pin, which may evict rows.
    """
    graph = module.graph
    changed = set().union(*map(written, graph.nodes))
    pins = graph.find_nodes(op="call_method", target="pin")
    last = graph.find_nodes(op="placeholder")[-1] if graph.find_nodes(op="placeholder") else None
    moved: set[fx.Node] = set()
    for pin in pins:
        embedding, lookups, *like = pin.args
        needed = sources_of(pin, (embedding, lookups))
        is_pure = all(is_repeatable(node, set()) and not written(node) for node in needed)
        is_free = is_pure and not memory(needed) & changed
        is_read_before = any(
            called(node) in ("read", "read_weights_grad") and node < pin for node in cast(fx.Node, embedding).users
        )
        if last is None or not is_free or not moved.issuperset(like) or is_read_before:
            continue
        for node in [node for node in graph.nodes if node in needed] + [pin]:
            if node.op != "placeholder" and node not in moved:
                last.append(node)
                last = node
                moved.add(node)


def schedule_collectives(
    module: fx.GraphModule, node: fx.Node | None, make: Callable[[list[CollectiveCall], list[tuple[str, Tensor]]], Any]
) -> Any:
    """Send gradients of rows once they are complete, and let ranks vote before `node`, which ends the step.

    node: `apply_gradients` or `accumulate`, None in a step that trains nothing. make: makes what the step makes its
    collectives by, of these and of the trained dense parameters by name. Returns it. GraphError for a sparse gradient.
    """
    graph = module.graph
    if node is None:
        return make(_calls(module), [])
    arguments: Any = node.args
    end, rows, dense = arguments
    trained: list[tuple[str, Tensor]] = []
    for _, params, grads in dense:
        for param, grad in zip(params, grads, strict=True):
            name = str(param.target)
            if grad.meta["val"].layout is not torch.strided:
                raise GraphError(
                    f"the gradient of parameter {name!r} is sparse, and ranks sum dense gradients; leave "
                    "sparse=True out, or use an embedding of tierbed with a world"
                )
            trained.append((name, param.meta["val"]))
    for batch, grads, weights in rows if node.target is apply_gradients else ():
        sources = {value for value in (*grads, *weights, batch) if isinstance(value, fx.Node)}
        used = memory(sources)
        last = [other for other in graph.nodes if other in sources or written(other) & used][-1]
        with graph.inserting_after(last):
            graph.call_method("send", (batch, grads, weights))
    collectives = make(_calls(module), trained)
    with graph.inserting_before(node):
        own = add_attribute(module, "collectives", collectives)
        if node.target is apply_gradients:
            own = graph.call_function(sum_over_ranks, (own, end, rows, dense))
    node.insert_arg(3, own)
    return collectives


def _calls(module: fx.GraphModule) -> list[CollectiveCall]:
    calls: list[CollectiveCall] = []
    pinned: dict[Any, tuple[int, EmbeddingBase]] = {}
    waited: set[Any] = set()
    for node in module.graph.nodes:
        if called(node) in _FIRST_USES and node.args[0] not in waited:
            waited.add(node.args[0])
            calls.append(CollectiveCall("rows", pinned[node.args[0]][1]))
        kind = _KINDS.get(called(node))
        if kind == "vote":
            calls.append(CollectiveCall(kind, None))
        elif kind == "send":
            calls.append(CollectiveCall(kind, pinned[node.args[0]][1]))
        elif kind is not None:
            embedding = getattr(module, node.args[0].target)
            like = pinned[node.args[2]][0] if kind == "pin" and node.args[2:] else None
            pinned[node] = len(calls), embedding
            calls.append(CollectiveCall(kind, embedding, like))
    return calls
