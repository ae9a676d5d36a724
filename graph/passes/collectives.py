"""The pass for steps over ranks: send rows and gradients as early as possible, and vote once.

Every rank must make a step's collectives in the same order, so this pass fixes the order at compile time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ...distributed.dense import AllReduceResult
from ...engine.errors import GraphError
from ...engine.ops.embedding_base import EmbeddingBase
from ..trace.alias import call_target, memory_of, writes
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
    """One collective: a `vote`, or an embedding's `pin`, `rows` (wait for pinned rows), `read` or `send`."""

    kind: str
    embedding: EmbeddingBase | None
    ids_from: int | None = None  # the index of another pin, if this pin reuses that pin's ids

    def __str__(self) -> str:
        """Return the text that ranks compare."""
        suffix = "" if self.embedding is None else f" of {self.embedding.name!r}"
        return self.kind + suffix + ("" if self.ids_from is None else f", ids of {self.ids_from}")


_ROW_USES = ("gather", "weights_grad", "send")


def sum_over_ranks(
    collectives: Any, epilogue: StepEpilogue, rows: list[RowGrads], dense: list[DenseGrads], present: bool = True
) -> AllReduceResult:
    """Sum dense gradients over the ranks with a batch. If the step failed on one rank, raise its error on all ranks."""
    finite = epilogue.scaler is None or are_finite([grad for part in rows for grad in part.grads])
    return collectives.vote(dense, finite=finite, present=present)


def common_world(embeddings: dict[str, EmbeddingBase]) -> Any:
    """Return the world that a graph's embeddings share, or None. Raises GraphError for different worlds."""
    by_world = {id(embedding.world): (path, embedding.world) for path, embedding in embeddings.items()}
    if len(by_world) > 1:
        names, worlds = zip(*[*by_world.values()][:2], strict=True)
        sizes = ["in this process alone" if w is None else f"over a world of {w.size} ranks" for w in worlds]
        raise GraphError(
            f"embeddings {names[0]!r} and {names[1]!r}: one is {sizes[0]}, and one is {sizes[1]}; give all embeddings "
            "of a graph the same world"
        )
    return next((world for _, world in by_world.values()), None)


def pin_early(module: fx.GraphModule) -> None:
    """Move a pin to the top of the step if pure torch ops make its ids from tensors that the step never writes."""
    graph = module.graph
    changed = set().union(*map(writes, graph.nodes))
    last = next(reversed(graph.find_nodes(op="placeholder")), None)
    moved: set[fx.Node] = set()
    for pin in graph.find_nodes(op="call_method", target="pin"):
        embedding, lookups, *ids_from = pin.args
        needed = sources_of(pin, (embedding, lookups))
        is_pure = all(is_repeatable(node, set()) and not writes(node) for node in needed)
        is_movable = is_pure and not memory_of(needed) & changed
        is_read_before = any(  # moving the pin up is unsafe: it may evict rows that are read
            call_target(node) in ("read", "read_weights_grad") and node < pin for node in cast(fx.Node, embedding).users
        )
        if last is None or not is_movable or not moved.issuperset(ids_from) or is_read_before:
            continue
        for node in [node for node in graph.nodes if node in needed] + [pin]:
            if node.op != "placeholder" and node not in moved:
                last.append(node)
                last = node
                moved.add(node)


def schedule_collectives(
    module: fx.GraphModule, node: fx.Node | None, make: Callable[[list[CollectiveCall], list[tuple[str, Tensor]]], Any]
) -> Any:
    """Send row gradients as soon as they are complete, and insert the vote before `node`, the end of the step.

    node: None if the step trains nothing. make: creates the returned `StepCollectives` from the step's collective calls
    and its trained parameters by name. Raises GraphError for a sparse gradient.
    """
    graph = module.graph
    if node is None:
        return make(_list_calls(module), [])
    arguments: Any = node.args
    epilogue, rows, dense = arguments
    trained: list[tuple[str, Tensor]] = []
    for _, params, grads in dense:
        for param, grad in zip(params, grads, strict=True):
            name = str(param.target)
            if grad.meta["val"].layout is not torch.strided:
                raise GraphError(
                    f"the gradient of parameter {name!r} is sparse, and ranks can only sum dense gradients; "
                    "leave out sparse=True, or use a tierbed embedding with a world"
                )
            trained.append((name, param.meta["val"]))
    for batch, grads, weights in rows if node.target is apply_gradients else ():
        sources = {value for value in (*grads, *weights, batch) if isinstance(value, fx.Node)}
        gradient_storages = memory_of(sources)
        last = [other for other in graph.nodes if other in sources or writes(other) & gradient_storages][-1]
        with graph.inserting_after(last):
            graph.call_method("send", (batch, grads, weights))
    collectives = make(_list_calls(module), trained)
    with graph.inserting_before(node):
        collectives_node = add_attribute(module, "collectives", collectives)
        if node.target is apply_gradients:
            collectives_node = graph.call_function(sum_over_ranks, (collectives_node, epilogue, rows, dense))
    node.insert_arg(3, collectives_node)
    return collectives


def _list_calls(module: fx.GraphModule) -> list[CollectiveCall]:
    calls: list[CollectiveCall] = []
    pinned: dict[Any, tuple[int, EmbeddingBase]] = {}
    waited: set[Any] = set()
    for node in module.graph.nodes:
        if call_target(node) in _ROW_USES and node.args[0] not in waited:
            waited.add(node.args[0])
            calls.append(CollectiveCall("rows", pinned[node.args[0]][1]))
        kind = _KINDS.get(call_target(node))
        if kind == "vote":
            calls.append(CollectiveCall(kind, None))
        elif kind == "send":
            calls.append(CollectiveCall(kind, pinned[node.args[0]][1]))
        elif kind is not None:
            embedding = getattr(module, node.args[0].target)
            ids_from = pinned[node.args[2]][0] if kind == "pin" and node.args[2:] else None
            pinned[node] = len(calls), embedding
            calls.append(CollectiveCall(kind, embedding, ids_from))
    return calls
