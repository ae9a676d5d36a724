"""Guards of the Python values that a graph's steps were traced with: after a change a call gets another step."""

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
from .reads import MISSING, Reads, is_constant
from .swap import trace_lock

MAX_CHANGES = 8  # of one value, if each gives another step
MAX_VALUES = 64  # of one value in all
MAX_PLACES = 20_000

Keys = tuple[Hashable, ...]

_SHOWN = ("__str__", "__repr__", "__format__")
_DEFAULT = {*dir(object), "__getnewargs__"} - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}


class ValueGuards:
    """The values at all places that `build` was seen to read, as they are now and as they were at earlier traces.

    number: stands for the values as they are now, and is part of each signature. holds: returns whether the values are
    still those; if not, call `renew`.
    """

    def __init__(self) -> None:
        self.number = 0
        self.holds: Callable[[], bool] = True.__bool__
        self._max_places = MAX_PLACES
        self._labels: dict[str, str] = {}  # by place, the user's name for the value
        self._names: dict[str, Any] = {"read": _read}  # in the code that reads places
        self._reads: list[Callable[[], Any]] = []
        self._is_missing: list[bool] = []
        self._values: list[Any] = []
        self._keys: Keys = ()
        self._numbers: dict[Keys, int] = {(): 0}
        self._next_number = count(1)
        self._had: dict[str, dict[Hashable, Any]] = defaultdict(dict)  # keeps objects whose ids are in keys
        self._changed: dict[str, Any] = {}  # the values at places that changed last
        self._changes: Counter[str] = Counter()  # that gave another step
        self._written: set[str] = set()  # places that build may write
        self._dropped: set[str] = set()

    def __reduce__(self) -> Any:
        return ValueGuards, ()  # a copied graph has values of its own

    def renew(self) -> int:
        """The number of the values as they are now. GraphError for a value that changes too often."""
        with trace_lock:
            values = [*map(_read, self._reads)]
            keys = tuple(map(_key, values))
            if keys != self._keys:
                old = zip(self._labels, self._keys, keys, self._values, values, strict=True)
                changed = {place: (before, value) for place, mine, its, before, value in old if mine != its}
                if keys not in self._numbers:
                    for place, (before, value) in changed.items():
                        self._refuse_many(place, before, value)
                    self._numbers[keys] = next(self._next_number)
                self._changed = {place: value for place, (_, value) in changed.items()}
                self.number = self._numbers[keys]
            self._set(values, keys)
            return self.number

    def add(self, reads: Reads) -> None:
        """Add what a trace read. The number now also stands for the values that the trace left behind."""
        seen = {place: found for place, found in reads.places.items() if place not in self._dropped}
        self._written |= set(filter(reads.may_be_written, seen))
        self._max_places = max(MAX_PLACES, 2 * len(seen))  # else a trace that reads more would never be kept
        new = {place: found for place, found in seen.items() if place not in self._labels}
        if new:
            self._names.update(reads.names)
            self._labels.update((place, label) for place, (label, _) in new.items())
            self._values += [value for _, value in new.values()]
            keys = tuple(_key(value) for _, value in new.values())
            self._numbers = {(*before, *keys): number for before, number in self._numbers.items()}
            self._keys += keys
            self._generate()
        values = [
            seen[place][1] if place in seen and place not in self._written else value
            for place, value in zip(self._labels, self._values, strict=True)
        ]
        if (keys := tuple(map(_key, values))) != self._keys:  # another thread wrote one before the trace read it
            self._numbers = {old: number for old, number in self._numbers.items() if number != self.number}
            self._values, self._keys, self.number = values, keys, next(self._next_number)
        self._settle()

    @property
    def is_full(self) -> bool:
        """Whether there are too many places, as if each call passes another function: the graph then starts again."""
        return len(self._labels) > self._max_places

    def equal_step(self, alike: list[Any], program: Hashable, again: Callable[[], Hashable]) -> Any:
        """The step that was compiled for an equal program, or None. alike: steps that differ in values of places alone.

        A changed value that gave an equal program is no longer guarded if `build` uses its text alone. `again` traces
        the program once more to find that out.
        """
        step = next((one for one in alike if one.program == program), None)
        if step is not None:
            self._drop_unused(program, again)
        elif alike:
            self._changes.update([*self._changed])
        return step

    def texts(self) -> Mapping[str, tuple[str, Hashable]]:
        """By the user's name for it, each value as text and as a key."""
        shown = zip(map(_text, self._values), self._keys, strict=True)
        return dict(zip(self._labels.values(), shown, strict=True))

    def _refuse_many(self, place: str, before: Any, value: Any) -> None:
        had = self._had[place]
        if _key(value) not in had and (self._changes[place] >= MAX_CHANGES or len(had) >= MAX_VALUES):
            raise GraphError(
                f"{self._labels[place]} changed to {_text(value)} from {_text(before)}, and has had {len(had)} values; "
                "build reads it and is traced again for each; pass it to the graph as a tensor, or make it a buffer "
                "and change that in place (fill_, copy_), and do what computes no tensor around the call"
            )

    def _drop_unused(self, program: Hashable, again: Callable[[], Hashable]) -> None:
        """Drop guards of changed numbers and strings of which `build` uses the text alone, as `print` does."""
        probes: dict[str, tuple[Any, list[str]]] = {}
        for place, value in self._changed.items():
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                used: list[str] = []
                with suppress(Exception):  # it cannot be set
                    exec(f"{place} = probe", {**self._names, "probe": (probe := _probe(value, used))})
                    probes[place] = probe, used
        same = False
        try:
            with suppress(Exception):
                same = bool(probes) and again() == program
        finally:
            for place, (probe, used) in probes.items():
                if eval(place, self._names) is probe:
                    exec(f"{place} = value", {**self._names, "value": self._changed[place]})
                else:
                    used.append("written")
        unused = {place for place, (_, used) in probes.items() if same and not used}
        stay = [place not in unused for place in self._labels]
        self._dropped |= unused
        self._labels = {place: label for place, label in self._labels.items() if place not in unused}
        self._values, self._keys = [*compress(self._values, stay)], tuple(compress(self._keys, stay))
        merged = [(tuple(compress(keys, stay)), number) for keys, number in self._numbers.items()]
        self._numbers = dict(reversed(merged))  # the oldest number of those that are equal now
        self._generate()
        self._settle()

    def _generate(self) -> None:
        """Make the functions that read and compare values. Comparison by identity is fast, and 1 is not True."""
        names = self._names
        exec(f"reads = [{', '.join(f'lambda: {place}' for place in self._labels)}]", names)
        self._reads = names["reads"]
        self._is_missing = missing = [_read(read) is MISSING for read in self._reads]
        tests = [
            f"{f'read(reads[{i}])' if missing[i] else place} {'==' if place[:4] == 'len(' else 'is'} v{i}"
            for i, place in enumerate(self._labels)
        ]
        exec(f"def holds():\n try: return {' and '.join(tests) or True}\n except Exception: return False", names)
        self.holds = names["holds"]

    def _settle(self) -> None:
        """Let the number also stand for what build wrote. What another thread wrote is found by `holds`."""
        values = [
            _read(read) if place in self._written else value
            for place, read, value in zip(self._labels, self._reads, self._values, strict=True)
        ]
        keys = tuple(map(_key, values))
        self.number = self._numbers.setdefault(keys, self.number)
        self._set(values, keys)

    def _set(self, values: list[Any], keys: Keys) -> None:
        self._values, self._keys = values, keys
        if [value is MISSING for value in values] != self._is_missing:
            self._generate()
        for i, (place, key, value) in enumerate(zip(self._labels, keys, values, strict=True)):
            self._names[f"v{i}"] = value
            self._had[place].setdefault(key, value)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "missing" if value is MISSING else str(getattr(value, "__qualname__", None) or repr(value))[:80]


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return MISSING


def _key(value: Any) -> Hashable:
    """What is equal for values that give equal steps."""
    if isinstance(value, tuple):
        return (type(value), *map(_key, value))
    if not is_constant(value):
        return type(value), id(value)
    # by repr: 0.0 equals -0.0, and nan does not equal itself
    return type(value), repr(value) if isinstance(value, Number | np.generic) else value


def _probe(value: Any, used: list[str]) -> Any:
    """An object that acts as `value`, and adds to `used` what is done with it other than showing its text."""

    def method(name: str) -> Callable[..., Any]:
        def use(_: Any, *args: Any, **kwargs: Any) -> Any:
            used.extend([name][: name not in _SHOWN])
            return getattr(value, name)(*args, **kwargs)

        return use

    names = [name for name in dir(value) if name in _SHOWN or (name not in _DEFAULT and callable(getattr(value, name)))]
    return type("Probe", (), {name: method(name) for name in names})()
