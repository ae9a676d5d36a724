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


def _accept_paths(factory: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Paths, P], T]:
    """Return a function that accepts `paths` as its first argument and otherwise works like `factory`."""

    @wraps(factory)
    def wrapper(paths: Paths, *args: P.args, **kwargs: P.kwargs) -> T:
        return factory(_parse_store_folder(paths), *args, **kwargs)

    wrapper.__doc__ = f"""`tierbed.{factory.__name__}` with OneFlow's first argument. All else is the same.

    Args:
        paths: The store folder, `<persistent_path>/<embedding name>`, or a list with this one item.

    Raises:
        OptionError: If `paths` is anything else.
    """
    signature = inspect.signature(factory)
    path, *others = signature.parameters.values()
    wrapper.__signature__ = signature.replace(parameters=[path.replace(name="paths"), *others])  # type: ignore[attr-defined]
    return validate_arguments()(wrapper)


make_persistent_table_reader = _accept_paths(exchange.make_persistent_table_reader)
make_persistent_table_writer = _accept_paths(exchange.make_persistent_table_writer)


def _parse_store_folder(paths: Any) -> Path:
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
