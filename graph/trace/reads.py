"""Finds the Python values that `build` reads while it is traced. They become constants of the step.

Reads of attributes are observed: while `build` runs, the classes of the graph's modules, and of objects that these
hold, have a `__getattribute__`. Reads of globals, closures and default arguments cannot be observed, so they are found
in the code of the functions that `build` may call.

The result is a place for each value: an expression, such as `o3['cfg'].temp`, that reads the value as it is now.
"""

from __future__ import annotations

import dis
import pickle
import random
import re
import sys
from argparse import Namespace
from collections import deque
from contextlib import suppress
from enum import Enum
from functools import cached_property, lru_cache, partial
from numbers import Number
from threading import get_ident
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...engine.errors import GraphError
from ...engine.ops.rows_contract import EmbeddingBase
from .names import HasBuild
from .signature import MODULE_HOOKS, is_plain

MAX_ITEMS = 64  # of a list, dict or tuple whose items have places
MAX_NESTED = 1024  # items of it and of those in it

Names = frozenset[str]

_OURS = __name__.partition(".")[0]
_LIBRARIES = {"torch", "numpy", _OURS, *sys.stdlib_module_names}
_WATCHED = (nn.Module, Optimizer, LRScheduler, GradScaler)  # classes of torch whose attributes users change
_OF_MODULES = frozenset({*vars(nn.Module()), *vars(nn.Module)})  # the signature has what matters of these
_FUNCTIONS = {property: "fget", staticmethod: "__func__", classmethod: "__func__", cached_property: "func"}
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_SHARED = {id(random.random.__self__): "random", id(np.random.rand.__self__): "numpy.random"}  # type: ignore[attr-defined]
_ALL: Names = frozenset()  # for a class: all of its functions
_SPECIAL = frozenset({"__call__"})  # for a class: what operators call
_READ = object.__getattribute__


class MISSING:
    """Stands for the value of a place that has none."""


class Reads:
    """A block around `build` in which this thread's reads are found.

    places: by expression, the user's name for it and the value. names: the objects that the expressions name.

    GraphError at the end of the block if `build` drew numbers from Python's or NumPy's generators.
    """

    def __init__(self, root: HasBuild, arguments: list[Any]) -> None:
        self.places: dict[str, tuple[str, Any]] = {}
        self.names: dict[str, Any] = {}
        self._root, self._arguments, self._thread = root, arguments, get_ident()
        self._watched: dict[int, tuple[str, str, Any]] = {}  # by id, the expression and label of an object, and itself
        self._modules: set[int] = set()  # of the graph, by id
        self._seen: set[Any] = set()
        self._generators: list[tuple[Any, bytes, str]] = []  # with their states and labels
        self._classes: dict[type, bool] = {}  # of watched objects, and whether they got a `__getattribute__`
        self._known_names: Names = frozenset()  # in all code that was scanned
        self._assigned: Names = frozenset()  # of these, those that the code assigns to

    def __enter__(self) -> Reads:
        try:
            for path, module in self._root.named_modules():
                self._modules.add(id(module))
                self._watch(self._name(module), path, module)
                for hooks in MODULE_HOOKS(module):
                    for key, hook in hooks.items():
                        self._note(f"{self._name(hooks)}[{key}]", f"a hook of {path or 'the graph'}", hook)
            self._scan(type(self._root).build, type(self._root))
            for function in self._arguments:
                self._scan(function)
        except BaseException:
            self.__exit__(BaseException)
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for cls in [cls for cls, is_hooked in self._classes.items() if is_hooked]:
            del cls.__getattribute__
        drawn = [label for generator, before, label in self._generators if _state(generator) != before]
        if drawn and error is None:
            raise GraphError(
                f"build draws random numbers from {drawn[0]}, which would be frozen into the step; draw them by torch "
                "(torch.rand, torch.randint), or outside, and pass them to the graph as a tensor"
            )

    def may_be_written(self, place: str) -> bool:
        """Whether `build` may have written the value there. Else another thread did, if it changed."""
        label, value = self.places[place]
        name = re.findall(r"\w+", label)[-1]
        is_item = label.endswith("]") or place.startswith("len(")
        is_any = callable(value) or "setattr" in self._known_names  # FX replaces functions during the trace
        return is_any or is_item or name in self._assigned

    def _name(self, value: Any) -> str:
        name = f"o{id(value)}"
        self.names[name] = value
        return name

    def _is_new(self, *key: Any) -> bool:
        return not (key in self._seen or self._seen.add(key))  # type: ignore[func-returns-value]

    def _watch(self, expression: str, label: str, value: Any) -> None:
        """Observe the attributes of an object from now on."""
        cls = type(value)
        self._watched[id(value)] = expression, label, value
        if cls not in self._classes:
            ours = cls.__module__.partition(".")[0] == _OURS or isinstance(value, EmbeddingBase)
            self._classes[cls] = False
            if cls.__getattribute__ is _READ and not ours:
                with suppress(Exception):  # the class takes no attribute
                    cls.__getattribute__ = self._observer()
                    self._classes[cls] = True
            self._scan_class(cls, _SPECIAL)

    def _observer(self) -> Any:
        def read(owner: Any, name: str) -> Any:
            is_ours = get_ident() == self._thread and (name[:2] != "__" or name == "__dict__")
            try:
                value = _READ(owner, name)
            except AttributeError:
                if not is_ours or isinstance(owner, nn.Module):
                    raise
                try:
                    value = type(owner).__getattr__(owner, name)
                except AttributeError:
                    self._see(owner, name, MISSING)
                    raise
            if is_ours:
                self._see(owner, name, value)
            return value

        return read

    def _see(self, owner: Any, name: str, value: Any) -> None:
        watched, is_module = self._watched.get(id(owner)), id(owner) in self._modules
        if watched is None or not name.isidentifier() or not self._is_new(id(owner), name):
            return
        expression, label, _ = watched
        attributes = vars(owner) if is_module else {}  # faster to read than the module itself
        if isinstance(value, MethodType) and value.__self__ is owner:
            self._scan(value.__func__, type(owner))
        elif is_module and (name in _OF_MODULES or isinstance(value, Tensor)):
            return  # the signature has it
        elif not isinstance(getattr(type(owner), name, None), property):  # what a property reads is seen as well
            place = f"{self._name(attributes)}[{name!r}]" if name in attributes else f"{expression}.{name}"
            self._note(place, f"{label}.{name}".lstrip("."), value)

    def _note(self, place: str, label: str, value: Any, names: Names = _ALL) -> None:
        """Note a value that build may read. names: those in the code that reads it, if it was found in code."""
        if isinstance(value, ModuleType):
            self._note_python_module(value, names or self._known_names)
            return
        if isinstance(value, type) and _is_own(value):
            self._scan_class(value, _ALL)
            self._scan_class(value, names)
        if not self._is_new(place):
            return
        source = value.__self__ if isinstance(value, BuiltinFunctionType) else value
        if isinstance(source, _GENERATORS):
            self._generators.append((source, _state(source), _SHARED.get(id(source), label)))
        elif is_constant(value) or (isinstance(value, Tensor | np.ndarray) and not isinstance(value, FakeTensor)):
            self.places[place] = label, value
            self._scan(value)
        elif id(value) in self._watched:
            self.places[place] = label, value  # by identity: its attributes have places, under another name
        elif isinstance(value, dict | list | tuple | deque | set):
            self.places[f"len({place})"] = f"the length of {label}", len(value)
            if len(value) <= MAX_ITEMS and _nested(value) <= MAX_NESTED:
                for key, item in _items(value):
                    if is_constant(key):
                        name = repr(key) if type(key) in (int, str) else self._name(key)
                        self._note(f"{place}[{name}]", f"{label}[{key!r}]", item)
        elif isinstance(value, MethodType):
            self._note(f"{place}.__self__", label, value.__self__)
            self._scan(value.__func__, type(value.__self__))
        elif isinstance(value, partial):
            for part in ("func", "args", "keywords"):
                self._note(f"{place}.{part}", f"{label}.{part}", getattr(value, part))
        elif isinstance(value, Namespace | SimpleNamespace):
            self._note(f"{place}.__dict__", label, vars(value))
        elif isinstance(value, _WATCHED) or (_is_own(type(value)) and type(value).__flags__ & 1 << 9):  # made in Python
            self.places[f"type({place})"] = f"the class of {label}", type(value)
            self._watch(place, label, value)
            if not self._classes[type(value)]:
                self._note(f"{place}.__dict__", label, getattr(value, "__dict__", None))

    def _note_python_module(self, module: ModuleType, names: Names) -> None:
        if module is np:
            names &= {"random"}
        elif not _is_own(module) and module not in (random, np.random):
            return
        values = vars(module)
        for name in names & values.keys():
            if self._is_new(id(module), name, names):  # modules may name each other
                self._note(f"{self._name(values)}[{name!r}]", f"{module.__name__}.{name}", values[name], names)

    def _scan(self, function: Any, cls: type | None = None) -> None:
        """Note what a function reads by name, and what functions that it names do. cls: the class of its object."""
        while isinstance(function, FunctionType) and function.__globals__.get("__name__", "").startswith("torch."):
            function = getattr(function, "__wrapped__", None)  # torch decorates it, FX does so in each trace
        if not isinstance(function, FunctionType) or not _is_own(function) or not self._is_new(function, cls):
            return
        code, values = function.__code__, function.__globals__
        names, variables, assigned = _names_in(code)
        self._known_names |= names
        self._assigned |= assigned
        for name in variables & values.keys():
            self._note(f"{self._name(values)}[{name!r}]", name, values[name], names)
        for name in names & sys.modules.keys():  # imported in the function
            self._note(name, name, sys.modules[name], names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                self._note(f"{self._name(cell)}.cell_contents", name, cell.cell_contents, names)
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part):
                label = f"{part} of {function.__qualname__}"
                self._note(f"{self._name(function)}.{part}", label, getattr(function, part), names)
        for one in [*self._classes] if names & {"type", "__class__"} else [cls]:
            if one is not None:
                self._scan_class(one, names)

    def _scan_class(self, cls: type, names: Names) -> None:
        """Note what these names read of a class."""
        if issubclass(cls, Enum) or not self._is_new(cls, names):
            return
        for base in filter(_is_own, cls.__mro__):
            for name, member in [*vars(base).items()]:
                function = getattr(member, _FUNCTIONS.get(type(member), ""), member)
                if isinstance(function, FunctionType):
                    if names is _ALL or name in names or (name[:2] == "__" and name != "__init__"):
                        self._scan(function, cls)
                elif name in names and name[:2] != "__" and not hasattr(member, "__get__"):
                    self._note(f"{self._name(base)}.{name}", f"{base.__name__}.{name}", member, names)


def _items(value: Any) -> list[tuple[Any, Any]]:
    """The keys and items of a container; none of any other value, and of a set."""
    if isinstance(value, dict):
        return [*value.items()]
    return [*enumerate(value)] if isinstance(value, list | tuple | deque) else []


def _nested(value: Any) -> int:
    """How many items a container and those in it have; more than MAX_NESTED if one holds itself."""
    count, containers = 0, [value]
    while containers and count <= MAX_NESTED:
        one = containers.pop()
        items = _items(vars(one) if isinstance(one, Namespace | SimpleNamespace) else one)
        count += len(items)
        containers += [item for _, item in items]
    return count


def is_constant(value: Any) -> bool:
    """Whether a value cannot change: a plain value, a number, or a tuple of these without functions."""
    if isinstance(value, tuple | frozenset):
        return all(is_constant(item) and not callable(item) for item in value)
    return is_plain(value) or isinstance(value, Number)


def _is_own(value: Any) -> bool:
    """Whether a function, class or module is the user's: of no library whose values stay as they are."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] not in _LIBRARIES


def _state(generator: Any) -> bytes:
    try:
        return pickle.dumps(generator)
    except Exception:  # the system's generator has none
        return b""


@lru_cache(4096)
def _names_in(code: CodeType) -> tuple[Names, Names, Names]:
    """In a code and its nested functions: all names, those of globals, and those that it assigns to."""
    names, variables, assigned = {*code.co_names}, set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        kind, _, what = instruction.opname.partition("_")
        if what in ("GLOBAL", "NAME") and kind == "LOAD":
            variables.add(instruction.argval)
        elif what in ("GLOBAL", "NAME", "ATTR", "DEREF") and kind != "LOAD":
            assigned.add(instruction.argval)
    for nested in [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]:
        for mine, its in zip((names, variables, assigned), nested, strict=True):
            mine.update(its)
    return frozenset(names), frozenset(variables), frozenset(assigned)
