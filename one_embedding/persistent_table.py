"""Snapshot readers and writers with OneFlow's signatures: their first argument is a list with the store folder."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..engine.checks import validate_arguments
from ..engine.errors import OptionError
from ..snapshots import exchange

AnyPath = str | os.PathLike[str]
Paths = Sequence[AnyPath] | AnyPath
P = ParamSpec("P")
T = TypeVar("T")


def _with_paths(make: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Paths, P], T]:
    """Return a function that accepts `paths` as its first argument and otherwise works like `make`."""

    @wraps(make)
    def call(paths: Paths, *args: P.args, **kwargs: P.kwargs) -> T:
        return make(_store_folder(paths), *args, **kwargs)

    call.__doc__ = f"""`tierbed.{make.__name__}` with OneFlow's first argument. Other arguments and errors are the same.

    Args:
        paths: The store folder, `<persistent_path>/<embedding name>`, or a list with this one item.

    Raises:
        OptionError: If `paths` is anything else.
    """
    signature = inspect.signature(make)
    path, *others = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=[path.replace(name="paths"), *others])  # type: ignore[attr-defined]
    return validate_arguments()(call)


make_persistent_table_reader = _with_paths(exchange.make_persistent_table_reader)
make_persistent_table_writer = _with_paths(exchange.make_persistent_table_writer)


def _store_folder(paths: Any) -> Path:
    """Return the one folder in `paths`. OneFlow's `paths` lists a folder per rank; such a list raises OptionError."""
    folders = list(paths) if isinstance(paths, (list, tuple)) else [paths]
    remedy = "give [<persistent_path>/<embedding name>]"
    if len(folders) != 1 or not isinstance(folders[0], (str, os.PathLike)):
        raise OptionError(f"paths={paths!r}: an embedding has one store folder; {remedy}")
    folder = Path(folders[0])
    if re.fullmatch(r"\d+-\d+", folder.name) and not folder.exists():
        raise OptionError(
            f"paths={paths!r}: there is no folder {folder.name!r}. OneFlow has one folder for each rank, but "
            f"tierbed has one folder for all ranks; {remedy}"
        )
    return folder
