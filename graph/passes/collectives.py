"""Schedule a step's collectives: send rows and gradients early, and sum all dense gradients in one collective.

Every rank must make a step's collectives in the same order, so this pass fixes the order at compile time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ...distributed.dense_gradients import AllReduceResult
from ...engine.errors import GraphError
from ...engine.ops.embedding_base import EmbeddingBase
from ..trace.alias import find_storages, find_written_storages, get_call_target
from .lookups import find_sources, is_repeatable
from .nodes import add_attribute
from .step_epilogue import DenseGrads, RowGrads, StepEpilogue, accumulate, apply_gradients, are_finite

_KIND_BY_TARGET: dict[Any, str] = {
    "pin": "pin",
    "read": "read",
    "read_weights_grad": "read",
    "send": "send",
    accumulate: "vote",
    apply_gradients: "vote",
}


class CollectiveCall(NamedTuple):
    """A collective call. kind: `vote` for the whole step; `pin`, `rows`, `read` or `send` for one embedding."""

    kind: str  # `rows` waits for the rows of a `pin`
    embedding: EmbeddingBase | None
    ids_from: int | None = None  # the index of another pin, if this pin reuses that pin's ids

    def __str__(self) -> str:
        """Return a text that describes this call. Ranks compare these texts to check that their calls match."""
        suffix = "" if self.embedding is None else f" of {self.embedding.name!r}"
        return self.kind + suffix + ("" if self.ids_from is None else f", ids of {self.ids_from}")


_ROW_METHODS = ("gather", "weights_grad", "send")


def sum_over_ranks(
    collectives: Any,
    epilogue: StepEpilogue,
    row_grads: list[RowGrads],
    dense_grads: list[DenseGrads],
    has_batch: bool = True,
) -> AllReduceResult:
    """Sum dense gradients over the ranks with a batch. If the step failed on one rank, raise its error on all ranks."""
    is_finite = epilogue.scaler is None or are_finite([grad for part in row_grads for grad in part.grads])
    return collectives.vote(dense_grads, is_finite=is_finite, has_batch=has_batch)


def find_common_world(embeddings: dict[str, EmbeddingBase]) -> Any:
    """Return the world that a graph's embeddings share, or None. Raises GraphError if the worlds differ."""
    world_by_id = {id(embedding.world): (path, embedding.world) for path, embedding in embeddings.items()}
    if len(world_by_id) > 1:
        names, worlds = zip(*[*world_by_id.values()][:2], strict=True)
        sizes = ["in this process alone" if w is None else f"over a world of {w.size} ranks" for w in worlds]
        raise GraphError(
            f"embedding {names[0]!r} is {sizes[0]}, but embedding {names[1]!r} is {sizes[1]}; give both the same world"
        )
    return next((world for _, world in world_by_id.values()), None)


def pin_early(module: fx.GraphModule) -> None:
    """Move each pin to the top of the step if pure torch ops compute its ids from tensors that no op writes."""
    graph = module.graph
    changed_storages = set().union(*map(find_written_storages, graph.nodes))
    last_node = next(reversed(graph.find_nodes(op="placeholder")), None)
    moved_nodes: set[fx.Node] = set()
    for pin in graph.find_nodes(op="call_method", target="pin"):
        embedding, lookups, *ids_from = pin.args
        id_sources = find_sources(pin, (embedding, lookups))
        is_pure = all(is_repeatable(node, set()) and not find_written_storages(node) for node in id_sources)
        is_movable = is_pure and not find_storages(id_sources) & changed_storages
        is_read_before = any(  # moving a pin above a read is unsafe: a pin may evict the rows that are read
            get_call_target(n) in ("read", "read_weights_grad") and n < pin for n in cast(fx.Node, embedding).users
        )
        if last_node is None or not is_movable or not moved_nodes.issuperset(ids_from) or is_read_before:
            continue
        for node in [node for node in graph.nodes if node in id_sources] + [pin]:
            if node.op != "placeholder" and node not in moved_nodes:
                last_node.append(node)
                last_node = node
                moved_nodes.add(node)


def schedule_collectives(
    module: fx.GraphModule,
    end_node: fx.Node | None,
    make_collectives: Callable[[list[CollectiveCall], list[tuple[str, Tensor]]], Any],
) -> Any:
    """Send row gradients as soon as they are complete, and insert the vote before `end_node`, the step's last node.

    make_collectives: takes the collective calls and the named trained parameters, and returns the `StepCollectives`.
    end_node: None if the step trains nothing. Raises GraphError for a sparse gradient.
    """
    graph = module.graph
    if end_node is None:
        return make_collectives(_list_calls(module), [])
    arguments: Any = end_node.args
    epilogue, row_grads, dense_grads = arguments
    trained_parameters: list[tuple[str, Tensor]] = []
    for _, params, grads in dense_grads:
        for param, grad in zip(params, grads, strict=True):
            name = str(param.target)
            if grad.meta["val"].layout is not torch.strided:
                raise GraphError(
                    f"the gradient of parameter {name!r} is sparse, and ranks can only sum dense gradients; "
                    "leave out sparse=True, or use a tierbed embedding with a world"
                )
            trained_parameters.append((name, param.meta["val"]))
    for batch, grads, weights in row_grads if end_node.target is apply_gradients else ():
        sources = {value for value in (*grads, *weights, batch) if isinstance(value, fx.Node)}
        gradient_storages = find_storages(sources)
        last_source = [n for n in graph.nodes if n in sources or find_written_storages(n) & gradient_storages][-1]
        with graph.inserting_after(last_source):
            graph.call_method("send", (batch, grads, weights))
    collectives = make_collectives(_list_calls(module), trained_parameters)
    with graph.inserting_before(end_node):
        collectives_node = add_attribute(module, "collectives", collectives)
        if end_node.target is apply_gradients:
            collectives_node = graph.call_function(sum_over_ranks, (collectives_node, epilogue, row_grads, dense_grads))
    end_node.insert_arg(3, collectives_node)
    return collectives


def _list_calls(module: fx.GraphModule) -> list[CollectiveCall]:
    calls: list[CollectiveCall] = []
    pins: dict[Any, tuple[int, EmbeddingBase]] = {}
    awaited_pins: set[Any] = set()
    for node in module.graph.nodes:
        if get_call_target(node) in _ROW_METHODS and node.args[0] not in awaited_pins:
            awaited_pins.add(node.args[0])
            calls.append(CollectiveCall("rows", pins[node.args[0]][1]))
        kind = _KIND_BY_TARGET.get(get_call_target(node))
        if kind == "vote":
            calls.append(CollectiveCall(kind, None))
        elif kind == "send":
            calls.append(CollectiveCall(kind, pins[node.args[0]][1]))
        elif kind is not None:
            embedding = getattr(module, node.args[0].target)
            ids_from = pins[node.args[2]][0] if kind == "pin" and node.args[2:] else None
            pins[node] = len(calls), embedding
            calls.append(CollectiveCall(kind, embedding, ids_from))
    return calls
