"""Readers and writers of snapshots with OneFlow's signatures, which take the store folder in a list."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..engine.checks import checked_arguments
from ..engine.errors import OptionError
from ..snapshots import exchange

AnyPath = str | os.PathLike[str]
Paths = Sequence[AnyPath] | AnyPath
P = ParamSpec("P")
T = TypeVar("T")


def _with_paths(make: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Paths, P], T]:
    """The same function, whose first argument is `paths`."""

    @wraps(make)
    def call(paths: Paths, *args: P.args, **kwargs: P.kwargs) -> T:
        return make(_store_folder(paths), *args, **kwargs)

    call.__doc__ = f"""As `tierbed.{make.__name__}`, with its arguments and errors after the first.

    paths: the store folder, `<persistent_path>/<embedding name>`, by itself or as the one item of a list. OptionError
    for anything else.
    """
    signature = inspect.signature(make)
    path, *others = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=[path.replace(name="paths"), *others])  # type: ignore[attr-defined]
    return checked_arguments()(call)


make_persistent_table_reader = _with_paths(exchange.make_persistent_table_reader)
make_persistent_table_writer = _with_paths(exchange.make_persistent_table_writer)


def _store_folder(paths: Any) -> Path:
    """The one store folder of `paths`; OneFlow has a list with a folder for each rank. Raises OptionError."""
    given = list(paths) if isinstance(paths, (list, tuple)) else [paths]
    if len(given) != 1 or not isinstance(given[0], (str, os.PathLike)):
        raise OptionError(
            f"paths={paths!r}: an embedding has one store folder; give [<persistent_path>/<embedding name>]"
        )
    folder = Path(given[0])
    if re.fullmatch(r"\d+-\d+", folder.name) and not folder.exists():
        raise OptionError(
            f"paths={paths!r}: there is no folder {folder.name!r}, which is OneFlow's name for the folder of a rank; "
            "give [<persistent_path>/<embedding name>]"
        )
    return folder
