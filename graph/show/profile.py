"""`Graph.profile`: steps of a run with a clock after each op, as tables and as a Chrome trace.

A profiled step is the compiled step with a clock read after each op, so it computes the same. The profile also reports
how long threads of this process waited for a core, and the remedy if idle threads occupy the cores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ...engine.checks import as_int
from ...engine.errors import InputError
from ..trace.names import path_of
from .listing import STAGES, describe, stages
from .why import RecompileLog

_WAITING_SHARE = 0.1  # of the elapsed time; there is advice above it
_CLOCK = "_clock"
_AROUND = "Python around"
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward"}
_FUSED_SHARE = 0.25  # of a step, of the time of ops that fuse; there is advice above it


def _waiting_advice(waited: float, elapsed: float) -> str:
    """A line of advice if spinning threads of torch may occupy the cores, else an empty string.

    waited: the seconds that all threads waited for a core, 0 on systems that do not count it, which are all but Linux.
    """
    spin = torch.get_num_threads() > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
    if not spin or waited <= _WAITING_SHARE * elapsed:
        return ""
    return (
        f"threads waited {waited:.2f} s for a core, and threads of torch occupy cores while idle: "
        "start the process with OMP_WAIT_POLICY=PASSIVE"
    )


def _waited() -> dict[str, int]:
    """By thread of this process, the nanoseconds for which it was ready to run and had no core."""
    waited = {}
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError, IndexError):  # the thread has ended, or this system does not count it
            waited[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return waited


class Op(NamedTuple):
    """A node of a compiled step: its name in `print(graph)`, its stage, and what it returns.

    fuses: whether TorchInductor would fuse it with its neighbours.
    """

    name: str
    stage: str
    makes: str
    fuses: bool


class Span(NamedTuple):
    """A stretch of time, in nanoseconds of one clock."""

    begin: int
    end: int


class Step(NamedTuple):
    """One step of a profile: its whole time, and the known parts of it."""

    span: Span
    loader: list[Span]
    compiling: int  # ns of compiling
    ops: list[tuple[Op, Span]]


class Timer:
    """Runs compiled steps and records the time of each op. On a GPU it waits for each op to end."""

    def __init__(self, compiles: RecompileLog) -> None:
        self._compiles = compiles
        self._timed: dict[fx.GraphModule, tuple[fx.GraphModule, list[int], list[Op]]] = {}
        self._ran: list[tuple[Op, Span]] = []
        self._preparing = 0  # ns of adding the clock

    def forward(self, module: fx.GraphModule, tensors: list[Tensor]) -> Any:
        """The result of `module.forward(*tensors)`, with a clock after each op."""
        if module not in self._timed:
            begin = perf_counter_ns()
            self._timed[module] = _with_clock(module)
            self._preparing += perf_counter_ns() - begin
        timed, clock, ops = self._timed[module]
        clock.clear()
        outputs = timed.forward(*tensors)
        self._ran += zip(ops, map(Span, clock, clock[1:]), strict=True)
        return outputs

    def compiling(self) -> int:
        """The ns of all compiles of the graph, and of adding the clock."""
        return int(self._compiles.seconds * 1e9) + self._preparing

    def take(self) -> list[tuple[Op, Span]]:
        """The ops that ran since the last `take`, with their times."""
        ran, self._ran = self._ran, []
        return ran


class Profile:
    """Where the time of steps went. `print(profile)` shows it by stage, `print(profile.by_op())` by op.

    steps: the number of steps. stages: the seconds of each stage, of all steps. `Python around` is the rest of the
    steps: the check of the signature, the arguments, the window of batches. compile_seconds: the seconds of compiling
    and of adding the clock, which are not part of the stages.
    """

    def __init__(self, name: str, steps: list[Step], advice: str, may_compile: bool) -> None:
        self._name, self._steps, self._advice, self._may_compile = name, steps, advice, may_compile
        self.steps = len(steps)
        self.compile_seconds = sum(step.compiling for step in steps) / 1e9
        spent: dict[str, int] = dict.fromkeys(["loader", *STAGES, _AROUND], 0)
        for step in steps:
            spans = [("loader", span) for span in step.loader] + [(op.stage, span) for op, span in step.ops]
            for stage, (begin, end) in spans:
                spent[stage] += end - begin
            spent[_AROUND] += step.span.end - step.span.begin - step.compiling - sum(e - b for _, (b, e) in spans)
        self.stages = {stage: ns / 1e9 for stage, ns in spent.items() if ns}

    def __str__(self) -> str:
        """A table with the total, the mean of a step and the share of each stage.

        Lines below it say whether to try `compile_dense`, and whether threads waited for a core.
        """
        seconds = sum(self.stages.values())
        rows = [*self.stages.items(), ("step", seconds)]
        lines = [f"{self._name}: {self.steps} steps", f"{'':14}{'total ms':>11}{'mean ms':>11}{'share':>8}"]
        for name, spent in rows:
            lines.append(f"{name:14}{self._figures(spent, seconds)}")
        if self.compile_seconds:
            lines.append(f"and {self.compile_seconds:.2f} s to compile and to add the clock, not counted above")
        return "\n".join([*lines, *filter(None, [self._compile_advice(seconds), self._advice])])

    def by_op(self, most: int = 20) -> str:
        """A table of the `most` ops that took longest, each by its name in `print(graph)`. InputError for most < 1."""
        if as_int(most, minimum=1) is None:
            raise InputError(f"most={most!r}: give a whole number of ops > 0")
        spent: dict[Op, int] = {}
        for step in self._steps:
            for op, (begin, end) in step.ops:
                spent[op] = spent.get(op, 0) + end - begin
        seconds = sum(self.stages.values())
        longest = sorted(spent.items(), key=lambda item: -item[1])[:most]
        width = max((len(op.name) for op in spent), default=0) + 2
        lines = [f"{'':{width}}{'stage':12}{'total ms':>11}{'mean ms':>11}{'share':>8}"]
        for op, ns in longest:
            lines.append(f"{op.name:{width}}{op.stage:12}{self._figures(ns / 1e9, seconds)}  {op.makes}".rstrip())
        return "\n".join(lines)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the steps for chrome://tracing or ui.perfetto.dev: JSON, one event an op and step. InputError."""
        start = self._steps[0].span.begin if self._steps else 0
        track = {"pid": 0, "tid": 0}
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": self._name}, **track}]

        def add(name: str, category: str, span: Span, **arguments: Any) -> None:
            times = {"ts": (span.begin - start) / 1e3, "dur": (span.end - span.begin) / 1e3}  # microseconds
            events.append({"ph": "X", "name": name, "cat": category, **times, "args": arguments, **track})

        for number, step in enumerate(self._steps):
            add(f"step {number}", "step", step.span)
            for span in step.loader:
                add("loader", "loader", span, step=number)
            for op, span in step.ops:
                add(op.name, op.stage, span, step=number, makes=op.makes)
        path_of(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _compile_advice(self, seconds: float) -> str:
        fused = sum(span.end - span.begin for step in self._steps for op, span in step.ops if op.fuses) / 1e9
        if not self._may_compile or fused <= _FUSED_SHARE * seconds:
            return ""
        return (
            f"{fused / seconds:.0%} went to ops of the dense part that TorchInductor can fuse: try compile_dense(); "
            "the first call of each shape takes seconds longer then"
        )

    def _figures(self, spent: float, seconds: float) -> str:
        mean = spent / self.steps if self.steps else 0.0
        share = spent / seconds if seconds else 0.0
        return f"{spent * 1e3:11.3f}{mean * 1e3:11.3f}{share:8.1%}"


def profile(
    name: str, run: Callable[[Iterable[Any]], Iterator[Any]], batches: Iterable[Any], timer: Timer, may_compile: bool
) -> Profile:
    """The profile of `run` on all batches. may_compile: whether `compile_dense` is off and could be on."""
    drawn: list[Span] = []
    steps: list[Step] = []
    before, start = _waited(), perf_counter_ns()
    running = run(_timed(batches, drawn))
    begin, compiled = perf_counter_ns(), timer.compiling()
    for _ in running:
        span, compiling = Span(begin, perf_counter_ns()), timer.compiling() - compiled
        steps.append(Step(span, list(drawn), compiling, timer.take()))
        drawn.clear()
        begin, compiled = perf_counter_ns(), timer.compiling()
    waited = sum(ns - before.get(thread, 0) for thread, ns in _waited().items())
    return Profile(name, steps, _waiting_advice(waited / 1e9, (perf_counter_ns() - start) / 1e9), may_compile)


def _timed(batches: Iterable[Any], drawn: list[Span]) -> Iterator[Any]:
    begin = perf_counter_ns()
    for batch in batches:
        drawn.append(Span(begin, perf_counter_ns()))
        yield batch
        begin = perf_counter_ns()


def _with_clock(module: fx.GraphModule) -> tuple[fx.GraphModule, list[int], list[Op]]:
    """A module that computes the same, and appends the time to a list at its beginning and after each op."""
    stage_of = stages(module.graph)
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    stamp = _stamp_gpu if on_gpu else _stamp
    clock: list[int] = []
    ops: list[Op] = []
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    read: fx.Node | None = None
    for node in module.graph.nodes:
        if read is None and node.op != "placeholder":
            read = graph.get_attr(_CLOCK)
            graph.call_function(stamp, (read,))
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op.startswith("call"):
            graph.call_function(stamp, (read,))
            stage = stage_of[node]
            is_of_torch = stage in ("forward", "backward") and isinstance(node.target, OpOverload)
            fuses = is_of_torch and node.target.overloadpacket.__name__ not in _PRODUCTS
            ops.append(Op(node.name, stage, describe(module, node), fuses))
    names = (node.target for node in module.graph.nodes if node.op in ("get_attr", "call_module"))
    attributes = {name: getattr(module, name) for name in names}
    return fx.GraphModule({_CLOCK: clock, **attributes}, graph), clock, ops


def _stamp(clock: list[int]) -> None:
    clock.append(perf_counter_ns())


def _stamp_gpu(clock: list[int]) -> None:
    torch.cuda.synchronize()
    clock.append(perf_counter_ns())
