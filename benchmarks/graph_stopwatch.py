"""Seconds within some calls of a compiled step: torch's ops, native loops, optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._ops import OpOverload

from tierbed import Graph
from tierbed.engine import _core

_MATMULS = {"addmm", "mm", "bmm", "baddbmm"}


class Stopwatch:
    """Adds up the seconds within timed calls, all of one thread; one within another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def lap(self) -> float:
        """The seconds since the last lap."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
                self._inside = False

        return timed


def is_matmul(op: Any) -> bool:
    """Whether an op of a compiled step multiplies dense matrices."""
    return isinstance(op, OpOverload) and op.overloadpacket.__name__ in _MATMULS


def is_op(op: Any) -> bool:
    """Whether it is one of torch's, and none of the engine's."""
    return isinstance(op, OpOverload)


@contextmanager
def timed_ops(watch: Stopwatch, graph: Graph, which: Callable[[Any], bool]) -> Iterator[None]:
    """Time torch's ops of the steps that `graph` has compiled: from where they leave Python."""
    modules = [step.module for step in vars(graph)["_Graph__steps"].all()]
    forwards = [type(module).forward for module in modules]
    before = [(node, node.target) for module in modules for node in module.graph.nodes if which(node.target)]
    for node, target in before:
        node.target = watch.timed(target._op)
    for module in modules:
        module.recompile()
    try:
        yield
    finally:
        for node, target in before:
            node.target = target
        for module, forward in zip(modules, forwards, strict=True):
            module.recompile()
            type(module).forward = forward  # which may be other code than FX generates


@contextmanager
def timed_natives(watch: Stopwatch) -> Iterator[None]:
    """Time the calls of the native core."""
    with ExitStack() as stack:
        stack.enter_context(timed_calls(watch, _core, "Batch", *_functions(_core)))
        for kind in (_core.FullTable, _core.CachedTier):
            stack.enter_context(timed_calls(watch, kind, *_functions(kind)))
        yield


def _functions(place: Any) -> list[str]:
    """Of nanobind, by the name of their type."""
    return [name for name, value in vars(place).items() if type(value).__name__ in ("nb_func", "nb_method")]


@contextmanager
def timed_calls(watch: Stopwatch, place: Any, *names: str) -> Iterator[None]:
    """Time the calls of these attributes of a module, a class or an object."""
    before = {name: vars(place).get(name) for name in names}
    for name in names:
        setattr(place, name, watch.timed(getattr(place, name)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:  # the object's class has it
                delattr(place, name)
            else:
                setattr(place, name, value)
