"""`Graph`: the class that a user subclasses."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from ..embedding.optim.ddp_guard import refuse_around
from ..embedding.state_dict.model_snapshots import ModelSnapshots
from ..embedding.state_dict.saved_rows import EXTRA, are_apart, rows_apart
from ..engine.checks import as_int, check_flags, checked_arguments
from ..engine.errors import GraphError, InputError, OptimizerError, OptionError
from ..engine.optim.base import positive
from ..engine.signals import uninterrupted
from ..snapshots.store.selection import Selection
from .passes.lookups import KnownLookups
from .passes.step_epilogue import StepEpilogue
from .run.compiled_step import CompiledStep, Forward, compile_step
from .run.loop import Run, RunProgress, forget_announced, iterate
from .run.rank_step import RankStepState, raise_on_ranks
from .run.rollback import DynamicStepFailed
from .run.step_cache import StepCache
from .show.listing import draw
from .show.profile import Profile, Timer, profile
from .show.why import RecompileLog, guard_facts
from .state import checkpoint
from .state.extra_state import (
    check_extra_state,
    check_modules,
    check_not_waiting,
    load_extra_state,
    of_all_ranks,
    training_of,
    without_rows,
)
from .state.optimizer_set import OptimizerSet
from .trace.names import HasBuild, path_of
from .trace.signature import (
    NO_DYNAMIC,
    Call,
    Dims,
    Given,
    Structure,
    call_key,
    can_split,
    dynamic_leaves_of,
    split_by_key,
    tensors_spec,
)
from .trace.swap import trace_lock
from .trace.trace import Trace, trace
from .trace.values import ValueGuards

MAX_CACHED_STEPS = 64
_TENSORS = {Tensor}
log = logging.getLogger("tierbed")


class Graph(ModelSnapshots, HasBuild):
    """A training or evaluation step, traced once for each input signature and then run without autograd.

    A subclass sets its modules in `__init__`, calls `add_optimizer` there, and defines `build`. `build` computes a
    loss, calls `loss.backward()`, and reaches parameters through `self`. Calling the graph runs one step: forward,
    backward, the update of embedding rows, and `step()` of every optimizer. It returns what `build` returns, tensors
    detached; after a training step `grad` of every parameter that an optimizer holds is None. A graph whose `build`
    never calls `backward()`, or on which `eval()` was called, trains nothing.

    `build` runs again, on tensors without values, when a call has another signature: shapes, strides, dtypes and
    devices of tensors, values of other arguments, `training` flags, `requires_grad`, gradient and autocast mode,
    optimizers, hooks, tensors assigned to attributes, and Python values that `build` reads, such as the `p` of a
    dropout or a global; docs/graph.md lists the few that cannot be followed. The values of parameters, buffers and
    closure tensors are read at every call. The 64 steps used last are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        if type(self).forward is not Graph.forward:
            raise GraphError(
                f"{type(self).__name__} defines forward(), which a call would run instead of the compiled step; name "
                "it build(), and do what is not part of the step around the call"
            )
        self.__optimizers = OptimizerSet()
        self.__end = StepEpilogue()
        self.__inductor: dict[str, Any] | None = None
        self.__captures = False
        self.__abandoned: list[None] = []  # an item for each run that was collected before its end
        # two underscores: a subclass may have attributes of any name
        self.__steps = StepCache(MAX_CACHED_STEPS)
        # of the last call with containers
        self.__tree: tuple[pytree.TreeSpec, frozenset[int]] = tensors_spec(0), NO_DYNAMIC
        self.__splits = False  # whether build needs the values of keyed tensors by key
        self.__has_warned = False  # that compile_dense compiles nothing of a dynamic-shape step
        self.__structure: Structure | None = None
        self.__values = ValueGuards()
        self.__last: tuple[Hashable, Any] = (None, None)  # key and step of the previous call, found without hashing
        self.__has_met = False  # whether it looked at the dense part, before its first training step
        self.__compiles = RecompileLog(MAX_CACHED_STEPS)
        self.__forward: Forward | None = None  # while a profile runs
        self.__rank_state = RankStepState()

    def add_optimizer(self, optimizer: Optimizer, lr_sch: LRScheduler | None = None) -> None:
        """Let a torch optimizer train the parameters that it holds, and the rows of embeddings whose shadow it holds.

        Its parameter groups are read at every step, so learning rate schedulers work. `lr_sch`, a scheduler made over
        the optimizer, makes a step after each step of the optimizer. Raises OptimizerError for anything but a torch
        optimizer and a scheduler of it, an optimizer that cannot train rows, and a parameter that another optimizer of
        this graph holds.
        """
        self.__optimizers.add(optimizer, lr_sch)
        try:
            self.__optimizers.attach(self)
        except BaseException:
            self.__optimizers.discard(optimizer)
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the graph, and the state that its optimizers keep of its parameters."""
        super()._apply(fn, recurse)
        self.__optimizers.follow_parameters()
        return self

    def clip_grad_norm(self, max_norm: float | None) -> None:
        """Scale all gradients of a step, those of rows too, so that their total L2 norm is at most `max_norm`.

        A row counts once, with the sum of the gradients of its occurrences, as in a dense `nn.Embedding`. None: off.
        """
        limit = positive("max_norm", max_norm)
        self.__refuse_captured("clip_grad_norm", limit is not None)
        self.__end.clip_norm(limit)

    def clip_grad_value(self, clip_value: float | None) -> None:
        """Clip each element of all gradients, of rows summed over their occurrences, to [-clip_value, clip_value]."""
        self.__end.clip_elements(positive("clip_value", clip_value))

    def accumulate_grads(self, steps: int, mean: bool = False) -> None:
        """Sum the gradients of `steps` calls before parameters and rows are updated; with `mean`, take their mean.

        Calls before the last read rows as they are. The rows of all calls are fetched and pinned at the last. The
        gradients of a row are summed over each call first, in float32, then over the calls in their order.
        """
        self.__refuse_captured("accumulate_grads", as_int(steps, minimum=2) is not None)
        self.__end.accumulate(steps, mean)

    def drop_grads(self) -> None:
        """Drop the gradients of accumulated calls that wait for their update, such as those of an epoch's remainder."""
        self.__end.clear()

    def set_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Divide gradients by the scale of `scaler`, by which `build` multiplies: `scaler.scale(loss).backward()`.

        A step with a gradient that is not finite updates nothing and lowers the scale. None: no scaler.
        """
        if scaler is None:
            self.__end.unscale_by(None)
            return
        if not isinstance(scaler, GradScaler):
            raise OptimizerError(f"scaler={type(scaler).__name__}: give a torch.amp.GradScaler")
        self.__refuse_captured("set_grad_scaler", scaler.is_enabled())
        device = next((tensor.device for tensor in self.parameters()), "cpu")
        scaler.scale(torch.zeros((), device=device))  # creates the tensors of the scaler, which a trace could not
        self.__end.unscale_by(scaler)

    def compile_dense(self, **options: Any) -> None:
        """Let TorchInductor compile the dense part of each step, with these options of TorchInductor.

        The first call of each shape takes seconds longer. Needs a C++ compiler. Random draws, in-place ops, rows and
        optimizers run as before; results equal those of eager up to rounding. GraphError if it cannot compile.
        """
        self.__refuse_captured("compile_dense", True)
        self.__inductor = options

    @checked_arguments("enabled")
    def cuda_graph(self, enabled: bool = True) -> None:
        """Capture each training step as a CUDA graph after its first 3 calls, and replay the graph from then on.

        Results are bit-identical to those without. Embeddings have to be in `device_mem` with a capacity, on a CUDA
        device like all else that the step computes with; docs/graph.md has the details. False: stop capturing and
        replaying. A call raises GraphError or OptionError for what cannot be captured. Raises OptionError together with
        `clip_grad_norm`, `accumulate_grads`, `set_grad_scaler` and `compile_dense`.
        """
        end = self.__end
        self.__refuse_captured("clip_grad_norm", end.max_norm is not None, enabled)
        self.__refuse_captured("accumulate_grads", end.accumulate_steps > 1, enabled)
        self.__refuse_captured("set_grad_scaler", end.scaler is not None and end.scaler.is_enabled(), enabled)
        self.__refuse_captured("compile_dense", self.__inductor is not None, enabled)
        self.__captures = enabled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step and return what `build` returns, tensors detached.

        Raises GraphError for a `build` that a static graph cannot hold, OptimizerError where backward() reaches a
        parameter without optimizer, and whatever `build`, an op or a store raises; the graph stays usable.
        """
        if DistributedDataParallel._active_ddp_module is not None:
            refuse_around(self)
        try:
            step, tensors = self.__compiled(args, kwargs)
        except Exception as error:
            raise_on_ranks(self, error)
            raise
        try:
            return step.run(tensors, self.__forward)
        except DynamicStepFailed as failed:
            shared_error = failed.shared_error
            cause = failed.cause.with_traceback(None)  # its frames hold all that the failed step had computed
        if shared_error is not None:  # the other ranks raise, and do not run again
            self.__steps.drop(type(self).__name__, step, cause)
            raise shared_error
        own, tensors = self.__compiled(args, kwargs, static_only=True)
        result = own.run(tensors, self.__forward)  # if this raises as well, the dynamic-shape step is not at fault
        self.__steps.drop(type(self).__name__, step, cause)
        return result

    @checked_arguments("progress", "uneven")
    def run(
        self, batches: Iterable[Any], *, ahead: int | None = None, progress: bool | str = False, uneven: str = "stop"
    ) -> Run:
        """Run a step on each batch, and iterate over what `build` returns: `for loss in graph.run(loader)`.

        A batch that is a list or a tuple gives the arguments of `build`; any other batch is its one argument. While a
        step runs, up to `ahead` batches (0 to 31) are drawn, their ids deduplicated, and their rows fetched and pinned
        in the cache. The cache evicts by the ids of these batches. Results are those of
        `for batch in loader: graph(*batch)`. ahead: by default 8 on a GPU, over ranks, and over SSD while caches miss
        rows; else 0, since there is nothing to hide if rows are in memory.
        progress: whether to show a bar with the rate; a string is its label. InputError for wrong arguments.
        uneven: over ranks, whether all "stop" with the shortest loader, or ranks without a batch "join" the others.
        """
        label = progress if isinstance(progress, str) else type(self).__name__ * bool(progress)
        bar = RunProgress(batches, label)
        return Run(
            self, self.__rank_state, self.__end, batches, ahead, uneven, self.__known_lookups, bar, self.__abandoned
        )

    def profile(self, batches: Iterable[Any], steps: int | None = None, *, ahead: int | None = None) -> Profile:
        """Run a step on each batch, or on the first `steps`, and report where the time went.

        The steps are those of `run(batches, ahead=ahead)`, bit for bit. `print` shows time by stage; `by_op()` and
        `chrome_trace(path)` have each op. Raises what `run` raises.
        """
        if steps is not None and as_int(steps, 1, sys.maxsize) is None:
            raise InputError(f"steps={steps!r}: give a whole number > 0, or None for all batches")
        timer = Timer(self.__compiles)
        self.__forward = timer.forward
        try:
            some = islice(iterate(batches), steps)
            run, may_compile = partial(self.run, ahead=ahead), self.__inductor is None and not self.__captures
            return profile(type(self).__name__, run, some, timer, may_compile)
        finally:
            self.__forward = None

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a checkpoint, the folder `path`: `state_dict()` and all rows. It is durable on return.

        Embeddings with a persistent_path get a snapshot of that name there too, which shares its files with the
        checkpoint if the file system allows it. overwrite: whether to replace an existing checkpoint, atomically once
        the new one is durable. A save that fails leaves no files behind, and keeps the old checkpoint. Raises
        SnapshotError if `path` exists or cannot be written, GraphError for a state that a checkpoint cannot hold,
        InputError for a path of another type.
        """
        folder = checkpoint.check_save(self, path, overwrite)
        check_not_waiting(self.__end)
        with rows_apart():
            state = self.state_dict()
        checkpoint.save(self, state, folder, overwrite)

    def check_save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Raise what `save` would raise now for these arguments. Call it before the training to be saved."""
        checkpoint.check_save(self, path, overwrite)

    def load(self, path: str | os.PathLike[str], *, optimizers: bool = True, convert: bool = False) -> None:
        """Continue from a checkpoint: the next steps are those of a run that never stopped.

        optimizers: False takes parameters, buffers and the weights of rows alone, for a graph with other optimizers or
        none. convert: True converts rows of embeddings with another dtype or state_dtype: widening is exact, narrowing
        rounds to nearest even. In both cases a kill still recovers rows from the snapshot that it did before this load.
        Raises SnapshotError for a checkpoint that is missing, damaged or of another graph, before anything is replaced,
        and InputError for a path of another type, or a number that a narrower dtype cannot hold.
        """
        check_flags(InputError, optimizers=optimizers, convert=convert)

        def check(state: dict[str, Any]) -> None:
            check_modules(self, state, "graph")
            if EXTRA in state and optimizers:
                check_extra_state(training_of(self.__optimizers, self.__end), state[EXTRA])

        def put(state: dict[str, Any]) -> None:
            self.load_state_dict(without_rows(self, state, optimizers))

        with rows_apart():
            selection = Selection(state=optimizers, convert=convert)
            checkpoint.load(self, path_of(path), check, put, self.state_dict, selection)

    def get_extra_state(self) -> Any:
        """The extra state in `state_dict()`: optimizers, schedules, scaler and random numbers, those of all ranks.

        A tuple of one map, which torch.distributed.checkpoint keeps whole.
        """
        state = training_of(self.__optimizers, self.__end).state()
        if are_apart():
            return state
        check_not_waiting(self.__end)
        return (of_all_ranks(self, state),)

    def set_extra_state(self, state: Any) -> None:
        """Load the extra state of `load_state_dict()`, a tuple of a map, or the map."""
        load_extra_state(self, self.__optimizers, self.__end, state)
        self.__rank_state.note_loaded()

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the step of the last call as a flowchart: stages, ops, shapes, and the store of each lookup.

        The file is text in Mermaid, which GitHub and GitLab, editors and mermaid.live draw. Raises GraphError before
        the first call, InputError for a path of another type.
        """
        _, step = self.__last
        if step is None:
            raise GraphError(f"{type(self).__name__} has no step to draw yet; call it once, which compiles one")
        path_of(path).write_text(draw(step.module, type(self).__name__, ahead=step.lookups is not None))

    def why_recompiled(self) -> list[str]:
        """For each compiled step but the first, at most the last 64: what differed from the nearest step before it.

        The logger "tierbed" reports the same at level INFO.
        """
        return list(self.__compiles.reasons)

    def __refuse_captured(self, method: str, is_used: bool, captures: bool | None = None) -> None:
        """OptionError for `method` together with `cuda_graph`. captures: whether that is used, as now by default."""
        if is_used and (self.__captures if captures is None else captures):
            raise OptionError(
                f"cuda_graph and {method}: a step with {method} cannot be captured; leave out one of them: "
                f"cuda_graph(False), or no call of {method} (clip_grad_value goes with both)"
            )

    def __known_lookups(self, *args: Any) -> KnownLookups | None:
        """What a later call with these arguments looks up, as far as it is known."""
        try:
            step, tensors = self.__compiled(args, {})
        except Exception:  # the call itself will raise it
            return None
        return step.known_lookups(tensors)

    def __compiled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], static_only: bool = False
    ) -> tuple[CompiledStep, list[Tensor]]:
        """The step of a call, and the tensors that it runs on. static_only: whether to take a static-shape step."""
        if self.__abandoned:
            self.__abandoned.clear()
            forget_announced(self)
        given = split_by_key((args, kwargs)) if self.__splits else (args, kwargs)
        args, kwargs = given
        dynamic_leaves = NO_DYNAMIC
        if not kwargs and set(map(type, args)) <= _TENSORS:
            inputs = leaves = list(args)
            spec = tensors_spec(len(args))
        else:
            leaves, spec = pytree.tree_flatten(given)
            inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            tree = self.__tree  # read once: a call in another thread may set it
            if spec != tree[0]:
                tree = self.__tree = spec, dynamic_leaves_of(spec)
            spec, dynamic_leaves = tree
        signature, tensors = self.__signature(given, leaves, spec, dynamic_leaves)
        known, step = self.__last
        if signature != known or static_only or (dynamic_leaves and not step.accepts(inputs)):
            call = Call(given, leaves, spec, dynamic_leaves)
            with trace_lock, uninterrupted():  # Ctrl-C in the middle of a trace aborts in torch
                self.__optimizers.adopt(self)
                # again: another thread may have been tracing
                signature, tensors = self.__signature(given, leaves, spec, dynamic_leaves)
                try:
                    step = self.__step_for(signature, call, tensors, static_only)
                except GraphError:
                    if self.__splits or not can_split(given):
                        raise
                    self.__splits = True
                    try:
                        return self.__compiled(args, kwargs, static_only)
                    except BaseException:
                        self.__splits = False
                        raise
            own = bool(dynamic_leaves) and step.guard is None  # its sizes are not in the signature
            self.__last = None if own else signature, step
        return step, inputs + tensors

    def __signature(
        self, given: Given, leaves: list[Any], spec: pytree.TreeSpec, dynamic_leaves: frozenset[int]
    ) -> tuple[Hashable, list[Tensor]]:
        while self.__structure is None or (live := self.__structure.live()) is None:
            self.__structure = Structure(self, self.__optimizers.optimizers)
            self.__values = ValueGuards()
            self.__steps = StepCache(MAX_CACHED_STEPS)  # old ones have no use, and would keep replaced modules alive
        tensors, state = live
        return (
            spec,
            call_key(leaves, dynamic_leaves, self.build, given),
            state,
            self.__end.key(),
            repr(self.__inductor),
            self.__captures,
            self.__values.number if self.__values.holds() else self.__values.renew(),
        ), tensors

    def __step_for(self, signature: Any, call: Call, tensors: list[Tensor], static_only: bool) -> CompiledStep:
        step = self.__steps.find(signature, call, static_only)
        if step is not None:
            return step
        if detect_fake_mode(tensors):
            raise GraphError(
                f"build calls the graph {type(self).__name__}, and a graph cannot run inside another; call its "
                "build(), and add its optimizers to the outer graph"
            )
        self.__optimizers.attach(self)
        self.__optimizers.refuse_foreign(self)
        begin, name, base = perf_counter(), type(self).__name__, signature[:-1]
        is_new = False

        def traced_for(dynamic: Dims | None) -> Trace:
            return trace(self, call, tensors, self.__optimizers, dynamic)

        def compiled(dynamic: Dims | None) -> CompiledStep:
            nonlocal is_new
            traced = traced_for(dynamic)
            self.__values.add(traced.reads)
            key = base, dynamic, None if dynamic else tuple(tensor.shape for tensor in call.inputs)
            alike, program = [one for one in self.__steps.all() if one.key == key], traced.program()
            equal: CompiledStep | None = self.__values.equal_step(alike, program, lambda: traced_for(dynamic).program())
            if equal is not None:
                return equal
            is_new = True
            inductor = self.__inductor if dynamic is None or dynamic <= call.dynamic_dims else None
            captures = self.__captures and dynamic is None
            step = compile_step(
                self, traced, self.__optimizers, self.__end, tensors, inductor, captures, self.__rank_state
            )
            return replace(step, key=key, program=program)

        step = self.__steps.make(name, signature, call, static_only, compiled)
        if step.trained and not self.__has_met:
            self.__has_met = True
            self.__optimizers.meet_dense(name, [embedding for embedding, _ in step.trained])
        is_dynamic, compiles = step.guard is not None, step.module.graph.find_nodes(op="call_module")
        if self.__inductor is not None and is_dynamic and not compiles and not self.__has_warned:
            self.__has_warned = True
            log.warning(
                "%s: compile_dense compiles ops of static shapes, and the dynamic-shape step of further sizes runs "
                "without it: pad inputs to few sizes, such as powers of two",
                name,
            )
        if is_new:
            dense = "off" if self.__inductor is None else str(self.__inductor)
            settings = {"cuda_graph": str(self.__captures), "compile_dense": dense}
            texts = self.__values.texts()
            why = guard_facts(self, call, is_dynamic, self.__optimizers, self.__end, settings, texts)
            self.__compiles.add(name, why, perf_counter() - begin)
        self.__steps.evict_oldest(name)
        if self.__values.is_full:
            self.__structure = None
        return step

    def __repr__(self) -> str:
        """The modules; after the first call, the code of every compiled step too."""
        modules = super().__repr__()
        compiled = self.__steps.all()
        if not compiled:
            return f"{modules}\n# not compiled yet: the first call compiles it"
        steps = (f"# compiled step {i}\n{step.code()}" for i, step in enumerate(compiled))
        return "\n\n".join([modules, *steps])
