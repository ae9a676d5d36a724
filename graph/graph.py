"""`Graph`, the class that users subclass to write a step.

A call looks up a compiled step by the call's signature. A new signature is traced (trace/) and compiled (run/). The
step then runs on the call's tensors. Traced Python values are compared again before each call (`ValueGuards`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
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

from ..embedding.optim.ddp_guard import check_not_in_ddp
from ..embedding.state_dict.saved_rows import EXTRA_STATE_KEY, are_rows_excluded, exclude_rows
from ..engine.checks import as_int, check_flags, validate_arguments
from ..engine.errors import GraphError, InputError, OptimizerError, OptionError, undo_on_error
from ..engine.optim.base import check_positive
from ..engine.signals import defer_signals
from ..engine.table.background_save import SaveHandle
from ..snapshots.store.selection import Selection
from .passes.lookups import KnownLookups
from .passes.step_epilogue import StepEpilogue
from .run.compiled_step import CompiledStep, Forward, compile_step
from .run.loop import Run, RunProgress, forget_announced, get_iterator
from .run.rank_step import RankStepState, raise_on_ranks
from .run.rollback import DynamicStepError
from .run.step_cache import StepCache
from .show.listing import draw
from .show.profile import Profile, Timer, profile
from .show.recompile_log import RecompileLog, collect_facts
from .state import checkpoint, extra_state
from .state.extra_state import make_training_state
from .state.optimizer_set import OptimizerSet
from .state.publishing import PublishingModel
from .trace.names import HasBuild, as_path
from .trace.signature import (
    NO_DYNAMIC_LEAVES,
    Arguments,
    Call,
    Dims,
    Structure,
    find_dynamic_leaves,
    has_keyed_containers,
    make_call_key,
    make_tensors_spec,
    split_by_key,
)
from .trace.swap import trace_lock
from .trace.trace import trace
from .trace.values import ValueGuards

MAX_CACHED_STEPS = 64
_TENSOR_TYPES = {Tensor}
log = logging.getLogger("tierbed")


class Graph(PublishingModel, HasBuild):
    """A training or evaluation step that is traced once per input signature and then runs without autograd.

    Subclass `Graph` like an `nn.Module`: create modules and call `add_optimizer` in `__init__`, and write the step
    in `build`. `build` computes a loss, calls `loss.backward()` and finds its modules and parameters in `self`.

    Calling the graph runs one step: forward, backward, the updates of embedding rows, and `step()` of every
    optimizer. The call returns the result of `build` with tensors detached. After a training step, `grad` is None for
    every parameter that an optimizer holds. The graph trains nothing after `eval()`, or without `backward()` in build.

    `build` is traced on tensors without values, and again for each new call signature. A signature contains:

    - the shapes, strides, dtypes, devices and `requires_grad` of tensors, and the values of other arguments
    - the `training` flags and hooks of modules, the tensors in module attributes, and the optimizers
    - the gradient mode and the autocast mode
    - Python values that `build` reads, such as a dropout's `p` or a global

    docs/graph.md lists the few values that a graph cannot track, and docs/glossary.md explains tierbed's terms.
    Parameters, buffers and closure tensors are read at every call. The 64 most recently used compiled steps are kept.

    Example:

        >>> class Model(tierbed.Graph):
        ...     def __init__(self):
        ...         super().__init__()
        ...         store = tierbed.make_cached_host_mem_store_options(cache_budget_mb=16)
        ...         self.items = tierbed.MultiTableEmbedding("items", 8, torch.float32, torch.int64, None, store)
        ...         self.add_optimizer(torch.optim.Adam(self.parameters()))
        ...     def build(self, ids, labels):
        ...         loss = nn.functional.mse_loss(self.items(ids).sum(-1), labels)
        ...         loss.backward()
        ...         return loss
        >>> loss = Model()(torch.randint(1000, (256,)), torch.rand(256))
    """

    def __init__(self) -> None:
        super().__init__()
        if type(self).forward is not Graph.forward:
            raise GraphError(
                f"{type(self).__name__} defines forward(), and a call would run forward() instead of the compiled "
                "step; rename forward() to build(), and keep only the step in build()"
            )
        self.__optimizers = OptimizerSet()
        self.__epilogue = StepEpilogue()
        self.__inductor: dict[str, Any] | None = None
        self.__uses_cuda_graph = False
        self.__abandoned_runs: list[None] = []  # one item per run that was garbage-collected before it ended
        # names with two underscores do not collide with a subclass's attributes
        self.__steps = StepCache(type(self).__name__, MAX_CACHED_STEPS)
        # the pytree spec and the dynamic leaves of the last call that had containers as arguments
        self.__last_spec_and_leaves: tuple[pytree.TreeSpec, frozenset[int]] = make_tensors_spec(0), NO_DYNAMIC_LEAVES
        self.__splits_by_key = False  # True if build needs a separate tensor for each key of a keyed container
        self.__has_warned_uncompiled = False  # True after the warning that dynamic shapes run uncompiled
        self.__structure: Structure | None = None
        self.__guards = ValueGuards()
        self.__last_signature_and_step: tuple[Hashable, Any] = None, None  # each call checks these first
        self.__has_checked_resumed_rows = False  # True after checking that rows and dense parameters are from one run
        self.__recompile_log = RecompileLog(MAX_CACHED_STEPS)
        self.__profiled_forward: Forward | None = None  # times each op while `profile` runs; otherwise None
        self.__rank_state = RankStepState()

    def add_optimizer(self, optimizer: Optimizer, lr_sch: LRScheduler | None = None) -> None:
        """Add an optimizer that trains dense parameters and embedding rows.

        The rows of an embedding are trained if the optimizer holds the embedding's parameter. Param groups are read
        at every step, so learning rate schedulers work.

        Args:
            optimizer: A torch optimizer over parameters of this graph.
            lr_sch: A scheduler created with `optimizer`, stepped after each step of `optimizer`. Default: None.

        Raises:
            OptimizerError: If `optimizer` is not a torch optimizer, cannot train rows, or shares a parameter with
                another optimizer of this graph. Also if `lr_sch` is not a scheduler of `optimizer`.
        """
        self.__optimizers.add(optimizer, lr_sch)
        with undo_on_error(self.__optimizers.optimizers.pop, optimizer, None):
            self.__optimizers.attach(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the graph, and the optimizer state of its parameters."""
        super()._apply(fn, recurse)
        self.__optimizers.move_state()
        return self

    def clip_grad_norm(self, max_norm: float | None) -> None:
        """Scale all gradients of a step, including row gradients, so that their total L2 norm is at most `max_norm`.

        A row that is looked up several times counts once, with its summed gradient, as in a dense `nn.Embedding`.

        Args:
            max_norm: The largest norm, or None to turn clipping off.
        """
        limit = check_positive("max_norm", max_norm)
        self.__check_cuda_graph("clip_grad_norm", limit is not None)
        self.__epilogue.max_norm = limit

    def clip_grad_value(self, clip_value: float | None) -> None:
        """Clip every gradient element to [-clip_value, clip_value]. A row's gradient is first summed over its lookups.

        Args:
            clip_value: The largest absolute value, or None to turn clipping off.
        """
        self.__epilogue.clip_value = check_positive("clip_value", clip_value)

    def accumulate_grads(self, steps: int, mean: bool = False) -> None:
        """Sum the gradients of `steps` calls before parameters and rows are updated.

        The first `steps - 1` calls leave the rows unchanged. The last call fetches the rows of all calls into the cache
        at once. A row's gradient is first summed within each call, in float32, and then over the calls in order.

        Args:
            steps: The number of calls per update.
            mean: Divide the sums by `steps`. Default: False.

        Raises:
            OptimizerError: If `steps` is not a positive integer, or gradients of earlier calls are not applied yet.
        """
        self.__check_cuda_graph("accumulate_grads", as_int(steps, minimum=2) is not None)
        self.__epilogue.set_accumulation(steps, mean)

    def drop_grads(self) -> None:
        """Drop accumulated gradients that no update has used yet, for example at the end of an epoch."""
        self.__epilogue.clear()

    def set_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Unscale the gradients of every step with `scaler`, and then let `scaler` adapt its scale.

        Scale the loss in `build`: `scaler.scale(loss).backward()`. A non-finite gradient only lowers the scale.

        Args:
            scaler: The gradient scaler, or None to remove it.

        Raises:
            OptimizerError: If `scaler` is neither a `torch.amp.GradScaler` nor None.
        """
        if scaler is not None:
            if not isinstance(scaler, GradScaler):
                raise OptimizerError(f"scaler={type(scaler).__name__}: give a torch.amp.GradScaler")
            self.__check_cuda_graph("set_grad_scaler", scaler.is_enabled())
            device = next((tensor.device for tensor in self.parameters()), "cpu")
            scaler.scale(torch.zeros((), device=device))  # creates the scaler's tensors; a trace cannot create tensors
        self.__epilogue.scaler = scaler

    def compile_dense(self, **options: Any) -> None:
        """Compile the dense part of each step with TorchInductor, which needs a C++ compiler.

        The first call of each shape takes seconds longer. Random draws, in-place ops, row lookups and optimizers are
        not compiled. Results equal eager results up to rounding. If compiling fails, a call raises GraphError.

        Args:
            **options: Options of TorchInductor.
        """
        self.__check_cuda_graph("compile_dense", True)
        self.__inductor = options

    @validate_arguments("enabled")
    def cuda_graph(self, enabled: bool = True) -> None:
        """Capture each training step as a CUDA graph at its fourth call, and replay it from then on.

        Results are bit-identical to uncaptured steps. All embeddings must use a `device_mem` store with a `capacity`
        and be on the same CUDA device as the step. Steps that cannot be captured raise GraphError or OptionError.

        Args:
            enabled: False stops capturing and replaying. Default: True.

        Raises:
            OptionError: If the graph uses `clip_grad_norm`, `accumulate_grads`, `set_grad_scaler` or `compile_dense`.
        """
        epilogue, scaler = self.__epilogue, self.__epilogue.scaler
        self.__check_cuda_graph("clip_grad_norm", epilogue.max_norm is not None, enabled)
        self.__check_cuda_graph("accumulate_grads", epilogue.accumulate_steps > 1, enabled)
        self.__check_cuda_graph("set_grad_scaler", scaler is not None and scaler.is_enabled(), enabled)
        self.__check_cuda_graph("compile_dense", self.__inductor is not None, enabled)
        self.__uses_cuda_graph = enabled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step and return the result of `build`, detached. The graph stays usable after an exception.

        Raises:
            GraphError: If `build` does something that a static graph cannot express.
            OptimizerError: If backward() reaches a parameter that no optimizer holds.
            Exception: Any error that `build`, an op or a store raises.
        """
        if DistributedDataParallel._active_ddp_module is not None:
            check_not_in_ddp(self)
        try:
            step, tensors = self.__find_step(args, kwargs)
        except Exception as error:
            raise_on_ranks(self, error)
            raise
        try:
            return step.run(tensors, self.__profiled_forward)
        except DynamicStepError as failure:
            shared_error = failure.shared_error
            cause = failure.cause.with_traceback(None)  # its frames would keep the failed step's results alive
        if shared_error is not None:  # the other ranks raise this error and do not retry
            self.__steps.drop(step, cause)
            raise shared_error
        static_step, tensors = self.__find_step(args, kwargs, needs_static=True)
        result = static_step.run(tensors, self.__profiled_forward)  # if this raises, dynamic sizes are not to blame
        self.__steps.drop(step, cause)
        return result

    @validate_arguments("progress", "uneven")
    def run(
        self, batches: Iterable[Any], *, ahead: int | None = None, progress: bool | str = False, uneven: str = "stop"
    ) -> Run:
        """Run a step on each batch: `for loss in graph.run(loader)`.

        The returned iterator yields the result of `build` for each batch. A plain loop that calls `graph(*batch)`
        gives the same results. While a step runs, the run draws up to `ahead` later batches. It deduplicates their ids
        and fetches their rows into the cache. The cache keeps these rows until their step, and evicts other rows.

        Args:
            batches: A DataLoader or iterable. A batch is a list or tuple of `build`'s arguments, or its only argument.
            ahead: How many batches to draw ahead, 0 to 31. Default: 8 on a GPU or with several ranks. A single CPU
                process starts with 0. While an SSD store's caches miss rows, it uses 8, 15 or 31: the number with which
                they miss the fewest. The next run starts with the last run's choice.
            progress: True shows a progress bar with the rate; a string labels the bar. Default: False.
            uneven: If the ranks' loaders differ in length, "stop" ends all ranks' runs with the shortest loader. With
                "join", a rank without a batch joins the steps of the other ranks. Default: "stop".

        Raises:
            InputError: If an argument is wrong.
        """
        label = progress if isinstance(progress, str) else type(self).__name__ * bool(progress)
        bar, epilogue = RunProgress(batches, label), self.__epilogue
        return Run(
            self, self.__rank_state, epilogue, batches, ahead, uneven, self.__find_lookups, bar, self.__abandoned_runs
        )

    def profile(self, batches: Iterable[Any], steps: int | None = None, *, ahead: int | None = None) -> Profile:
        """Run a step on each batch and report where the time went.

        The results are bit-identical to `run(batches, ahead=ahead)`, and the same errors are raised.

        Args:
            batches, ahead: As for `run`.
            steps: Run at most this many batches. Default: all batches.

        Returns:
            A `Profile`. `print` shows time by stage; `by_op()` and `chrome_trace(path)` show each op.

        Raises:
            InputError: If `steps` is not a positive integer.
        """
        if steps is not None and as_int(steps, 1, sys.maxsize) is None:
            raise InputError(f"steps={steps!r}: give a whole number > 0, or None for all batches")
        timer = Timer(self.__recompile_log)
        self.__profiled_forward = timer.forward
        try:
            limited_batches = islice(get_iterator(batches), steps)
            run, can_compile = partial(self.run, ahead=ahead), self.__inductor is None and not self.__uses_cuda_graph
            return profile(type(self).__name__, run, limited_batches, timer, can_compile)
        finally:
            self.__profiled_forward = None

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        kind: str | None = None,
        background: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Write a checkpoint: a folder with `state_dict()` and the rows of all embeddings.

        The checkpoint is durable when the call returns. An embedding with a persistent_path also gets a snapshot in
        its store folder; both share files if the file system can. A failed save changes no files.

        Args:
            path: The new folder.
            overwrite: Atomically replace an existing checkpoint, once the new checkpoint is durable. Default: False.
            kind: How to save rows. "full" writes every row. "checkpoint" hard-links the RocksDB files of `cached_ssd`
                stores. Default: None for "checkpoint" where possible, and otherwise "full".
            background: Copy everything except rows, and return. A thread writes the rows as they are now, all of them,
                while training continues. The folder gets its name once it is durable. Default: False.
            extra: A dict of other plain values and tensors, such as the loader's position. `load` returns it.

        Returns:
            A `SaveHandle` for a save in the background: its `wait()` returns once the checkpoint is durable, or raises
            the save's error. Otherwise None.

        Raises:
            SnapshotError: If `path` exists or cannot be written.
            GraphError: If a checkpoint cannot hold the state or `extra`.
            InputError: If `path` is not a path, or another argument is of the wrong type.
            OptionError: If `kind` is unknown or does not fit `background`, or a store has no RocksDB files to link.
            StoreError: If another save is running, or rows cannot be read.
        """
        folder = checkpoint.parse_new_folder(self, path, overwrite, kind, background, extra)
        extra_state.check_nothing_accumulated(self.__epilogue)
        with exclude_rows():
            state = self.state_dict()
        return checkpoint.save(self, state, folder, overwrite, kind, extra=extra, background=background)

    def check_save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Raise the errors that `save(path, overwrite=overwrite)` would raise now. Useful before long training."""
        checkpoint.parse_new_folder(self, path, overwrite)

    def load(self, path: str | os.PathLike[str], *, optimizers: bool = True, convert: bool = False) -> dict[str, Any]:
        """Continue training from a checkpoint of `save`.

        The next steps are the same as if training had never stopped. Everything is checked before anything is replaced.
        With `optimizers=False` or `convert=True`, recovery after a kill still uses the snapshot from before the load.

        Args:
            path: The checkpoint's folder.
            optimizers: False loads only parameters, buffers and row weights, for a graph with other optimizers or
                none. Default: True.
            convert: True converts saved rows to the embeddings' dtype and state_dtype. A wider dtype is exact; a
                narrower dtype rounds to nearest even. Default: False.

        Returns:
            The dict that was saved as `extra`. Its tensors are on the CPU.

        Raises:
            SnapshotError: If the checkpoint is missing, damaged, or belongs to another graph.
            InputError: If `path` is not a path, or a saved number does not fit the narrower dtype.
        """
        check_flags(InputError, optimizers=optimizers, convert=convert)

        def check_state(state: dict[str, Any]) -> None:
            extra_state.check_modules(self, state, "graph")
            if EXTRA_STATE_KEY in state and optimizers:
                extra_state.check_extra_state(
                    make_training_state(self.__optimizers, self.__epilogue), state[EXTRA_STATE_KEY]
                )

        def apply_state(state: dict[str, Any]) -> None:
            self.load_state_dict(extra_state.drop_row_state(self, state, optimizers))

        with exclude_rows():
            selection = Selection(includes_state=optimizers, converts=convert)
            return checkpoint.load(self, as_path(path), check_state, apply_state, self.state_dict, selection)

    def get_extra_state(self) -> Any:
        """Return the extra state in `state_dict()`: optimizers, schedules, scaler and the random states of all ranks.

        The result is a tuple of one dict, because torch.distributed.checkpoint does not split tuples.
        """
        state = make_training_state(self.__optimizers, self.__epilogue).state_dict()
        if are_rows_excluded():
            return state
        extra_state.check_nothing_accumulated(self.__epilogue)
        return (extra_state.add_rank_states(self, state),)

    def set_extra_state(self, state: Any) -> None:
        """Load the extra state of `load_state_dict()`: a dict, or a tuple of one dict."""
        extra_state.load_extra_state(self, self.__optimizers, self.__epilogue, state)
        self.__rank_state.update_error = ""

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the step of the last call as a flowchart: stages, ops, shapes, and the store of each lookup.

        Args:
            path: The file, in Mermaid format. GitHub, GitLab, editors and mermaid.live render it.

        Raises:
            GraphError: If the graph has not been called yet.
            InputError: If `path` is not a path.
        """
        _, step = self.__last_signature_and_step
        if step is None:
            raise GraphError(f"{type(self).__name__} has no step to draw yet; call it once to compile one")
        as_path(path).write_text(draw(step.module, type(self).__name__, ahead=step.id_graph is not None))

    def why_recompiled(self) -> list[str]:
        """Return why the latest 64 steps were compiled: how each step differs from the most similar earlier step.

        The list omits the first step. The logger "tierbed" logs the same texts at level INFO.
        """
        return list(self.__recompile_log.reasons)

    def __check_cuda_graph(self, method: str, is_used: bool, enabled: bool | None = None) -> None:
        """Raise OptionError if `method` is used with `cuda_graph`. enabled: None for the graph's setting."""
        if is_used and (self.__uses_cuda_graph if enabled is None else enabled):
            raise OptionError(
                f"cuda_graph and {method}: a step with {method} cannot be captured; call cuda_graph(False), "
                f"or leave out {method} (clip_grad_value works with cuda_graph)"
            )

    def __find_lookups(self, *args: Any) -> KnownLookups | None:
        try:
            step, tensors = self.__find_step(args, {})
        except Exception:  # the step itself raises this error later
            return None
        return step.find_known_lookups(tensors)

    def __find_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], needs_static: bool = False
    ) -> tuple[CompiledStep, list[Tensor]]:
        """Return the compiled step for a call, and its input tensors. needs_static: True for a static-shape step."""
        if self.__abandoned_runs:
            self.__abandoned_runs.clear()
            forget_announced(self)
        arguments = split_by_key((args, kwargs)) if self.__splits_by_key else (args, kwargs)
        args, kwargs = arguments
        dynamic_leaves = NO_DYNAMIC_LEAVES
        if not kwargs and set(map(type, args)) <= _TENSOR_TYPES:
            inputs = leaves = list(args)
            spec = make_tensors_spec(len(args))
        else:
            leaves, spec = pytree.tree_flatten(arguments)
            inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            tree = self.__last_spec_and_leaves  # read once: another thread's call may set the attribute
            if spec != tree[0]:
                tree = self.__last_spec_and_leaves = spec, find_dynamic_leaves(spec)
            spec, dynamic_leaves = tree
        signature, tensors = self.__make_signature(arguments, leaves, spec, dynamic_leaves)
        last_signature, step = self.__last_signature_and_step
        if signature != last_signature or needs_static or (dynamic_leaves and not step.can_run(inputs)):
            call = Call(arguments, leaves, spec, dynamic_leaves)
            with trace_lock, defer_signals():  # Ctrl-C in the middle of a trace would abort inside torch
                self.__optimizers.add_in_backward_optimizers(self)
                # compute the signature again: another thread may have traced meanwhile
                signature, tensors = self.__make_signature(arguments, leaves, spec, dynamic_leaves)
                try:
                    step = self.__find_or_compile(signature, call, tensors, needs_static)
                except GraphError:
                    if self.__splits_by_key or not has_keyed_containers(arguments):
                        raise
                    self.__splits_by_key = True
                    try:
                        return self.__find_step(args, kwargs, needs_static)
                    except BaseException:
                        self.__splits_by_key = False
                        raise
            needs_guard = bool(dynamic_leaves) and step.guard is None  # the signature lacks the dynamic sizes
            self.__last_signature_and_step = None if needs_guard else signature, step
        return step, inputs + tensors

    def __make_signature(
        self, arguments: Arguments, leaves: list[Any], spec: pytree.TreeSpec, dynamic_leaves: frozenset[int]
    ) -> tuple[Hashable, list[Tensor]]:
        while self.__structure is None or (module_state := self.__structure.read_state()) is None:
            self.__structure = Structure(self, self.__optimizers.optimizers)
            self.__guards = ValueGuards()
            # old steps can no longer run, and would keep replaced modules alive
            self.__steps = StepCache(type(self).__name__, MAX_CACHED_STEPS)
        tensors, state = module_state
        return (
            spec,
            make_call_key(leaves, dynamic_leaves, self.build, arguments),
            state,
            self.__epilogue.make_settings_key(),
            repr(self.__inductor),
            self.__uses_cuda_graph,
            self.__guards.version if self.__guards.is_current() else self.__guards.find_version(),
        ), tensors

    def __find_or_compile(self, signature: Any, call: Call, tensors: list[Tensor], needs_static: bool) -> CompiledStep:
        step = self.__steps.find(signature, call, needs_static)
        if step is not None:
            return step
        if detect_fake_mode(tensors):
            raise GraphError(
                f"build calls the graph {type(self).__name__}, and a graph cannot run inside another; call its "
                "build() instead, and add its optimizers to the outer graph"
            )
        self.__optimizers.attach(self)
        self.__optimizers.check_parameters_in_graph(self)
        start_time, name, base_key = perf_counter(), type(self).__name__, signature[:-1]
        is_compiled = False

        def compile_call(dims: Dims | None) -> CompiledStep:
            nonlocal is_compiled
            retrace = partial(trace, self, call, tensors, self.__optimizers, dims)
            new_trace = retrace()
            self.__guards.add(new_trace.reads)
            key = base_key, dims, None if dims else tuple(tensor.shape for tensor in call.inputs)
            candidates = [cached for cached in self.__steps.list_steps() if cached.key == key]
            program_key = new_trace.make_program_key()
            step = self.__guards.find_equal_step(candidates, program_key, lambda: retrace().make_program_key())
            if step is not None:
                return step
            is_compiled = True
            inductor = self.__inductor if dims is None or dims <= call.dynamic_dims else None
            is_captured = self.__uses_cuda_graph and dims is None
            step = compile_step(
                self, new_trace, self.__optimizers, self.__epilogue, tensors, inductor, is_captured, self.__rank_state
            )
            return replace(step, key=key, program_key=program_key)

        step = self.__steps.make(signature, call, needs_static, compile_call)
        if step.trained_rows and not self.__has_checked_resumed_rows:
            self.__has_checked_resumed_rows = True
            self.__optimizers.warn_if_rows_mismatched(name, [embedding for embedding, _ in step.trained_rows])
        is_dynamic, compiled_parts = step.guard is not None, step.module.graph.find_nodes(op="call_module")
        if self.__inductor is not None and is_dynamic and not compiled_parts and not self.__has_warned_uncompiled:
            self.__has_warned_uncompiled = True
            log.warning(
                "%s: compile_dense compiles only static shapes. The dynamic-shape step for further sizes runs "
                "uncompiled. To avoid this step, pad inputs to few sizes, such as powers of two",
                name,
            )
        if is_compiled:
            dense_setting = "off" if self.__inductor is None else str(self.__inductor)
            settings = {"cuda_graph": str(self.__uses_cuda_graph), "compile_dense": dense_setting}
            value_texts = self.__guards.describe_values()
            facts = collect_facts(self, call, is_dynamic, self.__optimizers, self.__epilogue, settings, value_texts)
            self.__recompile_log.add(name, facts, perf_counter() - start_time)
        self.__steps.evict_oldest()
        if self.__guards.is_full:
            self.__structure = None
        return step

    def __repr__(self) -> str:
        """Show the modules and, after the first call, the code of every compiled step."""
        modules = super().__repr__()
        compiled = self.__steps.list_steps()
        if not compiled:
            return f"{modules}\n# not compiled yet: the first call compiles it"
        steps = (f"# compiled step {i}\n{step.format_code()}" for i, step in enumerate(compiled))
        return "\n\n".join([modules, *steps])
