"""Checks of arguments: numbers, names of folders, and paths with `~` and environment variables."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from .errors import OptionError, TierbedError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_]\w*))")


def as_int(value: Any, minimum: float = -math.inf, maximum: float = math.inf) -> int | None:
    """A whole number from `minimum` to `maximum` as an int; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    number = int(value)
    return number if minimum <= number <= maximum else None


def as_number(value: Any) -> float | None:
    """A number as a float, or as an int if its type is one of whole numbers; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def int_option(name: str, value: Any, expected: str, minimum: float = -math.inf, maximum: float = math.inf) -> int:
    """The option `name` as an int from `minimum` to `maximum`. OptionError for anything else, which says `expected`."""
    number = as_int(value, minimum, maximum)
    if number is None:
        raise OptionError(f"{name}={value!r}: give {expected}")
    return number


def budget_option(name: str, value: Any, zero: bool, alternative: str = "") -> float:
    """The option `name`, a number of MiB. zero: whether it may be 0. alternative: another remedy. OptionError."""
    number = as_number(value)
    if number is None or not (number > 0 or (zero and number == 0)) or number >= 1 << 40:
        raise OptionError(f"{name}={value!r}: give a number of MiB {'>=' if zero else '>'} 0{alternative}")
    return number


def auto_budget_option(name: str, value: Any, zero: bool) -> float | Literal["auto"]:
    """The option `name`, a number of MiB as in `budget_option`, or "auto". Raises OptionError."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    return budget_option(name, value, zero, alternative=', or "auto"')


def check_flags(error: type[TierbedError], **flags: object) -> None:
    """Raises `error` for an argument that is not True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise error(f"{name}={value!r}: give True or False")


def choice_option(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises OptionError if `value` is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}")


def is_folder_name(name: Any) -> bool:
    """Whether `name` is 1 to 200 printable bytes of UTF-8, without separators and without a leading dot."""
    plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and not set(name) & set("/\\")
    return plain and 1 <= len(name.encode()) <= 200


def expanded(option: str, path: str) -> str:
    """The path with `${NAME}`, `$NAME` and a leading `~` replaced. `option` names it in errors.

    Raises OptionError for a variable that is not set or empty, and for an unknown user, so that no folder gets such a
    name by mistake.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] if match[2] is None else match[2]
        if found := os.environ.get(name):
            return found
        raise OptionError(
            f"{option}={path!r}: the environment variable {name!r} is not set, or empty; set it, or give the folder"
        )

    result = os.path.expanduser(_VARIABLE.sub(value, path))
    if result.startswith("~"):
        user = result.partition("/")[0]
        raise OptionError(f"{option}={path!r}: {user!r} is not a user here; give './{user}' for a folder of that name")
    return result


def check_arguments(
    maker: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments by name. OptionError, which names the nearest one, if `maker` has no such argument or lacks one."""
    names = [name for name in signature.parameters if name != "self"]
    open_ended = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    if not open_ended and (unknown := sorted(set(kwargs) - set(names))):
        raise OptionError(f"{maker}: it has no argument {', '.join(unknown)}; {nearest(unknown, names)}")
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise OptionError(f"{maker}: {error}; its arguments are {', '.join(names)}") from None


def checked_arguments(*typed: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a public function that no step calls: an unknown keyword is an OptionError that names the nearest one.

    typed: arguments whose annotations are checked as well, since the function uses them without a check of its own.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @cache
        def hint(argument: str) -> Any:
            return eval(function.__annotations__[argument], inspect.unwrap(function).__globals__)

        @wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            given = check_arguments(name, signature, args, kwargs)
            for argument in typed:
                if argument in given and not fits(given[argument], hint(argument)):
                    remedy = "True or False" if hint(argument) is bool else function.__annotations__[argument]
                    raise OptionError(f"{argument}={given[argument]!r:.80}: give {remedy}")
            return function(*args, **kwargs)

        return call

    return decorate


def fits(value: Any, kind: Any) -> bool:
    """False if a value cannot have the type that an annotation names. Items are checked of sequences alone."""
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if origin is Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in get_args(kind))
    if origin is Any or not isinstance(origin, type | None):
        return True
    if origin is float:
        return isinstance(value, Real) or getattr(value, "ndim", None) == 0
    if origin in (Sequence, Iterable, Collection) and (
        isinstance(value, (str, bytes)) or getattr(value, "ndim", None) == 0
    ):
        return False  # a text has letters and a scalar has a length in name only
    if origin is Sequence and isinstance(value, (list, tuple)):
        return all(fits(item, element) for element in get_args(kind) for item in value)
    if origin is int:
        return isinstance(value, Integral)
    return value is None if origin is None else isinstance(value, origin)


def nearest(unknown: Iterable[str], names: Sequence[str]) -> str:
    """The remedy for unknown names: the nearest of `names` to the first that has one, else all of them."""
    for name in sorted(unknown):
        if near := difflib.get_close_matches(name, names, 1):
            return f"did you mean {near[0]}?"
    return f"it has {', '.join(names)}"
