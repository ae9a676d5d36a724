"""Names of tensors in errors and in the printed graph, and paths that users give."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...engine.errors import InputError
from .built import HasBuild


def tensor_names(root: nn.Module) -> dict[int, str]:
    """The path of each parameter and buffer under `root`, by id; of a tied tensor, the first path."""
    names: dict[int, str] = {}
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        names.setdefault(id(tensor), name)
    return names


def name_of(root: HasBuild, tensor: Tensor) -> str:
    """A tensor's path under `root`, else its name in the closure or globals of `root.build`, else its shape."""
    path = tensor_names(root).get(id(tensor)) or _closure_name(root.build, tensor)
    return repr(path) if path else f"of shape {tuple(tensor.shape)}"


def _closure_name(function: Callable[..., Any], tensor: Tensor) -> str | None:
    variables = inspect.getclosurevars(function)
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        if value is tensor:
            return name
        if isinstance(value, nn.Module):
            for path, parameter in value.named_parameters(name):
                if parameter is tensor:
                    return path
    return None


def identifiers(wanted: list[str], reserved: list[str] | None = None) -> list[str]:
    """Each name as an identifier, made unique: `model.emb` becomes model_emb, a second `adam` becomes adam_1.

    No identifier is one of the `reserved`.
    """
    taken, result = ["self", *(reserved or [])], []
    for name in wanted:
        base = "".join(c if c.isalnum() else "_" for c in name)
        candidate, count = base, 0
        while candidate in taken:
            count += 1
            candidate = f"{base}_{count}"
        taken.append(candidate)
        result.append(candidate)
    return result


def path_of(path: Any) -> Path:
    """A user's argument as a path. InputError if it is of another type."""
    try:
        return Path(path)
    except TypeError:
        raise InputError(f"path={path!r}: give a string or a pathlib.Path") from None
