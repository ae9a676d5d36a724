"""Capture a training step as a CUDA graph, and replay it at later calls.

A capture records only kernel launches. So during a capture, the step calls the `capture_*` functions below, which
launch the kernels of `pin`, `update` and `read` without the host work. Each replay needs the host work again: checks,
step numbers, hyperparams of the optimizer, and the store's bookkeeping. `_do_host_work` does it. Optimizers of dense
parameters and learning rate schedulers are not captured; they run after each replay.

A captured graph reads and writes fixed addresses. When the address of a tensor or table changes, the step runs normally
for a few calls and is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...embedding.state_dict.saved_rows import SnapshotEmbedding
from ...engine.errors import GraphError, OptionError, TierbedError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.options.lookup import Lookup
from ...engine.table.table import OpenTable, PinnedBatch
from ..passes.nodes import replace_node
from ..passes.step_epilogue import StepEpilogue, apply_gradients, dense_step, schedule, step_dense_optimizers
from ..trace.alias import find_storages, find_written_storages, get_call_target
from .rollback import split_updates

WARM_UP_CALLS = 3  # uncaptured calls before a capture: they compile kernels and allocate the memory of libraries

_INDEX_OPS = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
_WAITING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNCAPTURED_CALLS: set[Callable[..., Any]] = {dense_step, step_dense_optimizers, schedule}


def capture_pin(embedding: SnapshotEmbedding, lookups: list[Lookup], sibling: PinnedBatch | None = None) -> PinnedBatch:
    """Launch the kernels of `embedding.pin`. `_begin_replay` does the host work before each replay."""
    table = embedding.table_handle().open_table
    batch = table.processor.make_batch(lookups, None if sibling is None else sibling.batch)
    table.require_top_tier().pin(batch, table.capacity_limit)
    table.preview_catch_up(batch)
    return table.set_pinned(batch, lookups, embedding.output_dtype)


def capture_update(pinned_batch: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
    """Launch the kernels of `pinned.update`, and unpin the batch."""
    table, gradients = pinned_batch.table, pinned_batch.check_gradients(grads, weights)
    table.check_pinned(pinned_batch)
    table.observers.before_update(pinned_batch.batch)
    table.processor.update(pinned_batch.batch, gradients, table.rule)
    table.observers.after_update(pinned_batch.batch)
    table.unpin_rows()


def capture_read(embedding: SnapshotEmbedding, lookup: Lookup, weights: Tensor | None = None) -> Tensor:
    table = embedding.table_handle().open_table
    return table.processor.gather(_peek(table, lookup), 0, lookup, weights, embedding.output_dtype)


def capture_read_weights_grad(embedding: SnapshotEmbedding, lookup: Lookup, grad: Tensor) -> Tensor:
    table = embedding.table_handle().open_table
    return table.processor.weights_grad(_peek(table, lookup, is_training=True), 0, lookup, grad)


def _peek(table: OpenTable, lookup: Lookup, is_training: bool = False) -> Any:
    """Launch the kernels that find a read-only lookup's rows. Returns a batch that contains this lookup."""
    batch = table.processor.make_batch([lookup])
    table.require_top_tier().peek(batch, is_training)
    table.preview_catch_up(batch)
    return batch


_CAPTURE_OPS: dict[Any, Callable[..., Any]] = {
    "pin": capture_pin,
    "update": capture_update,
    "read": capture_read,
    "read_weights_grad": capture_read_weights_grad,
}


class CapturedGraph(NamedTuple):
    """A captured step. `replay` reads `inputs`. It writes `outputs` and the inputs of the step's uncaptured part."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    outputs: list[Tensor]
    uncaptured_inputs: list[Any]


class CudaGraphStep:
    """Runs a compiled training step. After the warm-up calls, the step runs as a CUDA graph."""

    def __init__(
        self, module: fx.GraphModule, num_inputs: int, trained_embeddings: list[EmbeddingBase], epilogue: StepEpilogue
    ) -> None:
        """module: the step, whose first `num_inputs` placeholders are a call's tensors."""
        self._captured_module, self._uncaptured_module = split_capture(module)
        self._num_inputs, self._trained_embeddings, self._epilogue = num_inputs, trained_embeddings, epilogue
        nodes = module.graph.find_nodes(op="get_attr")
        values = dict.fromkeys(getattr(module, node.target) for node in nodes)
        self._read_only_embeddings = [m for m in values if isinstance(m, EmbeddingBase) and m not in trained_embeddings]
        self._constants = [value for value in values if isinstance(value, Tensor)]
        placeholders = self._captured_module.graph.find_nodes(op="placeholder")
        self._used_indices = [index for index in range(num_inputs, len(placeholders)) if placeholders[index].users]
        self._capture_key: Any = None  # key of the latest call: the state that a captured graph depends on
        self._num_warm_calls = 0  # number of calls with this key so far, up to WARM_UP_CALLS
        self._capture_error: GraphError | None = None  # the reason why calls with this key cannot be captured
        self.captured_graph: CapturedGraph | None = None

    def run(self, tensors: list[Tensor], run_uncaptured: Callable[[], Any]) -> Any:
        """Run the step and return its results in new tensors. run_uncaptured: runs the step without a CUDA graph."""
        trained_tables = _find_open_tables(self._trained_embeddings)
        read_only_tables = _find_open_tables(self._read_only_embeddings)
        for table in trained_tables:
            table.yield_to_reader()
        with ExitStack() as locks:
            for table in sorted([*trained_tables, *read_only_tables], key=id):  # fixed order: graphs may share tables
                locks.enter_context(table.lock)
            captured_graph = self._find_captured_graph([*trained_tables, *read_only_tables], tensors)
            if captured_graph is not None:
                for tensor, captured_input in zip(tensors, captured_graph.inputs, strict=False):
                    captured_input.copy_(tensor)
                with _do_host_work(trained_tables, read_only_tables, self._epilogue.clip_value):
                    captured_graph.replay()
        if captured_graph is None:
            return run_uncaptured()
        self._uncaptured_module.forward(*captured_graph.uncaptured_inputs)
        return [output.clone() for output in captured_graph.outputs]

    def _find_captured_graph(self, tables: list[OpenTable], tensors: list[Tensor]) -> CapturedGraph | None:
        """Return the captured graph, or None to run uncaptured. The first call after the warm-up captures the graph."""
        state = [_make_replay_key(table) for table in tables]
        if None in state:
            return None
        state_tensors = [*(tensors[index] for index in self._used_indices), *self._constants]
        # the key contains the thread, because libraries allocate memory per thread
        key = get_ident(), tables, state, [tensor.data_ptr() for tensor in state_tensors]
        if key != self._capture_key:
            self._check_tables(tables)
            self._capture_key, self._num_warm_calls, self.captured_graph, self._capture_error = key, 0, None, None
        if self.captured_graph is None and self._num_warm_calls == WARM_UP_CALLS:
            self.captured_graph = self._capture(tensors, tables[0].processor.capturer)
        self._num_warm_calls = min(self._num_warm_calls + 1, WARM_UP_CALLS)
        return self.captured_graph

    def _capture(self, tensors: list[Tensor], capturer: Any) -> CapturedGraph:
        if self._capture_error is not None:  # every new attempt would leak memory in torch
            raise self._capture_error
        inputs = [torch.empty_like(tensor) for tensor in tensors[: self._num_inputs]]
        try:
            step = partial(self._captured_module.forward, *inputs, *tensors[self._num_inputs :])
            replay, (outputs, uncaptured_inputs) = capturer.capture(step)
        except (TierbedError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            cause = str(error.__context__ or error).partition("\n")[0]  # prefer the error that an op raised first
            self._capture_error = GraphError(
                f"cuda_graph: the step could not be captured: {cause}; remove ops that wait for the device from "
                "build, such as a custom op that reads a value, or call cuda_graph(False)"
            )
            raise self._capture_error from error
        return CapturedGraph(replay, inputs, outputs, uncaptured_inputs)

    def _check_tables(self, tables: list[OpenTable]) -> None:
        for embedding, table in zip([*self._trained_embeddings, *self._read_only_embeddings], tables, strict=True):
            name, options = embedding.name, embedding.store_options
            if table.processor.capturer is None:
                raise GraphError(
                    f"cuda_graph: embedding {name!r} is on {table.processor.device}, and only steps on CUDA devices "
                    "can be captured; call .cuda() on the graph, or cuda_graph(False)"
                )
            if options.store != "device_mem" or options.capacity is None:
                raise OptionError(
                    f"cuda_graph: embedding {name!r} has store={options.store!r}, capacity={options.capacity!r}, but "
                    "a captured step needs store='device_mem' and a capacity; set both, or call cuda_graph(False)"
                )
        devices = {table.processor.device for table in tables}
        if len(devices) > 1:
            raise GraphError(
                f"cuda_graph: the embeddings are on {', '.join(sorted(map(str, devices)))}; move the graph to one of "
                "them, or call cuda_graph(False)"
            )
        self._check_tensors(devices.pop())

    def _check_tensors(self, device: torch.device) -> None:
        graph = self._captured_module.graph
        placeholders = graph.find_nodes(op="placeholder")
        for node in graph.nodes:
            values = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
            other_devices = [str(value.device) for value in values if value.device != device]
            if other_devices and node.users:
                kind = "argument" if node in placeholders[: self._num_inputs] else "tensor"
                raise GraphError(
                    f"cuda_graph: {kind} {node.name} is on {other_devices[0]}, and a captured step would read it only "
                    f"once; make it on {device}, use a number instead, or call cuda_graph(False)"
                )
            if _waits_for_device(node):
                raise GraphError(
                    f"cuda_graph: {node.target} waits for the device, and such a step cannot be captured; leave it out "
                    "of build (use torch.where instead of a mask as an index), or call cuda_graph(False)"
                )
        changed_storages: set[int] = set().union(*map(find_written_storages, graph.nodes))
        for node in placeholders[: self._num_inputs]:
            value = node.meta["val"]
            if value.stride() != torch.empty_like(value).stride():
                raise GraphError(
                    f"cuda_graph: argument {node.name} is a slice or expanded tensor, and a captured step reads a "
                    f"contiguous copy; pass {node.name}.contiguous(), or call cuda_graph(False)"
                )
            if find_storages([node]) & changed_storages:
                raise GraphError(
                    f"cuda_graph: build changes its argument {node.name} in place, and a captured step reads a copy; "
                    "change a clone() instead, or call cuda_graph(False)"
                )


def _waits_for_device(node: fx.Node) -> bool:
    """True if a torch op is known to read values from the device, such as indexing with a mask."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.overloadpacket in _INDEX_OPS:
        indices = [value.meta["val"] for value in node.all_input_nodes]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return any(tag in node.target.tags for tag in _WAITING_TAGS)


def split_capture(module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split off a step's uncaptured part. The captured part returns (results, arguments of the uncaptured part)."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=apply_gradients):
        rows: Any  # a CUDA graph allows only clipping by value, and both calls below clip by value
        epilogue, rows, dense = node.args
        with graph.inserting_before(node):
            for batch, grads, weights in rows:
                graph.call_method("update", (batch, grads, weights))
            replace_node(node, graph.call_function(step_dense_optimizers, (epilogue, dense)))
    for node in graph.nodes:
        if get_call_target(node) in _CAPTURE_OPS:
            with graph.inserting_before(node):
                replace_node(node, graph.call_function(_CAPTURE_OPS[node.target], node.args, node.kwargs))
    return split_updates(module, graph, _UNCAPTURED_CALLS)


def _find_open_tables(embeddings: list[EmbeddingBase]) -> list[OpenTable]:
    """Return the embeddings' open tables. Raises GraphError if an embedding has no table in this process."""
    for embedding in embeddings:
        if not isinstance(embedding, SnapshotEmbedding):
            raise GraphError(
                f"cuda_graph: the rows of {embedding.name!r}, a {type(embedding).__name__}, are in no table of this "
                "process, so its steps cannot be captured; call cuda_graph(False)"
            )
    return [embedding.table_handle().open_table for embedding in embeddings if isinstance(embedding, SnapshotEmbedding)]


@contextmanager
def _do_host_work(
    trained_tables: list[OpenTable], read_only_tables: list[OpenTable], clip_value: float | None
) -> Iterator[None]:
    """Context manager: does a step's host work before and after a replay. The caller has locked the tables."""
    for table in read_only_tables:
        _begin_replay(table, False, None)
    updates = [(table, _begin_replay(table, True, clip_value)) for table in trained_tables]
    try:
        yield
    except BaseException as error:
        for table in trained_tables:
            table.record_failure(error)  # some rows may be written already
        raise
    for table, (step, hyperparams) in updates:
        table.record_update(step, hyperparams)


def _make_replay_key(table: OpenTable) -> Hashable | None:
    """Return a key for the table state that a captured graph depends on; None if the graph must not be replayed."""
    if table.observers.image is not None:  # it needs copies of rows before they change, but a replay makes none
        return None
    return table.optimizer and table.optimizer.rule, table.catch_up_rule, table.observers.tracker


def _begin_replay(table: OpenTable, has_updates: bool, clip_value: float | None) -> tuple[int, list[float]]:
    """Do the host work of `pin` and `update`, or of `read`, before a replay.

    Returns the arguments for `table.record_update`. If this function raises, nothing has changed.
    """
    if has_updates:
        table.unpin_rows()
        with table.enter_announced_step(()):
            pass  # drops announced batches, because the replayed ops make their own batch
    table.finish_erasures()
    table.raise_deferred_error(wait=False)
    if not has_updates:
        table.send_hyperparams()
        return table.step, table.hyperparams
    optimizer, step = table.require_optimizer(), table.check_next_step()
    hyperparams = optimizer.compute_hyperparams(step, clip_value, table.hyperparams)
    table.before_write(step)
    table.processor.send_hyperparams(optimizer.rule, hyperparams, step)
    return step, hyperparams
