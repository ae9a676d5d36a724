"""`Graph`: the class that a user subclasses."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
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

from ..embedding.ddp_guard import refuse_around
from ..embedding.model_snapshots import ModelSnapshots
from ..embedding.saved_rows import are_apart, rows_apart
from ..engine.checks import as_int
from ..engine.errors import GraphError, InputError, OptimizerError, OptionError
from ..engine.optim.base import positive
from ..engine.signals import uninterrupted
from ..snapshots.store.selection import Selection
from .passes.lookups import KnownLookups
from .passes.step_epilogue import StepEpilogue
from .run.compiled_step import CompiledStep, Forward, compile_step
from .run.loop import AHEAD, Run, RunProgress, forget_announced, iterate, make_run
from .run.rank_step import RankStepState, tell_ranks
from .run.rollback import DynamicStepFailed
from .run.step_cache import StepCache, tell_uncompiled
from .show.listing import draw
from .show.profile import Profile, Timer, profile
from .show.why import RecompileLog, facts
from .state import checkpoint
from .state.extra_state import (
    check_state,
    extra_state,
    load_extra_state,
    of_all_ranks,
    of_this_rank,
    without_rows,
)
from .state.optimizer_set import OptimizerSet
from .trace.built import HasBuild
from .trace.names import path_of
from .trace.signature import NONE_OPEN, Call, Dims, Given, Structure, call_key, open_leaves, tensors_spec
from .trace.swap import trace_lock
from .trace.trace import trace

STEPS = 64
_TENSORS = {Tensor}


class Graph(ModelSnapshots, HasBuild):
    """A training or evaluation step, traced once an input signature and then run without autograd.

    A subclass sets its modules in `__init__`, calls `add_optimizer` there, and defines `build`. `build` computes a
    loss, calls `loss.backward()`, and reaches parameters through `self`. Calling the graph runs one step: forward,
    backward, the update of embedding rows, and `step()` of every optimizer. It returns what `build` returns, tensors
    detached; after a training step `grad` of every parameter that an optimizer holds is None. A graph whose `build`
    never calls `backward()`, or on which `eval()` was called, trains nothing.

    `build` runs again, on tensors without values, when a call has another signature: shapes, strides, dtypes and
    devices of tensors, values of other arguments, `training` flags, `requires_grad`, gradient and autocast mode,
    optimizers, hooks, tensors assigned to attributes. All other Python values are frozen into the step, such as which
    object a global names, or the `p` of a dropout; the values of parameters, buffers and closure tensors are read at
    every call. The 64 steps used last are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        if type(self).forward is not Graph.forward:
            raise GraphError(
                f"{type(self).__name__} defines forward(), which a call would run in place of the compiled step; name "
                "it build(), and do what is not part of the step around the call"
            )
        self.__optimizers = OptimizerSet()
        self.__end = StepEpilogue()
        self.__inductor: dict[str, Any] | None = None
        self.__recorded = False
        self.__left: list[None] = []  # an item for each run that was left before its end
        # two underscores: a subclass may have attributes of any name
        self.__steps = StepCache(STEPS)
        # of the last call with containers
        self.__tree: tuple[pytree.TreeSpec, frozenset[int]] = tensors_spec(0), NONE_OPEN
        self.__told = False  # whether the log said that compile_dense compiles nothing of a step for many sizes
        self.__structure: Structure | None = None
        self.__last: tuple[Hashable, Any] = (None, None)  # key and step of the previous call, found without hashing
        self.__compiles = RecompileLog(STEPS)
        self.__forward: Forward | None = None  # while a profile runs
        self.__together = RankStepState()

    def add_optimizer(self, optimizer: Optimizer, lr_sch: LRScheduler | None = None) -> None:
        """Let an ordinary torch optimizer update the parameters that it holds, and rows by the shadows that it holds.

        Its parameter groups are read at every step, so learning rate schedulers work. `lr_sch`, a scheduler made over
        the optimizer, makes a step after each step of the optimizer. Raises OptimizerError for what is no torch
        optimizer or no scheduler of it, an optimizer that rows cannot follow, and a parameter that another optimizer of
        this graph holds.
        """
        self.__optimizers.add(optimizer, lr_sch)
        try:
            self.__optimizers.attach(self)
        except BaseException:
            self.__optimizers.discard(optimizer)
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the graph, and with it what its optimizers keep of its parameters."""
        super()._apply(fn, recurse)
        self.__optimizers.follow_parameters()
        return self

    def clip_grad_norm(self, max_norm: float | None) -> None:
        """Scale all gradients of a step, of rows too, so that their L2 norm together is at most `max_norm`.

        A row counts once, with the sum of the gradients of its occurrences, as in a dense `nn.Embedding`. None: off.
        """
        wanted = positive("max_norm", max_norm)
        self.__refuse_recorded("clip_grad_norm", wanted is not None)
        self.__end.max_norm = wanted

    def clip_grad_value(self, clip_value: float | None) -> None:
        """Clip each element of all gradients, of rows summed over their occurrences, to [-clip_value, clip_value]."""
        self.__end.clip_value = positive("clip_value", clip_value)

    def accumulate_grads(self, steps: int, mean: bool = False) -> None:
        """Sum the gradients of so many calls before parameters and rows move; with `mean`, take their mean.

        Calls before the last read rows as they are. The rows of all calls are brought up and pinned at the last. Of a
        row the gradients of a call are summed first, in float32, then those of the calls in their order.
        """
        self.__refuse_recorded("accumulate_grads", steps != 1)
        self.__end.accumulate(steps, mean)

    def drop_grads(self) -> None:
        """Forget the gradients of accumulated calls that wait for their update, as those of an epoch's remainder."""
        self.__end.clear()

    def set_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Divide gradients by the scale of `scaler`, by which `build` multiplies: `scaler.scale(loss).backward()`.

        A step with a gradient that is not finite moves no row and no parameter, and lowers the scale. None: no scaler.
        """
        if scaler is None:
            self.__end.scaler = None
            return
        if not isinstance(scaler, GradScaler):
            raise OptimizerError(f"scaler={type(scaler).__name__}: give a torch.amp.GradScaler")
        self.__refuse_recorded("set_grad_scaler", scaler.is_enabled())
        device = next((tensor.device for tensor in self.parameters()), "cpu")
        scaler.scale(torch.zeros((), device=device))  # makes the tensors of the scaler, which a trace could not make
        self.__end.scaler = scaler

    def compile_dense(self, **options: Any) -> None:
        """Let TorchInductor compile the dense part of each step, with these options of TorchInductor.

        The first call of each shape takes seconds longer. Needs a C++ compiler. Random draws, in-place ops, rows and
        optimizers run as before; results equal those of eager to rounding. GraphError where it cannot compile.
        """
        self.__refuse_recorded("compile_dense", True)
        self.__inductor = options

    def cuda_graph(self, enabled: bool = True) -> None:
        """Record each training step as a CUDA graph after its first 3 calls, and replay the graph from then on.

        Results have the bits of plain steps. Embeddings are in `device_mem` with a capacity, on a CUDA device like all
        else that the step computes with; docs/graph.md has the details. False: record and replay no more. A call raises
        GraphError or OptionError for what cannot be recorded. Raises OptionError together with `clip_grad_norm`,
        `accumulate_grads`, `set_grad_scaler` and `compile_dense`.
        """
        if not isinstance(enabled, bool):
            raise OptionError(f"enabled={enabled!r}: give True or False")
        self.__recorded = enabled
        try:
            self.__refuse_recorded("clip_grad_norm", self.__end.max_norm is not None)
            self.__refuse_recorded("accumulate_grads", self.__end.every > 1)
            self.__refuse_recorded("set_grad_scaler", self.__end.scaler is not None and self.__end.scaler.is_enabled())
            self.__refuse_recorded("compile_dense", self.__inductor is not None)
        except OptionError:
            self.__recorded = False
            raise

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
            tell_ranks(self, error)
            raise
        try:
            return step.run(tensors, self.__forward)
        except DynamicStepFailed as failed:
            cause, told = failed.__cause__, failed.told
            assert cause is not None
            cause.__traceback__ = None  # the frames hold all that the failed step had computed
        if told is not None:  # the other ranks raise, and do not run again
            self.__steps.drop(type(self).__name__, step, cause)
            raise told
        own, tensors = self.__compiled(args, kwargs, alone=True)
        result = own.run(tensors, self.__forward)  # if this raises as well, the step for many sizes is not at fault
        self.__steps.drop(type(self).__name__, step, cause)
        return result

    def run(
        self, batches: Iterable[Any], *, ahead: int = AHEAD, progress: bool | str = False, uneven: str = "stop"
    ) -> Run:
        """Run a step on each batch, and iterate over what `build` returns: `for loss in graph.run(loader)`.

        A batch that is a list or a tuple gives the arguments of `build`; any other batch is its one argument. While a
        step runs, up to `ahead` batches (0 to 31) are drawn, their ids deduplicated, and their rows brought up and
        pinned in the cache. The cache learns from these batches what to keep. Results are those of
        `for batch in loader: graph(*batch)`.
        progress: whether to show a bar with the rate; a string is its label. InputError for wrong arguments.
        uneven: with ranks, whether all "stop" with the shortest loader, or ranks without a batch "join" the others.
        """
        label = progress if isinstance(progress, str) else type(self).__name__ * bool(progress)
        bar = RunProgress(batches, label)
        return make_run(self, self.__together, self.__end, batches, ahead, self.__coming, bar, self.__left, uneven)

    def profile(self, batches: Iterable[Any], steps: int | None = None, *, ahead: int = AHEAD) -> Profile:
        """Run a step on each batch, or on the first `steps`, and tell where the time went.

        The steps are those of `run(batches, ahead=ahead)` and train to the same bits. `print` shows time
        by stage; `by_op()` and `chrome_trace(path)` have each op. Raises what `run` raises.
        """
        if steps is not None and as_int(steps, least=1) is None:
            raise InputError(f"steps={steps!r}: give a whole number > 0, or None for all batches")
        timer = Timer()
        self.__forward = timer.forward
        try:
            some = islice(iterate(batches), steps)
            run, may_compile = partial(self.run, ahead=ahead), self.__inductor is None and not self.__recorded
            return profile(type(self).__name__, run, some, timer, self.__compiles, may_compile)
        finally:
            self.__forward = None

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a checkpoint, the folder `path`: `state_dict()` and all rows. Once this returns, it survives anything.

        Embeddings with a persistent_path get a snapshot of that name there too. The checkpoint shares its files where
        the file system allows it. overwrite: whether to replace a checkpoint that is there, at one instant when the new
        one is durable. A save that fails leaves nothing of its own, and the old checkpoint. Raises SnapshotError where
        `path` exists or cannot be written, GraphError for a state that a checkpoint cannot hold, InputError for what is
        no path.
        """
        place = checkpoint.check_save(self, path, overwrite)
        with rows_apart():
            state = self.state_dict()
        checkpoint.save(self, state, place, overwrite)

    def check_save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Raise what `save` would raise now for these arguments. Call it before the training that is to be saved."""
        checkpoint.check_save(self, path, overwrite)

    def load(self, path: str | os.PathLike[str], *, optimizers: bool = True, convert: bool = False) -> None:
        """Go on from a checkpoint: the next steps are those of a run that never stopped.

        optimizers: False takes parameters, buffers and the weights of rows alone, for a graph with other optimizers or
        none. convert: True converts rows of embeddings with another dtype or state_dtype: widening is exact, narrowing
        rounds to nearest even. In both cases rows go back, after a kill, to the snapshot that they went back to before.
        Raises SnapshotError for a checkpoint that is missing, damaged or of another graph, before anything is replaced,
        and InputError for what is no path, or a number that a narrower dtype cannot hold.
        """
        for argument, value in (("optimizers", optimizers), ("convert", convert)):
            if not isinstance(value, bool):
                raise InputError(f"{argument}={value!r}: give True or False")
        check = partial(check_state, self, self.__optimizers, self.__end, with_optimizers=optimizers)

        def put(state: dict[str, Any]) -> None:
            self.load_state_dict(without_rows(self, state, optimizers))

        with rows_apart():
            checkpoint.load(self, path_of(path), check, put, Selection(state=optimizers, convert=convert))

    def get_extra_state(self) -> Any:
        """The extra state in `state_dict()`: optimizers, schedules, scaler and random numbers, those of all ranks.

        A tuple of one map, which torch.distributed.checkpoint keeps whole.
        """
        state = extra_state(self.__optimizers, self.__end)
        return state if are_apart() else (of_all_ranks(self, state),)

    def set_extra_state(self, state: Any) -> None:
        """Load the extra state of `load_state_dict()`, a tuple of a map, or the map."""
        (held,) = state if isinstance(state, tuple) else (state,)
        load_extra_state(self, self.__optimizers, self.__end, of_this_rank(self, held))
        self.__together.torn = ""

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

        The logger "tierbed" says the same at level INFO.
        """
        return list(self.__compiles.reasons)

    def __refuse_recorded(self, method: str, asked: bool) -> None:
        """OptionError for `method` together with `cuda_graph`."""
        if self.__recorded and asked:
            raise OptionError(
                f"cuda_graph and {method}: a step with {method} cannot be recorded; leave out one of them: "
                f"cuda_graph(False), or no call of {method} (clip_grad_value goes with both)"
            )

    def __coming(self, *args: Any) -> KnownLookups | None:
        """What a coming call with these arguments looks up, as far as it is known."""
        try:
            step, tensors = self.__compiled(args, {})
        except Exception:  # the call itself will raise it
            return None
        return step.coming(tensors)

    def __compiled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool = False
    ) -> tuple[CompiledStep, list[Tensor]]:
        """The step of a call, and the tensors that it runs on. alone: whether to take a step for these sizes alone."""
        if self.__left:
            self.__left.clear()
            forget_announced(self)
        given = args, kwargs
        opened = NONE_OPEN
        if not kwargs and set(map(type, args)) <= _TENSORS:
            inputs = leaves = list(args)
            spec = tensors_spec(len(args))
        else:
            leaves, spec = pytree.tree_flatten(given)
            inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            tree = self.__tree  # read once: a call in another thread may set it
            if spec != tree[0]:
                tree = self.__tree = spec, open_leaves(spec)
            spec, opened = tree
        signature, tensors = self.__signature(given, leaves, spec, opened)
        known, step = self.__last
        if signature != known or alone or (opened and not step.serves(inputs)):
            call = Call(given, leaves, spec, opened)
            with trace_lock, uninterrupted():  # Ctrl-C in the middle of a trace aborts in torch
                # anew: a trace in another thread may have been under way
                signature, tensors = self.__signature(given, leaves, spec, opened)
                step = self.__step_for(signature, call, tensors, alone)
            own = bool(opened) and step.fits is None  # its sizes are not in the signature
            self.__last = None if own else signature, step
        return step, inputs + tensors

    def __signature(
        self, given: Given, leaves: list[Any], spec: pytree.TreeSpec, opened: frozenset[int]
    ) -> tuple[Hashable, list[Tensor]]:
        while self.__structure is None or (live := self.__structure.live()) is None:
            self.__structure = Structure(self)
            self.__steps.clear()  # no old step can fit again, and they would keep replaced modules alive
        tensors, state = live
        return (
            spec,
            call_key(leaves, opened, self.build, given),
            state,
            self.__optimizers.key(),
            self.__end.key(),
            repr(self.__inductor),
            self.__recorded,
        ), tensors

    def __step_for(self, signature: Hashable, call: Call, tensors: list[Tensor], alone: bool) -> CompiledStep:
        step = self.__steps.find(signature, call, alone)
        if step is not None:
            return step
        if detect_fake_mode(tensors):
            raise GraphError(
                f"build calls the graph {type(self).__name__}, and a graph cannot run inside another; call its "
                "build(), and add its optimizers to the outer graph"
            )
        self.__optimizers.attach(self)
        self.__optimizers.refuse_foreign(self)
        begin, name = perf_counter(), type(self).__name__

        def compiled(changing: Dims | None) -> CompiledStep:
            traced = trace(self, call, tensors, self.__optimizers, changing)
            inductor = self.__inductor if changing is None or changing <= call.open else None
            recorded = self.__recorded and changing is None
            return compile_step(
                self, traced, self.__optimizers, self.__end, tensors, inductor, recorded, self.__together
            )

        step = self.__steps.make(name, signature, call, alone, compiled)
        many = step.fits is not None
        if self.__inductor is not None and many and not step.compiles_dense and not self.__told:
            self.__told = True
            tell_uncompiled(name)
        why = facts(
            self, call, call.open if many else Dims(), self.__optimizers, self.__end, self.__inductor, self.__recorded
        )
        self.__compiles.add(name, why, perf_counter() - begin)
        self.__steps.bound(name)
        return step

    def __repr__(self) -> str:
        """The modules; after the first call, the code of every compiled step too."""
        modules = super().__repr__()
        compiled = self.__steps.all()
        if not compiled:
            return f"{modules}\n# not compiled yet: the first call compiles it"
        steps = (f"# compiled step {i}\n{step.code()}" for i, step in enumerate(compiled))
        return "\n\n".join([modules, *steps])
