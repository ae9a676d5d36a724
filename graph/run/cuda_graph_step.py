"""A training step that is captured once, as a CUDA graph, and replayed at each later call.

While it is captured, it calls functions that launch kernels alone, instead of the methods of embeddings and batches.
What the host does at each step, it does around each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...embedding.state_dict.saved_rows import SavedRows
from ...engine.errors import GraphError, OptionError, TierbedError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from ...engine.table.table import OpenTable, PinnedBatch
from ..passes.nodes import replace
from ..passes.step_epilogue import StepEpilogue, apply_gradients, dense_step, schedule, step_dense
from ..trace.alias import called, memory, written
from .rollback import split_updates

WARM_UP = 3  # calls that run normally first: kernels are compiled, libraries allocate their memory

_INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_LIVE: set[Callable[..., Any]] = {dense_step, step_dense, schedule}


def capture_pin(embedding: SavedRows, lookups: list[Lookup], dedup_from: PinnedBatch | None = None) -> PinnedBatch:
    """Launch the kernels of `embedding.pin`. `_begin_replay` does the rest of it before each replay."""
    table = embedding.table_handle().local_table
    batch = table.processor.batch(lookups, None if dedup_from is None else dedup_from.core)
    table.require_open().pin(batch, table.capacity_limit)
    table.preview_catch_up(batch)
    return table.pinned(batch, lookups, embedding.output_dtype)


def capture_update(batch: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
    """Launch the kernels of `batch.update`, and end the pin."""
    table, gradients = batch.table, batch.gradients(grads, weights)
    table.check_pinned(batch)
    table.observers.before_update(batch.core)
    table.processor.update(batch.core, gradients, table.rule)
    table.release()


def capture_read(embedding: SavedRows, lookup: Lookup, weights: Tensor | None = None) -> Tensor:
    table = embedding.table_handle().local_table
    return table.processor.gather(_peek(table, lookup), 0, lookup, weights, embedding.output_dtype)


def capture_read_weights_grad(embedding: SavedRows, lookup: Lookup, grad: Tensor) -> Tensor:
    table = embedding.table_handle().local_table
    return table.processor.weights_grad(_peek(table, lookup, trains=True), 0, lookup, grad)


def _peek(table: OpenTable, lookup: Lookup, trains: bool = False) -> Any:
    """Launch the kernels that find the rows of a lookup that only reads. Returns the batch of the lookup."""
    batch = table.processor.batch([lookup])
    table.require_open().peek(batch, trains)
    table.preview_catch_up(batch)
    return batch


_CAPTURE_OPS: dict[Any, Callable[..., Any]] = {
    "pin": capture_pin,
    "update": capture_update,
    "read": capture_read,
    "read_weights_grad": capture_read_weights_grad,
}


@dataclass(frozen=True)
class CapturedGraph:
    """A captured step. `replay` reads `inputs`, and writes `outputs`, the results, and `ends`, for the step's end."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    outputs: list[Tensor]
    ends: list[Any]


class CudaGraphStep:
    """How a compiled training step runs as a CUDA graph.

    All is captured but optimizers of dense parameters and schedules; these run after each replay, on what it computed.
    A captured graph is valid while the memory that it uses stays in place. If that changes, the step is captured again.
    """

    def __init__(self, module: fx.GraphModule, inputs: int, trained: list[EmbeddingBase], end: StepEpilogue) -> None:
        """module: the step. Its first `inputs` placeholders are the tensors of a call."""
        self._captured, self._end_of_step = cut(module)
        self._inputs, self._trained, self._end = inputs, trained, end
        nodes = [n for n in module.graph.nodes if n.op == "get_attr"]
        attributes = dict.fromkeys(getattr(module, str(node.target)) for node in nodes)
        self._read = [m for m in attributes if isinstance(m, EmbeddingBase) and m not in trained]
        self._constants = [value for value in attributes if isinstance(value, Tensor)]
        placeholders = self._captured.graph.find_nodes(op="placeholder")
        self._used = [index for index in range(inputs, len(placeholders)) if placeholders[index].users]
        self._seen: Any = None  # what a captured graph of the latest calls depends on
        self._calls = 0  # the number of calls with the same, up to WARM_UP
        self._refused: GraphError | None = None  # why such calls cannot be captured
        self.captured_graph: CapturedGraph | None = None

    def run(self, tensors: list[Tensor], plain: Callable[[], Any]) -> Any:
        """The results, in new tensors. `plain` runs the step uncaptured, with equal bits. GraphError, OptionError."""
        trained, read = _tables(self._trained), _tables(self._read)
        for table in trained:
            table.yield_to_reader()
        with ExitStack() as locks:
            for table in sorted([*trained, *read], key=id):  # in one order: another graph may lock the same
                locks.enter_context(table.lock)
            captured = self._captured_graph_for([*trained, *read], tensors)
            if captured is not None:
                for given, own in zip(tensors, captured.inputs, strict=False):
                    own.copy_(given)
                with _replayed(trained, read, self._end.clip_value):
                    captured.replay()
        if captured is None:
            return plain()
        self._end_of_step.forward(*captured.ends)
        return [output.clone() for output in captured.outputs]

    def _captured_graph_for(self, tables: list[OpenTable], tensors: list[Tensor]) -> CapturedGraph | None:
        """The captured graph of a call, captured now after the warm-up; None if the call is to run without one."""
        state = [_replay_key(table) for table in tables]
        if None in state:
            return None
        live = [*(tensors[index] for index in self._used), *self._constants]
        # by thread: libraries allocate memory for each
        seen = get_ident(), tables, state, [tensor.data_ptr() for tensor in live]
        if seen != self._seen:
            self._check(tables)
            self._seen, self._calls, self.captured_graph, self._refused = seen, 0, None, None
        if self.captured_graph is None and self._calls == WARM_UP:
            self.captured_graph = self._capture(tensors, tables[0].processor.capturer)
        self._calls = min(self._calls + 1, WARM_UP)
        return self.captured_graph

    def _capture(self, tensors: list[Tensor], capturer: Any) -> CapturedGraph:
        if self._refused is not None:  # each try would cost memory that torch does not give back
            raise self._refused
        inputs = [torch.empty_like(tensor) for tensor in tensors[: self._inputs]]
        try:
            replay, (outputs, ends) = capturer.capture(
                lambda: self._captured.forward(*inputs, *tensors[self._inputs :])
            )
        except (TierbedError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            cause = str(error.__context__ or error).partition("\n")[0]  # torch raises another when the capture ends
            self._refused = GraphError(
                f"cuda_graph: the step could not be captured: {cause}; leave out of build what waits for the device, "
                "such as an op of your own that reads a value, or call cuda_graph(False)"
            )
            raise self._refused from error
        return CapturedGraph(replay, inputs, outputs, ends)

    def _check(self, tables: list[OpenTable]) -> None:
        for embedding, table in zip([*self._trained, *self._read], tables, strict=True):
            name, options = embedding.name, embedding.store_options
            if table.processor.capturer is None:
                raise GraphError(
                    f"cuda_graph: embedding {name!r} is on {table.processor.device}, and steps are captured on CUDA "
                    "devices; move the graph by .cuda(), or call cuda_graph(False)"
                )
            if options.store != "device_mem" or options.capacity is None:
                raise OptionError(
                    f"cuda_graph: embedding {name!r} has store={options.store!r}, capacity={options.capacity!r}, whose "
                    "steps wait for the device; give it device_mem with a capacity, or call cuda_graph(False)"
                )
        devices = {table.processor.device for table in tables}
        if len(devices) > 1:
            raise GraphError(
                f"cuda_graph: the embeddings are on {', '.join(sorted(map(str, devices)))}; move the graph to one of "
                "them, or call cuda_graph(False)"
            )
        self._check_tensors(devices.pop())

    def _check_tensors(self, device: torch.device) -> None:
        graph = self._captured.graph
        placeholders = graph.find_nodes(op="placeholder")
        for node in graph.nodes:
            values = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
            away = [str(value.device) for value in values if value.device != device]
            if away and node.users:
                what = "argument" if node in placeholders[: self._inputs] else "tensor"
                raise GraphError(
                    f"cuda_graph: {what} {node.name} is on {away[0]}, which a captured step would read but once; make "
                    f"it on {device}, write a number instead, or call cuda_graph(False)"
                )
            if _waits(node):
                raise GraphError(
                    f"cuda_graph: {node.target} waits for the device, and a step that does cannot be captured; leave "
                    "it out of build (torch.where instead of a mask as an index), or call cuda_graph(False)"
                )
        changed: set[int] = set().union(*map(written, graph.nodes))
        for node in placeholders[: self._inputs]:
            given = node.meta["val"]
            if given.stride() != torch.empty_like(given).stride():
                raise GraphError(
                    f"cuda_graph: argument {node.name} is a slice or was expanded, and a captured step has a copy of "
                    f"it without gaps; give {node.name}.contiguous(), or call cuda_graph(False)"
                )
            if memory([node]) & changed:
                raise GraphError(
                    f"cuda_graph: build changes its argument {node.name} in place, and a captured step has a copy of "
                    "it; change a clone(), or call cuda_graph(False)"
                )


def _waits(node: fx.Node) -> bool:
    """Whether an op of torch is known to read values from the device, as a mask does that is an index."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.overloadpacket in _INDEXED:
        indices = [value.meta["val"] for value in node.all_input_nodes]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return any(tag in node.target.tags for tag in _TAGS)


def cut(module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A compiled step in two: the captured part, which returns (results, the arguments of the rest), and the rest."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=apply_gradients):
        _split_end(graph, node)
    for node in graph.nodes:
        if called(node) in _CAPTURE_OPS:
            with graph.inserting_before(node):
                replace(node, graph.call_function(_CAPTURE_OPS[node.target], node.args, node.kwargs))
    return split_updates(module, graph, _LIVE)


def _split_end(graph: fx.Graph, node: fx.Node) -> None:
    """Split the end of a step that clips by value alone: rows are clipped by the numbers of their update."""
    rows: Any
    end, rows, dense = node.args
    with graph.inserting_before(node):
        for batch, grads, weights in rows:
            graph.call_method("update", (batch, grads, weights))
        node.replace_all_uses_with(graph.call_function(step_dense, (end, dense)))
    graph.erase_node(node)


def _tables(embeddings: list[EmbeddingBase]) -> list[OpenTable]:
    """The open tables of embeddings. GraphError for rows that are in no table of this process."""
    for embedding in embeddings:
        if not isinstance(embedding, SavedRows):
            raise GraphError(
                f"cuda_graph: the rows of {embedding.name!r}, a {type(embedding).__name__}, are in no table of this "
                "process, and their steps cannot be captured; call cuda_graph(False)"
            )
    return [embedding.table_handle().local_table for embedding in embeddings if isinstance(embedding, SavedRows)]


@contextmanager
def _replayed(trained: Sequence[OpenTable], read: Sequence[OpenTable], clip_value: float | None) -> Iterator[None]:
    """A block around one replay, with the tables locked: does the host's part of a step, and raises what it would."""
    for table in read:
        _begin_replay(table, False, None)
    started = [(table, _begin_replay(table, True, clip_value)) for table in trained]
    try:
        yield
    except BaseException as error:
        for table in trained:
            table.note_failure(error)  # some of its lines may be written
        raise
    for table, (step, hyper) in started:
        table.updated(step, hyper)


def _replay_key(table: OpenTable) -> Hashable | None:
    """What a captured graph depends on: it may be replayed while this key is equal to that of its capture.

    None while a snapshot is saved in the background, when no graph may be replayed: a replay saves no before-images.
    """
    if table.observers.has_image:
        return None
    return table.optimizer and table.optimizer.rule, table.catch_up_rule, table.observers.changes


def _begin_replay(table: OpenTable, trains: bool, clip_value: float | None) -> tuple[int, list[float]]:
    """Do the host's part of a step before its replay: of `pin` and `update` if it `trains`, else of `read`.

    Returns the step and the rule's numbers, for `OpenTable.updated`. Raises what these methods raise; then nothing has
    changed.
    """
    if trains:
        table.release()
        with table.announced(()):
            pass  # the captured ops make the batch, whatever was announced
    table.ready()
    table.check(wait=False)
    if not trains:
        table.set_numbers()
        return table.step, table.hyper
    optimizer, step = table.check_optimizer(), table.next_step()
    hyper = optimizer.hyper(step, clip_value, table.hyper)
    table.before_write(step)
    table.processor.set_numbers(optimizer.rule, hyper, step)
    return step, hyper
