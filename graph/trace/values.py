"""Guards of the Python values that a graph's steps were traced with: after a change a call gets another step."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from ...engine.errors import GraphError
from .reads import Reads
from .signature import is_plain
from .swap import trace_lock

MOST_CHANGES = 8  # of one value, if each gives another step
MOST_VALUES = 64  # of one value in all

_MISSING = object()
_SHOWN = ("__str__", "__repr__", "__format__")
_KEPT = {*dir(object), "__getnewargs__"} - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}


class ValueGuards:
    """The values that `build` was seen to read, as they are now and as they were at earlier traces.

    number: stands for all values as they are now, and is part of each signature. holds: returns whether the values are
    still those; if not, call `renew`.
    """

    def __init__(self) -> None:
        self.number = 0
        self.holds: Callable[[], bool] = lambda: True
        self._labels: dict[str, str] = {}  # the user's name of the value at each place, see `Reads`
        self._names: dict[str, Any] = {}
        self._reads: list[Callable[[], Any]] = []  # of the value at each place
        self._values: list[Any] = []
        self._keys: tuple[Hashable, ...] = ()
        self._numbers: dict[tuple[Hashable, ...], int] = {(): 0}
        self._next_numbers = count(1)
        self._seen: dict[str, dict[Hashable, Any]] = defaultdict(dict)  # keeps objects alive whose ids are in keys
        self._changed: dict[str, tuple[Any, Any]] = {}  # the values before and after, at places that changed last
        self._changes: Counter[str] = Counter()  # that gave another step
        self._dropped: set[str] = set()
        # by signature without values: traced programs, each with its step and the numbers that had it
        self._programs: dict[Hashable, dict[Hashable, tuple[weakref.ref[Any], set[int]]]] = {}

    def renew(self) -> int:
        """The number of the values as they are now. GraphError for a value that changes too often."""
        with trace_lock:
            values = [_read(read) for read in self._reads]
            keys = tuple(map(_key, values))
            if keys != self._keys:
                where = [i for i, (key, before) in enumerate(zip(keys, self._keys, strict=True)) if key != before]
                places = [*self._labels]
                changed = {places[i]: (self._values[i], values[i]) for i in where}
                if keys not in self._numbers:
                    for place, (old, new) in changed.items():
                        self._refuse_many(place, old, new)
                    self._numbers[keys] = next(self._next_numbers)
                self._changed, self.number = changed, self._numbers[keys]
            self._set(values, keys)
            return self.number

    def add(self, reads: Reads) -> None:
        """Add what a trace read. The present number also stands for the values that the trace left behind."""
        new = {place: label for place, label in reads.places.items() if place not in self._dropped}
        if new.keys() - self._labels.keys():
            self._names.update(reads.names)
            old = len(self._labels)
            self._labels = {**self._labels, **new}
            self._generate()
            keys = tuple(_key(_read(read)) for read in self._reads[old:])
            self._numbers = {(*before, *keys): number for before, number in self._numbers.items()}
        self._settle()

    def equal_step(self, signature: Hashable, program: Hashable, again: Callable[[], Hashable]) -> Any:
        """The step that was compiled for an equal program, or None. signature: without the number of the values.

        A changed value that gave an equal program is no longer guarded if `build` uses its text alone. `again` traces
        the program once more to find that out.
        """
        known = self._programs.setdefault(signature, {})
        step, numbers = known.get(program, (None, set[int]()))
        if step is None:
            self._changes.update({place: 1 for place in self._changed if known})
        elif self.number not in numbers:
            self._drop_unused(program, again)
        numbers.add(self.number)
        return step and step()

    def keep(self, signature: Hashable, program: Hashable, step: Any) -> None:
        """Keep a compiled step for equal programs."""
        self._programs[signature][program] = weakref.ref(step), {self.number}
        if len(self._programs) > MOST_VALUES:
            self._programs.pop(next(iter(self._programs)))

    def texts(self) -> Mapping[str, tuple[str, Hashable]]:
        """By the user's name for it, each value as text and as a key."""
        shown = zip(map(_text, self._values), self._keys, strict=True)
        return dict(zip(self._labels.values(), shown, strict=True))

    def _refuse_many(self, place: str, old: Any, new: Any) -> None:
        seen = self._seen[place]
        if _key(new) in seen:
            return
        if self._changes[place] >= MOST_CHANGES or len(seen) >= MOST_VALUES:
            raise GraphError(
                f"{self._labels[place]} changed to {_text(new)} from {_text(old)}, its {len(seen) + 1}th value; build "
                "reads it and is traced again for each; pass it to the graph as a tensor, or make it a buffer and "
                "change that in place (fill_, copy_), and do what is not computed with tensors around the call"
            )

    def _drop_unused(self, program: Hashable, again: Callable[[], Hashable]) -> None:
        """Drop guards of changed numbers and strings of which `build` uses the text alone, as `print` does."""
        probes: dict[str, tuple[Any, list[str], Any]] = {}
        for place, (_, value) in self._changed.items():
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                used: list[str] = []
                probe = _probe(value, used)
                with suppress(Exception):  # it is in a tuple, or has no setter
                    exec(f"{place} = probe", {**self._names, "probe": probe})
                    probes[place] = probe, used, value
        same = False
        try:
            with suppress(Exception):
                same = bool(probes) and again() == program
        finally:
            for place, (probe, _, value) in probes.items():
                if _read(eval(f"lambda: {place}", self._names)) is probe:
                    exec(f"{place} = value", {**self._names, "value": value})
        unused = {place for place, (_, used, _) in probes.items() if same and not used}
        stay = [place not in unused for place in self._labels]
        self._dropped |= unused
        self._labels = {place: label for place, label in self._labels.items() if place not in unused}
        numbers = self._numbers
        self._numbers = {}
        for keys, number in numbers.items():
            self._numbers.setdefault(tuple([key for key, stays in zip(keys, stay, strict=True) if stays]), number)
        self._generate()
        self._settle()

    def _generate(self) -> None:
        """Make the functions that read and compare values. Comparing by identity is fast, and tells 1 from True."""
        tests = " and ".join(f"{place} is v{i}" for i, place in enumerate(self._labels)) or "True"
        reads = ", ".join(f"lambda: {place}" for place in self._labels)
        body = f"def holds():\n try:\n  return {tests}\n except Exception:\n  return False\nreads = [{reads}]"
        exec(body, self._names)
        self.holds, self._reads = self._names["holds"], self._names["reads"]

    def _settle(self) -> None:
        values = [_read(read) for read in self._reads]
        keys = tuple(map(_key, values))
        self.number = self._numbers.setdefault(keys, self.number)
        self._set(values, keys)

    def _set(self, values: list[Any], keys: tuple[Hashable, ...]) -> None:
        self._values, self._keys = values, keys
        for i, (place, key, value) in enumerate(zip(self._labels, keys, values, strict=True)):
            self._names[f"v{i}"] = value
            self._seen[place].setdefault(key, value)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "missing" if value is _MISSING else str(getattr(value, "__qualname__", None) or repr(value))[:80]


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return _MISSING


def _key(value: Any) -> Hashable:
    """What is equal for values that give equal steps."""
    if isinstance(value, tuple):
        return (type(value), *map(_key, value))
    if not is_plain(value):
        return type(value), id(value)
    # by repr: 0.0 equals -0.0, and nan does not equal itself
    return type(value), repr(value) if isinstance(value, float | complex | np.generic) else value


def _probe(value: Any, used: list[str]) -> Any:
    """An object that acts as `value`, and adds to `used` what is done with it other than showing its text."""

    def method(name: str) -> Callable[..., Any]:
        def use(_: Any, *args: Any, **kwargs: Any) -> Any:
            used.append(name)
            return getattr(value, name)(*args, **kwargs)

        return use

    names = [name for name in dir(value) if name not in _KEPT and callable(getattr(value, name))]
    members: dict[str, Any] = {name: method(name) for name in names}
    members |= {name: lambda _, *spec, name=name: getattr(value, name)(*spec) for name in _SHOWN}
    return type("Probe", (), members)()
