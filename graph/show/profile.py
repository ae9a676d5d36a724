"""`Graph.profile`: run steps with a clock after each op, and report tables and a Chrome trace.

A profiled step is the compiled step plus a clock read after each op, so the results are the same. The profile also
reports how long this process's threads waited for a core, and what to do if idle threads occupy the cores.
"""

from __future__ import annotations

import json
import os
from collections import Counter
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
from ..trace.names import as_path
from .listing import STAGES, describe_node, find_stages
from .recompile_log import RecompileLog

_WAITING_SHARE = 0.1  # fraction of the elapsed time; above this, the profile gives advice
_CLOCK = "_clock"
_PYTHON = "Python around"
_MATMUL_OPS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward"}
_FUSIBLE_SHARE = 0.25  # fraction of step time in fusible ops; above this, the profile gives advice


def _advise_on_waits(waited_s: float, elapsed_s: float) -> str:
    """Return advice if threads waited long for a core, and idle torch threads may be the cause. Otherwise return ''."""
    may_spin = torch.get_num_threads() > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
    if not may_spin or waited_s <= _WAITING_SHARE * elapsed_s:
        return ""
    return (
        f"threads waited {waited_s:.2f} s for a core, and threads of torch occupy cores while idle: "
        "start the process with OMP_WAIT_POLICY=PASSIVE"
    )


def _read_core_wait_times() -> dict[str, int]:
    """Return the nanoseconds that each thread was ready to run but got no core. Only Linux counts these waits."""
    times = {}
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError, IndexError):  # the thread has ended
            times[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return times


class Op(NamedTuple):
    """An op in a compiled step."""

    name: str  # the op's name in `print(graph)`
    stage: str
    result: str
    is_fusible: bool  # True if TorchInductor would fuse this op with its neighbours


class Span(NamedTuple):
    """A time span in nanoseconds."""

    begin: int
    end: int


class ProfiledStep(NamedTuple):
    """One profiled step: the time of the whole step, of compiling and of each op."""

    span: Span
    loader_spans: list[Span]
    compile_ns: int  # nanoseconds
    op_spans: list[tuple[Op, Span]]


class Timer:
    """Runs compiled steps and records each op's time. On a GPU, the timer waits for each op to finish."""

    def __init__(self, recompile_log: RecompileLog) -> None:
        self._recompile_log = recompile_log
        self._timed_modules: dict[fx.GraphModule, tuple[fx.GraphModule, list[int], list[Op]]] = {}
        self._timed_ops: list[tuple[Op, Span]] = []
        self._instrumentation_ns = 0  # nanoseconds spent on inserting clock reads into steps

    def forward(self, module: fx.GraphModule, tensors: list[Tensor]) -> Any:
        """Return `module.forward(*tensors)`, timing each op."""
        if module not in self._timed_modules:
            begin = perf_counter_ns()
            self._timed_modules[module] = _add_clock(module)
            self._instrumentation_ns += perf_counter_ns() - begin
        timed_module, timestamps, ops = self._timed_modules[module]
        timestamps.clear()
        outputs = timed_module.forward(*tensors)
        self._timed_ops += zip(ops, map(Span, timestamps, timestamps[1:]), strict=True)
        return outputs

    def compile_ns(self) -> int:
        """Return the nanoseconds spent on compiling the graph's steps and inserting clock reads."""
        return int(self._recompile_log.seconds * 1e9) + self._instrumentation_ns

    def take_ops(self) -> list[tuple[Op, Span]]:
        """Return the ops that ran since the last `take_ops`, with their times."""
        timed_ops, self._timed_ops = self._timed_ops, []
        return timed_ops


class Profile:
    """Shows where steps spent time. `print(profile)` shows the time by stage, `print(profile.by_op())` by op.

    Attributes:
        steps: how many steps ran.
        stages: seconds per stage, summed over all steps. `Python around` is the remaining time: checking the
            signature, unpacking arguments, and drawing batches ahead.
        compile_seconds: seconds spent on compiling and on adding clocks, not included in `stages`.
    """

    def __init__(self, name: str, steps: list[ProfiledStep], advice: str, can_compile: bool) -> None:
        self._name, self._timed_steps, self._advice, self._can_compile = name, steps, advice, can_compile
        self.steps = len(steps)
        self.compile_seconds = sum(step.compile_ns for step in steps) / 1e9
        spent_ns: dict[str, int] = dict.fromkeys(["loader", *STAGES, _PYTHON], 0)
        for step in steps:
            spans = [("loader", span) for span in step.loader_spans] + [(op.stage, span) for op, span in step.op_spans]
            for stage, (begin, end) in spans:
                spent_ns[stage] += end - begin
            spent_ns[_PYTHON] += step.span.end - step.span.begin - step.compile_ns - sum(e - b for _, (b, e) in spans)
        self.stages = {stage: ns / 1e9 for stage, ns in spent_ns.items() if ns}

    def __str__(self) -> str:
        """Return a table with each stage's total, mean per step and share.

        Lines below the table suggest `compile_dense`, and report threads that waited for a core.
        """
        seconds = sum(self.stages.values())
        rows = [*self.stages.items(), ("step", seconds)]
        lines = [f"{self._name}: {self.steps} steps", f"{'':14}{'total ms':>11}{'mean ms':>11}{'share':>8}"]
        lines += [f"{name:14}{self._format_times(spent, seconds)}" for name, spent in rows]
        if self.compile_seconds:
            lines.append(f"and {self.compile_seconds:.2f} s to compile and to add the clock, not counted above")
        return "\n".join([*lines, *filter(None, [self._advise_compiling(seconds), self._advice])])

    def by_op(self, most: int = 20) -> str:
        """Return a table of the `most` slowest ops, named as in `print(graph)`. Raises InputError if `most` < 1."""
        if as_int(most, minimum=1) is None:
            raise InputError(f"most={most!r}: give a whole number of ops > 0")
        spent_ns: Counter[Op] = Counter()
        for step in self._timed_steps:
            for op, (begin, end) in step.op_spans:
                spent_ns[op] += end - begin
        seconds = sum(self.stages.values())
        width = max((len(op.name) for op in spent_ns), default=0) + 2
        lines = [f"{'':{width}}{'stage':12}{'total ms':>11}{'mean ms':>11}{'share':>8}"]
        for op, ns in spent_ns.most_common(most):
            lines.append(f"{op.name:{width}}{op.stage:12}{self._format_times(ns / 1e9, seconds)}  {op.result}".rstrip())
        return "\n".join(lines)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write steps as JSON for chrome://tracing or ui.perfetto.dev, one event per op and step. Raises InputError."""
        start = self._timed_steps[0].span.begin if self._timed_steps else 0
        track = {"pid": 0, "tid": 0}
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": self._name}, **track}]

        def add(name: str, category: str, span: Span, **arguments: Any) -> None:
            times = {"ts": (span.begin - start) / 1e3, "dur": (span.end - span.begin) / 1e3}  # microseconds
            events.append({"ph": "X", "name": name, "cat": category, **times, "args": arguments, **track})

        for number, step in enumerate(self._timed_steps):
            add(f"step {number}", "step", step.span)
            for span in step.loader_spans:
                add("loader", "loader", span, step=number)
            for op, span in step.op_spans:
                add(op.name, op.stage, span, step=number, makes=op.result)
        as_path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _advise_compiling(self, seconds: float) -> str:
        spans = (span for step in self._timed_steps for op, span in step.op_spans if op.is_fusible)
        fusible = sum(span.end - span.begin for span in spans) / 1e9
        if not self._can_compile or fusible <= _FUSIBLE_SHARE * seconds:
            return ""
        return (
            f"{fusible / seconds:.0%} went to dense ops that TorchInductor can fuse: try compile_dense(); "
            "the first call of each shape then takes seconds longer"
        )

    def _format_times(self, spent: float, seconds: float) -> str:
        mean = spent / self.steps if self.steps else 0.0
        share = spent / seconds if seconds else 0.0
        return f"{spent * 1e3:11.3f}{mean * 1e3:11.3f}{share:8.1%}"


def profile(
    name: str, run: Callable[[Iterable[Any]], Iterator[Any]], batches: Iterable[Any], timer: Timer, can_compile: bool
) -> Profile:
    """Profile `run` on all batches. can_compile: True if `compile_dense` is off but could be turned on."""
    loader_spans: list[Span] = []
    steps: list[ProfiledStep] = []
    waits_before, start = _read_core_wait_times(), perf_counter_ns()
    results = run(_time_loader(batches, loader_spans))
    begin, compiled_ns = perf_counter_ns(), timer.compile_ns()
    for _ in results:
        span, compile_ns = Span(begin, perf_counter_ns()), timer.compile_ns() - compiled_ns
        steps.append(ProfiledStep(span, list(loader_spans), compile_ns, timer.take_ops()))
        loader_spans.clear()
        begin, compiled_ns = perf_counter_ns(), timer.compile_ns()
    waited_ns = sum(ns - waits_before.get(thread, 0) for thread, ns in _read_core_wait_times().items())
    return Profile(name, steps, _advise_on_waits(waited_ns / 1e9, (perf_counter_ns() - start) / 1e9), can_compile)


def _time_loader(batches: Iterable[Any], loader_spans: list[Span]) -> Iterator[Any]:
    begin = perf_counter_ns()
    for batch in batches:
        loader_spans.append(Span(begin, perf_counter_ns()))
        yield batch
        begin = perf_counter_ns()


def _add_clock(module: fx.GraphModule) -> tuple[fx.GraphModule, list[int], list[Op]]:
    """Return a copy of `module` that appends the time to a list: once at the start of a run, and once after each op."""
    stage_by_node = find_stages(module.graph)
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    append_time = _append_gpu_time if on_gpu else _append_time
    timestamps: list[int] = []
    ops: list[Op] = []
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    clock_node: fx.Node | None = None
    for node in module.graph.nodes:
        if clock_node is None and node.op != "placeholder":
            clock_node = graph.get_attr(_CLOCK)
            graph.call_function(append_time, (clock_node,))
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op.startswith("call"):
            graph.call_function(append_time, (clock_node,))
            stage = stage_by_node[node]
            is_torch_op = stage in ("forward", "backward") and isinstance(node.target, OpOverload)
            is_fusible = is_torch_op and node.target.overloadpacket.__name__ not in _MATMUL_OPS
            ops.append(Op(node.name, stage, describe_node(module, node), is_fusible))
    names = (node.target for node in module.graph.nodes if node.op in ("get_attr", "call_module"))
    attributes = {name: getattr(module, name) for name in names}
    return fx.GraphModule({_CLOCK: timestamps, **attributes}, graph), timestamps, ops


def _append_time(timestamps: list[int]) -> None:
    timestamps.append(perf_counter_ns())


def _append_gpu_time(timestamps: list[int]) -> None:
    torch.cuda.synchronize()
    timestamps.append(perf_counter_ns())
