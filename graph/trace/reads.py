"""Finds the Python values that `build` reads while it is traced. They become constants of the step.

Reads of attributes are observed: while `build` runs, the classes of the graph's modules, and of objects that these
hold, have a `__getattribute__`. Reads of globals, closures and default arguments cannot be observed, so they are found
in the code of the functions that `build` may call.

The result has a place for each value: an expression, such as `o3['cfg'].temp`, that reads the value as it is now.
"""

from __future__ import annotations

import dis
import pickle
import random
import sys
from argparse import Namespace
from contextlib import suppress
from enum import Enum
from functools import cached_property, lru_cache, partial
from threading import get_ident
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace, TracebackType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...engine.errors import GraphError
from ...engine.ops.rows_contract import EmbeddingBase
from .signature import is_plain

MOST_ITEMS = 64  # of a list, dict or tuple whose items have places

_OURS = __name__.partition(".")[0]
_LIBRARIES = {"torch", "numpy", _OURS, *sys.stdlib_module_names}
_WATCHED = (nn.Module, Optimizer, LRScheduler, GradScaler)  # classes of torch whose attributes users change
_OF_MODULES = frozenset(vars(nn.Module()))  # the signature has what matters of these
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_DRAWN = (random, np.random)
_FUNCTIONS = {property: "fget", staticmethod: "__func__", classmethod: "__func__", cached_property: "func"}
_READ = object.__getattribute__


class Reads:
    """A block in which the calling thread's reads are found.

    places: by expression, the user's name for it. names: the objects that the expressions name.

    GraphError at the end of the block if `build` drew numbers from Python's or NumPy's generators.
    """

    def __init__(self, root: nn.Module) -> None:
        self.places: dict[str, str] = {}
        self.names: dict[str, Any] = {}
        self._root = root
        self._thread = get_ident()
        self._paths: dict[int, tuple[str, str]] = {}  # the expression and label of each watched object, by id
        self._noted: set[Any] = set()
        self._generators: dict[int, tuple[Any, bytes, str]] = {}
        self._hooked: list[type] = []
        self._known_names: set[str] = set()  # all names in the code that was scanned

    def __enter__(self) -> Reads:
        for path, module in self._root.named_modules():
            self._watch(self._name(module), path, module)
        self._scan(type(self._root).build, type(self._root))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for cls in reversed(self._hooked):
            del cls.__getattribute__
        drawn = [name for generator, before, name in self._generators.values() if _state(generator) != before]
        if drawn and error is None:
            raise GraphError(
                f"build draws random numbers from {drawn[0]}, which would be frozen into the step; draw them by torch "
                "(torch.rand, torch.randint), or outside, and pass them to the graph as a tensor"
            )

    def _name(self, value: Any) -> str:
        name = f"o{id(value)}"
        self.names[name] = value
        return name

    def _watch(self, expression: str, label: str, value: Any) -> None:
        """Observe the attributes of an object from now on."""
        cls = type(value)
        self._name(value)  # keeps it, so that no other object gets its id
        self._paths[id(value)] = expression, label
        if cls not in self._noted:
            self._noted.add(cls)
            ours = cls.__module__.partition(".")[0] == _OURS or isinstance(value, EmbeddingBase)
            if cls.__getattribute__ is _READ and not ours:
                cls.__getattribute__ = self._hook()  # type: ignore[method-assign]
                self._hooked.append(cls)
            self._scan_class(cls, frozenset())
        if isinstance(value, nn.Module):
            for hooks in map(vars(value).__getitem__, _HOOKS):
                for key, hook in hooks.items():
                    self._note(f"{self._name(hooks)}[{key}]", f"a hook of {label or 'the graph'}", hook)

    def _hook(self) -> Any:
        def read(owner: Any, name: str) -> Any:
            value = _READ(owner, name)
            if name[:2] != "__" and get_ident() == self._thread:
                self._see(owner, name, value)
            return value

        return read

    def _see(self, owner: Any, name: str, value: Any) -> None:
        path, key = self._paths.get(id(owner)), (id(owner), name)
        if path is None or key in self._noted:
            return
        self._noted.add(key)
        is_module = isinstance(owner, nn.Module)
        if (is_module and (name in _OF_MODULES or isinstance(value, Tensor))) or not name.isidentifier():
            return
        expression, label = path
        attributes = vars(owner) if is_module else {}  # faster to read than the module itself
        if isinstance(value, MethodType) and value.__self__ is owner:
            self._scan(value.__func__, type(owner))
        elif not isinstance(getattr(type(owner), name, None), property):  # what a property reads is seen as well
            own = f"{self._name(attributes)}[{name!r}]" if name in attributes else f"{expression}.{name}"
            self._note(own, f"{label}.{name}".lstrip("."), value)

    def _note(self, expression: str, label: str, value: Any, names: frozenset[str] = frozenset()) -> None:
        """Note a value that build may read. names: what the code that names it reads of it."""
        if isinstance(value, ModuleType):
            self._note_python_module(value, names or frozenset(self._known_names))
            return
        if isinstance(value, type) and _is_own(value):
            self._scan_class(value, names, has_objects=True)
        if expression in self._noted:
            return
        self._noted.add(expression)
        generator = value.__self__ if isinstance(value, BuiltinFunctionType) else value
        if isinstance(generator, _GENERATORS):
            self._generators.setdefault(id(generator), (generator, _state(generator), label))
        elif is_constant(value) or (isinstance(value, Tensor) and not isinstance(value, FakeTensor)):
            self.places[expression] = label
            if isinstance(value, FunctionType):
                self._scan(value)
        elif id(value) in self._paths:
            self.places[expression] = label  # an object that has another place already: by identity
        elif isinstance(value, dict | list | tuple) and len(value) <= MOST_ITEMS:
            self.places[f"len({expression})"] = f"the length of {label}"
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in [*items]:
                if type(key) in (int, str):
                    self._note(f"{expression}[{key!r}]", f"{label}[{key!r}]", item)
        elif isinstance(value, MethodType):
            self._note(f"{expression}.__self__", label, value.__self__)
            self._scan(value.__func__, type(value.__self__))
        elif isinstance(value, partial):
            for part in ("func", "args", "keywords"):
                self._note(f"{expression}.{part}", f"{label}.{part}", getattr(value, part))
        elif isinstance(value, Namespace | SimpleNamespace):
            for key, item in [*vars(value).items()]:
                self._note(f"{expression}.{key}", f"{label}.{key}", item)
        elif isinstance(value, _WATCHED) or (_is_own(type(value)) and type(value).__flags__ & 1 << 9):
            self.places[f"type({expression})"] = f"the class of {label}"
            self._watch(expression, label, value)
            if isinstance(value, nn.Module):
                for path, child in [*value.named_modules(prefix=label)][1:]:
                    self._watch(self._name(child), path, child)

    def _note_python_module(self, module: ModuleType, names: frozenset[str]) -> None:
        if module is np:
            names &= {"random"}
        elif not _is_own(module) and module not in _DRAWN:
            return
        for name in names & vars(module).keys():
            place = f"{self._name(vars(module))}[{name!r}]"
            if (place, names) not in self._noted:  # modules may name each other
                self._noted.add((place, names))
                self._note(place, f"{module.__name__}.{name}", vars(module)[name], names)

    def _scan(self, function: Any, cls: type | None = None) -> None:
        """Note what a function reads by name, and what functions that it names do. cls: the class of its object."""
        key = function, cls
        if not isinstance(function, FunctionType) or not _is_own(function) or key in self._noted:
            return
        self._noted.add(key)
        names, variables, imported = _names_in(function.__code__)
        self._known_names |= names
        values = function.__globals__
        for name in variables & values.keys():
            self._note(f"{self._name(values)}[{name!r}]", name, values[name], names)
        for name in imported & sys.modules.keys():
            self._note(name, name, sys.modules[name], names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                self._note(f"{self._name(cell)}.cell_contents", name, cell.cell_contents, names)
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part):
                label = f"{part} of {function.__name__}"
                self._note(f"{self._name(function)}.{part}", label, getattr(function, part), names)
        if cls is not None:
            self._scan_class(cls, names)

    def _scan_class(self, cls: type, names: frozenset[str], has_objects: bool = False) -> None:
        """Note what is read of a class by these names. has_objects: whether code that names it may make objects."""
        key = cls, names, has_objects
        if key in self._noted or issubclass(cls, Enum):
            return
        self._noted.add(key)
        for base in filter(_is_own, cls.__mro__):
            for name, member in [*vars(base).items()]:
                function = getattr(member, _FUNCTIONS.get(type(member), ""), member)
                if isinstance(function, FunctionType):
                    if has_objects or name in names or (name[:2] == "__" and name != "__init__"):
                        self._scan(function, cls)
                elif name in names and name[:2] != "__" and not hasattr(member, "__get__"):
                    self._note(f"{self._name(base)}.{name}", f"{base.__name__}.{name}", member, names)


def is_constant(value: Any) -> bool:
    """Whether a value cannot change: a plain value, or a tuple of these."""
    return all(map(is_constant, value)) if isinstance(value, tuple) else is_plain(value)


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
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """All names in a code and its nested functions, and the names of globals and of imported modules among them."""
    names, variables, imported = set(code.co_names), set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imported.add(instruction.argval)
    for nested in code.co_consts:
        if isinstance(nested, CodeType):
            for mine, its in zip((names, variables, imported), _names_in(nested), strict=True):
                mine |= its
    return frozenset(names), frozenset(variables), frozenset(imported)
