"""Find the Python values that `build` reads while it is traced.

Values that `build` reads become constants of the step, so later calls must check these values. While `build` runs, a
`__getattribute__` hook records reads of attributes of modules, and of objects in modules. Globals, closures and default
arguments have no such hook: the recorder finds them in the code of all functions that `build` may call.

The result maps Python expressions such as `o3['cfg'].temp` to values. Evaluating an expression reads the current value.
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
from ...engine.ops.embedding_base import EmbeddingBase
from .names import HasBuild
from .signature import get_module_hooks, is_plain

MAX_ITEMS = 64  # if a container has more items, only its length is guarded
MAX_NESTED = 1024  # if a container has more items, nested items included, only its length is guarded

Names = frozenset[str]

_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = {"torch", "numpy", _PACKAGE, *sys.stdlib_module_names}
_OBSERVED_CLASSES = (nn.Module, Optimizer, LRScheduler, GradScaler)  # torch classes whose attributes users change
_MODULE_NAMES = frozenset({*vars(nn.Module()), *vars(nn.Module)})  # the signature covers these attributes
_FUNCTION_ATTRIBUTES = {property: "fget", staticmethod: "__func__", classmethod: "__func__", cached_property: "func"}
_GENERATOR_CLASSES = (random.Random, np.random.RandomState, np.random.Generator)
_SHARED_GENERATORS = {id(random.random.__self__): "random", id(np.random.rand.__self__): "numpy.random"}  # type: ignore[attr-defined]
_ALL_FUNCTIONS: Names = frozenset()  # scan all functions of a class
_OPERATOR_METHODS = frozenset({"__call__"})  # scan only a class's operator methods, such as `__add__`
_GET_ATTRIBUTE = object.__getattribute__


class MISSING:
    """Represents a value that cannot be read, such as a deleted attribute."""


class ReadRecorder:
    """Context manager around `build` that finds the Python values that this thread reads.

    The exit raises GraphError if `build` drew numbers from Python's or NumPy's random generators.
    """

    def __init__(self, root: HasBuild, arguments: list[Any]) -> None:
        self.values: dict[str, tuple[str, Any]] = {}  # expression -> (the user's name for the value, the value)
        self.names: dict[str, Any] = {}  # name in expressions -> object
        self._root, self._arguments, self._thread = root, arguments, get_ident()
        self._objects: dict[int, tuple[str, str, Any]] = {}  # id of an object -> (expression, label, the object)
        self._module_ids: set[int] = set()  # ids of the graph's modules
        self._seen_keys: set[Any] = set()
        self._used_generators: list[tuple[Any, bytes, str]] = []  # generators with their states and labels
        self._observed_classes: dict[type, bool] = {}  # class -> True if the recorder set its `__getattribute__`
        self._known_names: Names = frozenset()  # names in all scanned code
        self._assigned_names: Names = frozenset()  # names that the scanned code assigns to

    def __enter__(self) -> ReadRecorder:
        try:
            for path, module in self._root.named_modules():
                self._module_ids.add(id(module))
                self._observe(self._assign_name(module), path, module)
                for hooks in get_module_hooks(module):
                    for key, hook in hooks.items():
                        self._record(f"{self._assign_name(hooks)}[{key}]", f"a hook of {path or 'the graph'}", hook)
            self._scan(type(self._root).build, type(self._root))
            for function in self._arguments:
                self._scan(function)
        except BaseException:
            self.__exit__(BaseException)
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for cls in [cls for cls, is_hooked in self._observed_classes.items() if is_hooked]:
            del cls.__getattribute__
        labels = [label for generator, before, label in self._used_generators if _pickle_state(generator) != before]
        if labels and error is None:
            raise GraphError(
                f"build draws random numbers from {labels[0]}, and the step would repeat them forever; use torch.rand "
                "or torch.randint, or draw outside and pass the numbers to the graph as a tensor"
            )

    def can_be_written(self, expr: str) -> bool:
        """True if `build` may have written the value of `expr`. If False, only another thread can have written it."""
        label, value = self.values[expr]
        is_item = label.endswith("]") or expr.startswith("len(")
        is_special = callable(value) or "setattr" in self._known_names  # FX itself replaces functions during a trace
        return is_special or is_item or re.findall(r"\w+", label)[-1] in self._assigned_names

    def _assign_name(self, value: Any) -> str:
        name = f"o{id(value)}"
        self.names[name] = value
        return name

    def _mark_seen(self, *key: Any) -> bool:
        return not (key in self._seen_keys or self._seen_keys.add(key))  # type: ignore[func-returns-value]

    def _observe(self, expr: str, label: str, value: Any) -> None:
        cls = type(value)
        self._objects[id(value)] = expr, label, value
        if cls not in self._observed_classes:
            is_internal = cls.__module__.partition(".")[0] == _PACKAGE or isinstance(value, EmbeddingBase)
            self._observed_classes[cls] = False
            if cls.__getattribute__ is _GET_ATTRIBUTE and not is_internal:
                with suppress(Exception):  # the class does not allow new attributes
                    cls.__getattribute__ = self._make_observer()
                    self._observed_classes[cls] = True
            self._scan_class(cls, _OPERATOR_METHODS)

    def _make_observer(self) -> Any:
        def read(owner: Any, name: str) -> Any:
            is_recorded = get_ident() == self._thread and (name[:2] != "__" or name == "__dict__")
            try:
                value = _GET_ATTRIBUTE(owner, name)
            except AttributeError:
                if not is_recorded or isinstance(owner, nn.Module):
                    raise
                try:
                    value = type(owner).__getattr__(owner, name)
                except AttributeError:
                    self._record_attribute(owner, name, MISSING)
                    raise
            if is_recorded:
                self._record_attribute(owner, name, value)
            return value

        return read

    def _record_attribute(self, owner: Any, name: str, value: Any) -> None:
        entry, is_module = self._objects.get(id(owner)), id(owner) in self._module_ids
        if entry is None or not name.isidentifier() or not self._mark_seen(id(owner), name):
            return
        owner_expr, label, _ = entry
        attributes = vars(owner) if is_module else {}  # reading the dict is faster than reading the module
        if isinstance(value, MethodType) and value.__self__ is owner:
            self._scan(value.__func__, type(owner))
        elif is_module and (name in _MODULE_NAMES or isinstance(value, Tensor)):
            return  # the signature covers this attribute
        elif not isinstance(getattr(type(owner), name, None), property):  # a property's own reads are observed
            expr = f"{self._assign_name(attributes)}[{name!r}]" if name in attributes else f"{owner_expr}.{name}"
            self._record(expr, f"{label}.{name}".lstrip("."), value)

    def _record(self, expr: str, label: str, value: Any, names: Names = _ALL_FUNCTIONS) -> None:
        """Record a value that build may read. names: all names in the code that reads the value."""
        if isinstance(value, ModuleType):
            self._record_module_globals(value, names or self._known_names)
            return
        if isinstance(value, type) and _is_user_code(value):
            self._scan_class(value, _ALL_FUNCTIONS)
            self._scan_class(value, names)
        if not self._mark_seen(expr):
            return
        source = value.__self__ if isinstance(value, BuiltinFunctionType) else value
        if isinstance(source, _GENERATOR_CLASSES):
            self._used_generators.append((source, _pickle_state(source), _SHARED_GENERATORS.get(id(source), label)))
        elif is_constant(value) or (isinstance(value, Tensor | np.ndarray) and not isinstance(value, FakeTensor)):
            self.values[expr] = label, value
            self._scan(value)
        elif id(value) in self._objects:
            self.values[expr] = label, value  # compared by identity; its attributes get their own expressions
        elif isinstance(value, dict | list | tuple | deque | set):
            self.values[f"len({expr})"] = f"the length of {label}", len(value)
            if len(value) <= MAX_ITEMS and _count_nested(value) <= MAX_NESTED:
                for key, item in _list_items(value):
                    if is_constant(key):
                        name = repr(key) if type(key) in (int, str) else self._assign_name(key)
                        self._record(f"{expr}[{name}]", f"{label}[{key!r}]", item)
        elif isinstance(value, MethodType):
            self._record(f"{expr}.__self__", label, value.__self__)
            self._scan(value.__func__, type(value.__self__))
        elif isinstance(value, partial):
            for part in ("func", "args", "keywords"):
                self._record(f"{expr}.{part}", f"{label}.{part}", getattr(value, part))
        elif isinstance(value, Namespace | SimpleNamespace):
            self._record(f"{expr}.__dict__", label, vars(value))
        elif isinstance(value, _OBSERVED_CLASSES) or (_is_user_code(type(value)) and type(value).__flags__ & 1 << 9):
            self.values[f"type({expr})"] = f"the class of {label}", type(value)
            self._observe(expr, label, value)
            if not self._observed_classes[type(value)]:
                self._record(f"{expr}.__dict__", label, getattr(value, "__dict__", None))

    def _record_module_globals(self, module: ModuleType, names: Names) -> None:
        if module is np:
            names &= {"random"}
        elif not _is_user_code(module) and module not in (random, np.random):
            return
        values = vars(module)
        for name in names & values.keys():
            if self._mark_seen(id(module), name, names):  # visit once: modules may refer to each other
                self._record(f"{self._assign_name(values)}[{name!r}]", f"{module.__name__}.{name}", values[name], names)

    def _scan(self, function: Any, cls: type | None = None) -> None:
        """Record the globals, closures and defaults that a function and its callees may read. cls: a method's class."""
        while isinstance(function, FunctionType) and function.__globals__.get("__name__", "").startswith("torch."):
            function = getattr(function, "__wrapped__", None)  # torch and FX decorate some functions
        if not isinstance(function, FunctionType) or not _is_user_code(function) or not self._mark_seen(function, cls):
            return
        code, values = function.__code__, function.__globals__
        names, global_names, assigned_names = _collect_names(code)
        self._known_names |= names
        self._assigned_names |= assigned_names
        for name in global_names & values.keys():
            self._record(f"{self._assign_name(values)}[{name!r}]", name, values[name], names)
        for name in names & sys.modules.keys():  # modules imported inside the function
            self._record(name, name, sys.modules[name], names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                self._record(f"{self._assign_name(cell)}.cell_contents", name, cell.cell_contents, names)
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part):
                label = f"{part} of {function.__qualname__}"
                self._record(f"{self._assign_name(function)}.{part}", label, getattr(function, part), names)
        for scanned_class in [*self._observed_classes] if names & {"type", "__class__"} else [cls]:
            if scanned_class is not None:
                self._scan_class(scanned_class, names)

    def _scan_class(self, cls: type, names: Names) -> None:
        if issubclass(cls, Enum) or not self._mark_seen(cls, names):
            return
        for base in filter(_is_user_code, cls.__mro__):
            for name, member in [*vars(base).items()]:
                function = getattr(member, _FUNCTION_ATTRIBUTES.get(type(member), ""), member)
                if isinstance(function, FunctionType):
                    if names is _ALL_FUNCTIONS or name in names or (name[:2] == "__" and name != "__init__"):
                        self._scan(function, cls)
                elif name in names and name[:2] != "__" and not hasattr(member, "__get__"):
                    self._record(f"{self._assign_name(base)}.{name}", f"{base.__name__}.{name}", member, names)


def _list_items(value: Any) -> list[tuple[Any, Any]]:
    """Return the (key, item) pairs of a dict or a sequence. Returns an empty list for any other value."""
    if isinstance(value, dict):
        return [*value.items()]
    return [*enumerate(value)] if isinstance(value, list | tuple | deque) else []


def _count_nested(value: Any) -> int:
    """Count the items of a container and its nested containers. Stop above MAX_NESTED: containers may be cyclic."""
    count, containers = 0, [value]
    while containers and count <= MAX_NESTED:
        container = containers.pop()
        items = _list_items(vars(container) if isinstance(container, Namespace | SimpleNamespace) else container)
        count += len(items)
        containers += [item for _, item in items]
    return count


def is_constant(value: Any) -> bool:
    """True for a value that cannot change. Items of a tuple must be constants too, and must not be functions."""
    if isinstance(value, tuple | frozenset):
        return all(is_constant(item) and not callable(item) for item in value)
    return is_plain(value) or isinstance(value, Number)


def _is_user_code(value: Any) -> bool:
    """True if a function, class or module is in the user's code. Library values are assumed to be constant."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] not in _LIBRARIES


def _pickle_state(generator: Any) -> bytes:
    try:
        return pickle.dumps(generator)
    except Exception:  # random.SystemRandom has no state
        return b""


@lru_cache(4096)
def _collect_names(code: CodeType) -> tuple[Names, Names, Names]:
    """Return, for a code object and its nested functions: all names, global names, and assigned names."""
    names, global_names, assigned_names = {*code.co_names}, set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        kind, _, scope = instruction.opname.partition("_")
        if scope in ("GLOBAL", "NAME") and kind == "LOAD":
            global_names.add(instruction.argval)
        elif scope in ("GLOBAL", "NAME", "ATTR", "DEREF") and kind != "LOAD":
            assigned_names.add(instruction.argval)
    for nested in [_collect_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]:
        for own, inner in zip((names, global_names, assigned_names), nested, strict=True):
            own.update(inner)
    return frozenset(names), frozenset(global_names), frozenset(assigned_names)
