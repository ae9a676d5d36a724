"""Checks of arguments: numbers, choices, folder names, and paths with `~` and environment variables."""

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
_VARIABLE_PATTERN = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_]\w*))")


def as_int(value: Any, minimum: float = -math.inf, maximum: float = math.inf) -> int | None:
    """Returns the value as an int if it is a whole number from `minimum` to `maximum`, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    number = int(value)
    return number if minimum <= number <= maximum else None


def as_number(value: Any) -> float | None:
    """Returns the value as an int (integral types) or a float (other real types); None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def check_int(name: str, value: Any, expected: str, minimum: float = -math.inf, maximum: float = math.inf) -> int:
    """Returns the option's value as an int from `minimum` to `maximum`. An OptionError's text contains `expected`."""
    number = as_int(value, minimum, maximum)
    if number is None:
        raise OptionError(f"{name}={value!r}: give {expected}")
    return number


def check_budget(name: str, value: Any, allows_zero: bool, alternative: str = "") -> float:
    """Returns the option's value in MiB. With `allows_zero`, 0 is legal too. Error texts end with `alternative`."""
    number = as_number(value)
    if number is None or not (number > 0 or (allows_zero and number == 0)) or number >= 1 << 40:
        raise OptionError(f"{name}={value!r}: give a number of MiB {'>=' if allows_zero else '>'} 0{alternative}")
    return number


def check_auto_budget(name: str, value: Any, allows_zero: bool) -> float | Literal["auto"]:
    """Returns the option's value, "auto" or a number of MiB as in `check_budget`. Raises OptionError."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    return check_budget(name, value, allows_zero, alternative=', or "auto"')


def check_flags(error: type[TierbedError], **flags: object) -> None:
    """Raise `error` for an argument that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise error(f"{name}={value!r}: give True or False")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}")


def is_folder_name(name: Any) -> bool:
    """True for 1 to 200 printable bytes in UTF-8, without path separators or a leading dot."""
    is_plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and not set(name) & set("/\\")
    return is_plain and 1 <= len(name.encode()) <= 200


def expand_path(option: str, path: str) -> str:
    """Returns the path with `${NAME}`, `$NAME` and a leading `~` replaced. Error texts name the path by `option`."""

    def read_variable(match: re.Match[str]) -> str:
        name = match[1] if match[2] is None else match[2]
        if value := os.environ.get(name):
            return value
        problem = f"the environment variable {name!r} is unset or empty"  # otherwise a folder would get this name
        raise OptionError(f"{option}={path!r}: {problem}; set this variable, or give the path without it")

    result = os.path.expanduser(_VARIABLE_PATTERN.sub(read_variable, path))
    if result.startswith("~"):
        user = result.partition("/")[0]
        raise OptionError(f"{option}={path!r}: {user!r} is not a user here; for a folder of that name give './{user}'")
    return result


def bind_arguments(
    function: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns the arguments by name. Raises OptionError, with a suggestion, if an argument is unknown or missing."""
    names = [name for name in signature.parameters if name != "self"]
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if not has_kwargs and (unknown := sorted(set(kwargs) - set(names))):
        raise OptionError(f"{function}: it has no argument {', '.join(unknown)}; {suggest_name(unknown, names)}")
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise OptionError(f"{function}: {error}; its arguments are {', '.join(names)}") from None


def validate_arguments(*names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorate a public function so that an unknown keyword raises OptionError and suggests the nearest argument.

    `names` lists arguments to check against their annotations. The checks are too slow for functions that a step calls.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @cache
        def find_type(argument: str) -> Any:
            return eval(function.__annotations__[argument], inspect.unwrap(function).__globals__)

        @wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            arguments = bind_arguments(name, signature, args, kwargs)
            for argument in names:
                if argument in arguments and not has_type(arguments[argument], find_type(argument)):
                    remedy = "True or False" if find_type(argument) is bool else function.__annotations__[argument]
                    raise OptionError(f"{argument}={arguments[argument]!r:.80}: give {remedy}")
            return function(*args, **kwargs)

        return call

    return decorate


def has_type(value: Any, annotation: Any) -> bool:
    """True if a value fits `annotation`, a type. A container's items are checked only if the type is a Sequence."""
    origin = get_origin(annotation) or annotation
    if origin in (Union, UnionType):
        return any(has_type(value, member) for member in get_args(annotation))
    if origin is Literal:
        return (type(value), value) in [(type(literal), literal) for literal in get_args(annotation)]
    if origin is Any or not isinstance(origin, type | None):
        return True
    if origin is float:
        return isinstance(value, Real) or getattr(value, "ndim", None) == 0
    if origin in (Sequence, Iterable, Collection) and (
        isinstance(value, (str, bytes)) or getattr(value, "ndim", None) == 0
    ):
        return False  # a string is not meant as a sequence of characters, and a scalar tensor has no items
    if origin is Sequence and isinstance(value, (list, tuple)):
        return all(has_type(item, element) for element in get_args(annotation) for item in value)
    if origin is int:
        return isinstance(value, Integral)
    return value is None if origin is None else isinstance(value, origin)


def suggest_name(unknown: Iterable[str], names: Sequence[str]) -> str:
    """Returns advice on an unknown name: a similar name from `names`, or the list of all `names`."""
    for name in sorted(unknown):
        if matches := difflib.get_close_matches(name, names, 1):
            return f"did you mean {matches[0]}?"
    return f"it has {', '.join(names)}"
