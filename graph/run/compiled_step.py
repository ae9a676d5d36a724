"""A compiled step: the passes in their order, and how the step runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...embedding.autograd.lookup_op import embedding_of
from ...engine.errors import OptimizerError, OptionError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.lookup import Lookup
from ...engine.signals import uninterrupted
from ...engine.table.row_step import row_step
from ..passes import rewrite
from ..passes.collectives import pin_early, refuse_worlds, schedule_collectives
from ..passes.inductor import compile_dense
from ..passes.lookups import KnownLookups, expand_reads, expand_trained, extract_id_graph, refuse_used, share_batches
from ..passes.step_epilogue import DenseGrads, StepEpilogue
from ..show.listing import listing
from ..state.optimizer_set import OptimizerSet, embeddings_by_shadow, embeddings_of
from ..trace.names import HasBuild, identifiers, tensor_names
from ..trace.trace import Returned, ShapeGuard, Trace
from .cuda_graph_step import CudaGraphStep
from .rank_step import RankStepState, StepCollectives
from .rollback import RollbackStep

# (module, tensors) -> the result of the module
Forward = Callable[[fx.GraphModule, list[Any]], Any]


@dataclass(frozen=True)
class CompiledStep:
    """A step of the graph `owner`. `module` takes the input tensors of a call, then the graph's live tensors."""

    owner: str
    module: fx.GraphModule
    lookups: fx.GraphModule | None  # made by `extract_id_graph`
    trained: list[tuple[EmbeddingBase, RowOptimizer]]
    returned: Returned  # by build
    captured: CudaGraphStep | None = None  # set if training steps run as a CUDA graph
    rollback: RollbackStep | None = None  # set in a dynamic-shape step
    guard: ShapeGuard | None = None  # set with it: whether the step accepts inputs of these sizes
    key: Hashable = None  # what it depends on beside the program, by which equal programs share a step
    program: Hashable = None  # of its trace

    def accepts(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the step is right for inputs of its signature. The key of a static-shape step has all sizes."""
        return self.guard is None or self.guard(inputs)

    def known_lookups(self, tensors: list[Tensor]) -> KnownLookups | None:
        """The lookups that a later run on these tensors trains, as far as they are known. That run raises errors."""
        if self.lookups is None:
            return None
        try:
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                return [(rows, [Lookup(*parts) for parts in found]) for rows, found in self.lookups.forward(*tensors)]
        except Exception:
            return None

    def run(self, tensors: list[Tensor], forward: Forward | None = None) -> Any:
        """Run the step and return what build returned. If an op raises, pins are dropped, and the exception is raised.

        forward: runs the step's module on tensors, instead of the module's `forward`.

        GraphError while another thread trains the same rows. DynamicStepFailed if a static-shape step may run instead.
        """
        if self.trained:
            outputs = row_step(self.trained, self.owner, self._forward, tensors, forward)
        else:
            outputs = self._forward(tensors, forward)
        following = iter(outputs)
        leaves = [
            next(following) if tensor else constant
            for tensor, constant in zip(self.returned.is_tensor, self.returned.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.returned.spec)

    def _forward(self, tensors: list[Tensor], forward: Forward | None) -> Any:
        # not no_grad: some kernels depend on gradient mode, which has to be that of the trace
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            if self.rollback is not None:
                return self.rollback.run(tensors, forward or (lambda module, tensors: module.forward(*tensors)))
            if forward is not None:
                return forward(self.module, tensors)
            if self.captured is not None:
                return self.captured.run(tensors, lambda: self.module.forward(*tensors))
            return self.module.forward(*tensors)

    def code(self) -> str:
        """The step as Python, one op a line, with shapes, dtypes and stores as comments."""
        is_captured = self.captured is not None and self.captured.captured_graph is not None
        return ("# captured as a CUDA graph\n" if is_captured else "") + listing(self.module)


@dataclass(frozen=True)
class RankStep(CompiledStep):
    """A compiled step of embeddings with a world."""

    collectives: StepCollectives = field(kw_only=True)
    first_values: dict[str, int] = field(kw_only=True)  # indices of parameters and buffers in tensors, by name
    in_training: bool = field(kw_only=True)  # whether it is for a graph in the mode of `train()`

    def _forward(self, tensors: list[Tensor], forward: Forward | None) -> Any:
        self.collectives.rank_state.note_run(self.in_training, self.collectives.trains, self.join)
        first_values = ((name, tensors[at]) for name, at in self.first_values.items())
        with uninterrupted(), self.collectives.step(first_values):
            return super()._forward(tensors, forward) if tensors else self.collectives.join()

    def join(self) -> None:
        """Take part in the step without a batch, for ranks that have one."""
        row_step(self.trained, self.owner, self._forward, [], None)


def compile_step(
    root: HasBuild,
    traced: Trace,
    optimizers: OptimizerSet,
    end: StepEpilogue,
    tensors: list[Tensor],
    inductor: Mapping[str, Any] | None,
    cuda_graph: bool,
    rank_state: RankStepState,
) -> CompiledStep:
    """Rewrite a trace into a step that trains if `root.training` and build called backward().

    inductor: options of TorchInductor if it compiles the dense part. cuda_graph: whether training steps are captured.

    OptimizerError if backward() reached a parameter that no optimizer of the graph holds.
    """
    module = traced.module
    graph = module.graph
    returned = traced.returned
    embeddings = embeddings_of(root)
    world = refuse_worlds(embeddings)
    if world is not None and cuda_graph:
        raise OptionError(
            "cuda_graph: rows of a world are sent between ranks through host memory, by the host in the middle of the "
            "step, and a captured step runs without the host; call cuda_graph(False)"
        )
    embedding_at = dict(zip([m.handle for m in embeddings.values()], identifiers(list(embeddings)), strict=True))

    def label(handle: int) -> str:
        return embedding_at.get(handle) or embedding_of(handle).name

    placeholders = graph.find_nodes(op="placeholder")
    live = placeholders[len(traced.inputs) :]
    paths = tensor_names(root)
    rewrite.name_placeholders(placeholders, [*traced.inputs, *(paths[id(tensor)] for tensor in tensors)])
    by_shadow = embeddings_by_shadow(root)
    rewrite.drop_detach(graph)
    if traced.guard is not None:
        rewrite.sizes_from_inputs(module)
    rewrite.drop_double_transpose(graph)
    count = sum(returned.is_tensor)
    with_grad = returned.with_grad if root.training else []
    optimizers.warn_untrained(root, bool(with_grad))
    values: Any = graph.output_node().args[0]
    trained: list[tuple[EmbeddingBase, RowOptimizer]] = []
    schedulers = optimizers.schedulers() if with_grad else []
    ended: fx.Node | None = None
    holders = optimizers.holders()
    for index, grad in zip(with_grad, values[count:], strict=False):
        parameter = tensors[index]
        embedding = by_shadow.get(id(parameter))
        if id(parameter) not in holders:
            what = f"embedding {embedding.name!r}" if embedding else f"parameter {paths[id(parameter)]!r}"
            raise OptimizerError(
                f"backward() reaches {what}, which no optimizer of this graph holds; call self.add_optimizer(...) "
                "in __init__ with an optimizer over its parameters(), or freeze it with requires_grad_(False)"
            )
        if embedding is not None:
            expand_trained(module, embedding.handle, grad, label)
            trained.append((embedding, optimizers.rows[id(embedding.shadow)]))
    # only now: a gradient of weights may be a dense gradient, and was replaced
    grads = rewrite.keep_outputs(graph, count)
    dense = [
        (holders[id(tensors[index])], live[index], grad)
        for index, grad in zip(with_grad, grads, strict=False)
        if id(tensors[index]) not in by_shadow
    ]
    if with_grad:
        rewrite.add_dense_steps(module, optimizers, dense)
        end.check_scaled(module)
        if world is not None or not end.is_plain:
            ended = rewrite.end_together(module, end)
        rewrite.add_schedules(module, schedulers, ended)
    expand_reads(module, label)
    share_batches(module)
    rewrite.drop_dead(graph)
    shadows = {
        node: label(by_shadow[id(t)].handle) for node, t in zip(live, tensors, strict=True) if id(t) in by_shadow
    }
    refuse_used(graph, shadows, label)
    collectives: StepCollectives | None = None
    if world is not None:
        parts: list[DenseGrads] = []
        for optimizer in optimizers:
            params = [tensors[live.index(node)] for holder, node, _ in dense if holder is optimizer]
            parts.append(DenseGrads(optimizer, params, params))
        pin_early(module)
        own = [embedding for embedding, _ in trained], parts, schedulers, ended is not None
        collectives = schedule_collectives(
            module, ended, partial(StepCollectives, world, rank_state, type(root).__name__, end, *own)
        )
    graph.lint()
    module.recompile()
    lookups = None if cuda_graph and trained else extract_id_graph(module)  # a captured step makes its batches itself
    if inductor is not None:
        module = compile_dense(module, inductor)
    captured = (
        CudaGraphStep(module, len(traced.inputs), [e for e, _ in trained], end) if cuda_graph and trained else None
    )
    rollback = None if traced.guard is None else RollbackStep(module)
    rewrite.bind_ops(module)
    name, guard = type(root).__name__, traced.guard
    step = CompiledStep(name, module, lookups, trained, returned, captured, rollback, guard)
    if collectives is None:
        return step
    first: dict[str, int] = {}
    for index, tensor in enumerate(tensors, len(traced.inputs)):
        if id(tensor) not in by_shadow:
            first.setdefault(paths[id(tensor)], index)
    return RankStep(**vars(step), collectives=collectives, first_values=first, in_training=root.training)
