"""Compile a trace into a step: run all passes, and run the result.

A trace is a flat list of aten calls for forward and backward, with one `lookup` call per embedding lookup.
`compile_step` first turns trained lookups into pin, gather and update calls. Then it adds nodes that step the
dense optimizers. If gradients are clipped, scaled, accumulated or summed over ranks, one node replaces all updates. The
remaining lookups become reads. Then equal lookups share one deduplication, and dead nodes are dropped. A copy of the
ops that compute ids lets `Graph.run` prefetch rows. Users may choose TorchInductor for the dense part, or a CUDA graph
for the step. A dynamic-shape step that fails can be undone (rollback.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...embedding.autograd.lookup_op import find_embedding
from ...engine.errors import OptimizerError, OptionError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.lookup import Lookup
from ...engine.signals import defer_signals
from ...engine.table.row_step import run_row_step
from ..passes import rewrite
from ..passes.collectives import find_common_world, pin_early, schedule_collectives
from ..passes.inductor import compile_dense
from ..passes.lookups import KnownLookups, check_shadows, expand_reads, expand_trained, extract_id_graph, share_rows
from ..passes.step_epilogue import DenseGrads, StepEpilogue
from ..show.listing import format_step
from ..state.optimizer_set import OptimizerSet, find_embeddings, map_shadow_embeddings
from ..trace.names import HasBuild, make_identifiers, map_tensor_names
from ..trace.trace import ResultSpec, ShapeGuard, Trace
from .cuda_graph_step import CudaGraphStep
from .rank_step import RankStepState, StepCollectives
from .rollback import RollbackStep

# runs a module on tensors and returns the result; used in place of `module.forward`
Forward = Callable[[fx.GraphModule, list[Any]], Any]


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step. `module` takes a call's input tensors, then the graph's parameters and buffers."""

    graph_name: str
    module: fx.GraphModule
    id_graph: fx.GraphModule | None  # computes the ids of later batches; see `extract_id_graph`
    trained_rows: list[tuple[EmbeddingBase, RowOptimizer]]
    result_spec: ResultSpec  # describes the result of build
    cuda_graph_step: CudaGraphStep | None = None  # set if training steps run as a CUDA graph
    rollback: RollbackStep | None = None  # only in dynamic-shape steps: runs the step and can undo it
    guard: ShapeGuard | None = None  # only in dynamic-shape steps: tests the sizes of inputs
    key: Hashable = None  # calls share a step if both `key` and `program_key` are equal
    program_key: Hashable = None  # from `Trace.make_program_key`

    def can_run(self, inputs: Sequence[Tensor]) -> bool:
        """True if the step can run these inputs. A static-shape step accepts all inputs with its signature."""
        return self.guard is None or self.guard(inputs)

    def find_known_lookups(self, tensors: list[Tensor]) -> KnownLookups | None:
        """Return the lookups that a later run on these tensors will train, or None if computing the lookups fails."""
        if self.id_graph is None:
            return None
        try:
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                known_lookups = self.id_graph.forward(*tensors)
                return [(embedding, [Lookup(*fields) for fields in lookups]) for embedding, lookups in known_lookups]
        except Exception:
            return None

    def run(self, tensors: list[Tensor], forward: Forward | None = None) -> Any:
        """Run the step and return the result of `build`. If an op raises, the step's rows are unpinned.

        Raises GraphError if another thread trains the same rows, and DynamicStepError to request a static-shape step.
        """
        if self.trained_rows:
            outputs = run_row_step(self.trained_rows, self.graph_name, self._forward, tensors, forward)
        else:
            outputs = self._forward(tensors, forward)
        spec, tensor_leaves = self.result_spec, iter(outputs)
        leaf_specs = zip(spec.is_tensor, spec.constants, strict=True)
        leaves = [next(tensor_leaves) if is_tensor else constant for is_tensor, constant in leaf_specs]
        return pytree.tree_unflatten(leaves, spec.tree_spec)

    def _forward(self, tensors: list[Tensor], forward: Forward | None) -> Any:
        # not no_grad: some kernels depend on the gradient mode, so the mode must be the same as in the trace
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            if self.rollback is not None:
                return self.rollback.run(tensors, forward or (lambda module, tensors: module.forward(*tensors)))
            if forward is not None:
                return forward(self.module, tensors)
            if self.cuda_graph_step is not None:
                return self.cuda_graph_step.run(tensors, lambda: self.module.forward(*tensors))
            return self.module.forward(*tensors)

    def format_code(self) -> str:
        """Return the step as Python, one op per line, with shapes, dtypes and stores as comments."""
        is_captured = self.cuda_graph_step is not None and self.cuda_graph_step.captured_graph is not None
        return ("# captured as a CUDA graph\n" if is_captured else "") + format_step(self.module)


@dataclass(frozen=True)
class RankStep(CompiledStep):
    """A compiled step across ranks."""

    collectives: StepCollectives = field(kw_only=True)
    synced_indices: dict[str, int] = field(kw_only=True)  # name of a parameter or buffer -> index in the step's inputs
    is_training: bool = field(kw_only=True)  # True if compiled for `train()` mode

    def _forward(self, tensors: list[Tensor], forward: Forward | None) -> Any:
        self.collectives.rank_state.remember_join_method(self.is_training, self.collectives.has_updates, self.join_step)
        synced_tensors = ((name, tensors[index]) for name, index in self.synced_indices.items())
        with defer_signals(), self.collectives.step(synced_tensors):
            return super()._forward(tensors, forward) if tensors else self.collectives.join_step()

    def join_step(self) -> None:
        """Take part in the step on a rank without a batch."""
        run_row_step(self.trained_rows, self.graph_name, self._forward, [], None)


def compile_step(
    root: HasBuild,
    trace: Trace,
    optimizers: OptimizerSet,
    epilogue: StepEpilogue,
    tensors: list[Tensor],
    inductor: Mapping[str, Any] | None,
    uses_cuda_graph: bool,
    rank_state: RankStepState,
) -> CompiledStep:
    """Rewrite a trace into a step. The step trains if `root.training` is set and build called backward().

    inductor: TorchInductor options, or None to leave the dense part uncompiled. Raises OptimizerError if backward()
    reached a parameter that no optimizer of the graph holds.
    """
    module, result_spec = trace.module, trace.result_spec
    graph = module.graph
    embeddings = find_embeddings(root)
    world = find_common_world(embeddings)
    if world is not None and uses_cuda_graph:
        raise OptionError(
            "cuda_graph: ranks exchange rows through host memory in the middle of the step, and a captured step "
            "cannot do that; call cuda_graph(False)"
        )
    name_by_id = dict(zip([m.embedding_id for m in embeddings.values()], make_identifiers([*embeddings]), strict=True))

    def find_path(embedding_id: int) -> str:
        return name_by_id.get(embedding_id) or find_embedding(embedding_id).name

    placeholders = graph.find_nodes(op="placeholder")
    parameter_nodes = placeholders[len(trace.input_names) :]
    path_by_id = map_tensor_names(root)
    rewrite.name_placeholders(placeholders, [*trace.input_names, *(path_by_id[id(tensor)] for tensor in tensors)])
    embedding_by_shadow = map_shadow_embeddings(root)
    rewrite.drop_detach(graph)
    if trace.guard is not None:
        rewrite.compute_sizes(module)
    rewrite.drop_double_transpose(graph)
    num_results = sum(result_spec.is_tensor)
    grad_indices = result_spec.grad_indices if root.training else []
    optimizers.warn_if_untrained(root, bool(grad_indices))
    values: Any = graph.output_node().args[0]
    trained_rows: list[tuple[EmbeddingBase, RowOptimizer]] = []
    schedulers = optimizers.list_schedulers() if grad_indices else []
    end_node: fx.Node | None = None
    optimizer_by_parameter = optimizers.map_parameter_optimizers()
    for index, grad in zip(grad_indices, values[num_results:], strict=False):
        parameter = tensors[index]
        embedding = embedding_by_shadow.get(id(parameter))
        if id(parameter) not in optimizer_by_parameter:
            path = f"parameter {path_by_id[id(parameter)]!r}"
            label = path if embedding is None else f"embedding {embedding.name!r}"
            raise OptimizerError(
                f"backward() reaches {label}, which no optimizer of this graph holds; call self.add_optimizer(...) "
                "in __init__ with an optimizer over its parameters(), or freeze it with requires_grad_(False)"
            )
        if embedding is not None:
            expand_trained(module, embedding.embedding_id, grad, find_path)
            trained_rows.append((embedding, optimizers.row_optimizers[id(embedding.shadow)]))
    # cut_outputs must follow the loop, because the loop replaces gradients of parameters used as pooling weights
    grads = rewrite.cut_outputs(graph, num_results)
    dense_grads = [
        (optimizer_by_parameter[id(tensors[index])], parameter_nodes[index], grad)
        for index, grad in zip(grad_indices, grads, strict=False)
        if id(tensors[index]) not in embedding_by_shadow
    ]
    if grad_indices:
        rewrite.add_dense_steps(module, optimizers, dense_grads)
        epilogue.check_scaled(module)
        if world is not None or not epilogue.is_identity:
            end_node = rewrite.merge_updates(module, epilogue)
        rewrite.add_schedules(module, schedulers, end_node)
    expand_reads(module, find_path)
    share_rows(module)
    rewrite.drop_dead_nodes(graph)
    parameter_by_node = dict(zip(parameter_nodes, tensors, strict=True))
    path_by_shadow = {
        node: find_path(embedding_by_shadow[id(parameter)].embedding_id)
        for node, parameter in parameter_by_node.items()
        if id(parameter) in embedding_by_shadow
    }
    check_shadows(graph, path_by_shadow, find_path)
    collectives: StepCollectives | None = None
    if world is not None:
        dense_parts: list[DenseGrads] = []
        for optimizer in optimizers:
            parameters = [parameter_by_node[node] for holder, node, _ in dense_grads if holder is optimizer]
            dense_parts.append(DenseGrads(optimizer, parameters, parameters))
        pin_early(module)
        step_parts = [embedding for embedding, _ in trained_rows], dense_parts, schedulers, end_node is not None
        collectives = schedule_collectives(
            module, end_node, partial(StepCollectives, world, rank_state, type(root).__name__, epilogue, *step_parts)
        )
    graph.lint()
    module.recompile()
    is_captured = uses_cuda_graph and bool(trained_rows)
    id_graph = None if is_captured else extract_id_graph(module)  # captured steps do not prefetch
    if inductor is not None:
        module = compile_dense(module, inductor)
    cuda_graph_step = (
        CudaGraphStep(module, len(trace.input_names), [e for e, _ in trained_rows], epilogue) if is_captured else None
    )
    rollback = None if trace.guard is None else RollbackStep(module)
    rewrite.bind_ops(module)
    name, guard = type(root).__name__, trace.guard
    step = CompiledStep(name, module, id_graph, trained_rows, result_spec, cuda_graph_step, rollback, guard)
    if collectives is None:
        return step
    synced_indices: dict[str, int] = {}
    for index, tensor in enumerate(tensors, len(trace.input_names)):
        if id(tensor) not in embedding_by_shadow:
            synced_indices.setdefault(path_by_id[id(tensor)], index)
    return RankStep(**vars(step), collectives=collectives, synced_indices=synced_indices, is_training=root.training)
