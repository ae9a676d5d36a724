"""Guard the Python values that became constants of a graph's steps.

`ReadRecorder` finds expressions that read these values. At every call, one generated function compares the values. Each
combination of values is a numbered version. The version is part of every call's signature. After a value changes, the
call finds another step or is traced again. If the old values return, the old version returns too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from itertools import compress, count
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

from ...engine.errors import GraphError
from .reads import MISSING, ReadRecorder, is_constant
from .swap import trace_lock

MAX_CHANGES = 8  # how often one value may change and lead to another step
MAX_VALUES = 64  # how many different values one expression may have
MAX_EXPRESSIONS = 20_000

Keys = tuple[Hashable, ...]

_REPRS = ("__str__", "__repr__", "__format__")
_DEFAULT = {*dir(object), "__getnewargs__"} - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}


class ValueGuards:
    """The present and earlier values of all expressions that `build` read during traces."""

    def __init__(self) -> None:
        self.version = 0  # the number of the present combination of values; part of each signature
        self.is_current: Callable[[], bool] = True.__bool__  # False once a value has changed; then call `find_version`
        self._max_expressions = MAX_EXPRESSIONS
        self._labels: dict[str, str] = {}  # expression -> the user's name for the value
        self._globals: dict[str, Any] = {"read": _read_value}  # globals of the generated code
        self._readers: list[Callable[[], Any]] = []
        self._is_missing: list[bool] = []
        self._values: list[Any] = []
        self._keys: Keys = ()
        self._versions: dict[Keys, int] = {(): 0}
        self._next_version = count(1)
        self._past_values: dict[str, dict[Hashable, Any]] = defaultdict(dict)  # objects live while keys hold their ids
        self._last_changes: dict[str, Any] = {}  # the values that changed last, by expression
        self._change_counts: Counter[str] = Counter()  # expression -> number of changes that led to another step
        self._written_expressions: set[str] = set()  # expressions that build itself may write
        self._dropped_expressions: set[str] = set()

    def __reduce__(self) -> Any:
        return ValueGuards, ()  # a copied graph starts with new guards

    def find_version(self) -> int:
        """Return the version of the current combination of values. Raises GraphError if a value changes too often."""
        with trace_lock:
            values = [*map(_read_value, self._readers)]
            keys = tuple(map(_make_key, values))
            if keys != self._keys:
                pairs = zip(self._labels, self._keys, keys, self._values, values, strict=True)
                changes = {expr: (old_value, value) for expr, old, new, old_value, value in pairs if old != new}
                if keys not in self._versions:
                    for expr, (old_value, value) in changes.items():
                        self._check_change_count(expr, old_value, value)
                    self._versions[keys] = next(self._next_version)
                self._last_changes = {expr: value for expr, (_, value) in changes.items()}
                self.version = self._versions[keys]
            self._set_values(values, keys)
            return self.version

    def add(self, recorder: ReadRecorder) -> None:
        """Add the values that a trace read. Values that build wrote during the trace do not start a new version."""
        new_values = {expr: entry for expr, entry in recorder.values.items() if expr not in self._dropped_expressions}
        self._written_expressions |= set(filter(recorder.can_be_written, new_values))
        self._max_expressions = max(MAX_EXPRESSIONS, 2 * len(new_values))  # always leave room for this trace
        new_entries = {expr: entry for expr, entry in new_values.items() if expr not in self._labels}
        if new_entries:
            self._globals.update(recorder.names)
            self._labels.update((expr, label) for expr, (label, _) in new_entries.items())
            self._values += [value for _, value in new_entries.values()]
            keys = tuple(_make_key(value) for _, value in new_entries.values())
            self._versions = {(*before, *keys): version for before, version in self._versions.items()}
            self._keys += keys
            self._compile_checks()
        values = [
            new_values[expr][1] if expr in new_values and expr not in self._written_expressions else value
            for expr, value in zip(self._labels, self._values, strict=True)
        ]
        if (keys := tuple(map(_make_key, values))) != self._keys:  # another thread wrote before the trace read
            self._versions = {key: version for key, version in self._versions.items() if version != self.version}
            self._values, self._keys, self.version = values, keys, next(self._next_version)
        self._update_written_values()

    @property
    def is_full(self) -> bool:
        """True if there are too many expressions, so the graph must start over. A new function per call causes this."""
        return len(self._labels) > self._max_expressions

    def find_equal_step(self, candidates: list[Any], program_key: Hashable, trace_again: Callable[[], Hashable]) -> Any:
        """Return a step with an equal program, or None. candidates: steps that differ only in guarded values.

        If `trace_again` shows that `build` only prints a changed value, the value is no longer guarded.
        """
        step = next((candidate for candidate in candidates if candidate.program_key == program_key), None)
        if step is not None:
            self._drop_unused(program_key, trace_again)
        elif candidates:
            self._change_counts.update([*self._last_changes])
        return step

    def describe_values(self) -> Mapping[str, tuple[str, Hashable]]:
        """Map the user's name of each value to the value's text and key."""
        shown = zip(map(_format_value, self._values), self._keys, strict=True)
        return dict(zip(self._labels.values(), shown, strict=True))

    def _check_change_count(self, expr: str, old_value: Any, value: Any) -> None:
        values = self._past_values[expr]
        if _make_key(value) not in values and (self._change_counts[expr] >= MAX_CHANGES or len(values) >= MAX_VALUES):
            raise GraphError(
                f"{self._labels[expr]} changed to {_format_value(value)} from {_format_value(old_value)}, and has had "
                f"{len(values)} values. build is traced again for each new value. Pass the value to the graph as a "
                "tensor, or make it a buffer that you change in place. Move code that computes no tensor out of build"
            )

    def _drop_unused(self, program_key: Hashable, trace_again: Callable[[], Hashable]) -> None:
        """Stop guarding changed numbers and strings if `build` uses only their text, as `print` does."""
        probes: dict[str, tuple[Any, list[str]]] = {}
        for expr, value in self._last_changes.items():
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                uses: list[str] = []
                with suppress(Exception):  # the expression is not assignable
                    exec(f"{expr} = probe", {**self._globals, "probe": (probe := _make_probe(value, uses))})
                    probes[expr] = probe, uses
        is_equal = False
        try:
            with suppress(Exception):
                is_equal = bool(probes) and trace_again() == program_key
        finally:
            for expr, (probe, uses) in probes.items():
                if eval(expr, self._globals) is probe:
                    exec(f"{expr} = value", {**self._globals, "value": self._last_changes[expr]})
                else:
                    uses.append("written")
        unused_expressions = {expr for expr, (_, uses) in probes.items() if is_equal and not uses}
        is_retained = [expr not in unused_expressions for expr in self._labels]
        self._dropped_expressions |= unused_expressions
        self._labels = {expr: label for expr, label in self._labels.items() if expr not in unused_expressions}
        self._values, self._keys = [*compress(self._values, is_retained)], tuple(compress(self._keys, is_retained))
        merged_versions = [(tuple(compress(keys, is_retained)), version) for keys, version in self._versions.items()]
        self._versions = dict(reversed(merged_versions))  # of equal keys, keep the oldest version
        self._compile_checks()
        self._update_written_values()

    def _compile_checks(self) -> None:
        """Generate the functions that read and compare values. Identity checks are fast and tell 1 from True."""
        names = self._globals
        exec(f"reads = [{', '.join(f'lambda: {expr}' for expr in self._labels)}]", names)
        self._readers = names["reads"]
        self._is_missing = is_missing = [_read_value(read) is MISSING for read in self._readers]
        tests = [
            f"{f'read(reads[{i}])' if is_missing[i] else expr} {'==' if expr[:4] == 'len(' else 'is'} v{i}"
            for i, expr in enumerate(self._labels)
        ]
        exec(f"def is_current():\n try: return {' and '.join(tests) or True}\n except Exception: return False", names)
        self.is_current = names["is_current"]

    def _update_written_values(self) -> None:
        """Update the values that build wrote, but not the version. `is_current` detects other threads' writes."""
        values = [
            _read_value(read) if expr in self._written_expressions else value
            for expr, read, value in zip(self._labels, self._readers, self._values, strict=True)
        ]
        keys = tuple(map(_make_key, values))
        self.version = self._versions.setdefault(keys, self.version)
        self._set_values(values, keys)

    def _set_values(self, values: list[Any], keys: Keys) -> None:
        self._values, self._keys = values, keys
        if [value is MISSING for value in values] != self._is_missing:
            self._compile_checks()
        for i, (expr, key, value) in enumerate(zip(self._labels, keys, values, strict=True)):
            self._globals[f"v{i}"] = value
            self._past_values[expr].setdefault(key, value)


def _format_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "missing" if value is MISSING else str(getattr(value, "__qualname__", None) or repr(value))[:80]


def _read_value(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return MISSING


def _make_key(value: Any) -> Hashable:
    """Return a key for a value. Values with equal keys lead to equal steps."""
    if isinstance(value, tuple):
        return (type(value), *map(_make_key, value))
    if not is_constant(value):
        return type(value), id(value)
    # compare numbers by their repr, because 0.0 == -0.0 and nan != nan
    return type(value), repr(value) if isinstance(value, Number | np.generic) else value


def _make_probe(value: Any, uses: list[str]) -> Any:
    """Return an object that acts as `value` and records in `uses` every use except showing its text."""

    def make_method(name: str) -> Callable[..., Any]:
        def use(_: Any, *args: Any, **kwargs: Any) -> Any:
            uses.extend([name][: name not in _REPRS])
            return getattr(value, name)(*args, **kwargs)

        return use

    names = [name for name in dir(value) if name in _REPRS or (name not in _DEFAULT and callable(getattr(value, name)))]
    return type("Probe", (), {name: make_method(name) for name in names})()
