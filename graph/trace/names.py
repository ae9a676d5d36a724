"""Find names of tensors and modules. Also defines `HasBuild`, the base class of modules with a method `build`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...embedding.tables.names import WRAPPERS
from ...engine.errors import InputError
from ...engine.ops.embedding_base import Unscriptable


class HasBuild(Unscriptable, nn.Module):
    """A module whose method `build` is one step, such as a subclass of `Graph`."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Subclasses must define this method."""
        raise NotImplementedError(f"{type(self).__name__} defines no build(self, ...)")


def map_tensor_names(root: nn.Module) -> dict[int, str]:
    """Map the id of each parameter and buffer under `root` to its path; a tied tensor gets its first path."""
    return {id(tensor): name for name, tensor in [*root.named_buffers(), *root.named_parameters()]}


def find_tensor_name(root: HasBuild, tensor: Tensor) -> str:
    """Return a tensor's path under `root`. Otherwise return the tensor's name in `build`'s scope, or its shape."""
    path = map_tensor_names(root).get(id(tensor)) or _find_closure_name(root.build, tensor)
    return repr(path) if path else f"of shape {tuple(tensor.shape)}"


def _find_closure_name(function: Callable[..., Any], tensor: Tensor) -> str | None:
    variables = inspect.getclosurevars(function)
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        if value is tensor:
            return name
        if isinstance(value, nn.Module):
            for path, parameter in value.named_parameters(name):
                if parameter is tensor:
                    return path
    return None


def make_identifiers(names: list[str], reserved: list[str] | None = None) -> list[str]:
    """Turn each name into a unique identifier: `model.emb` becomes model_emb, a second `adam` becomes adam_1."""
    used_names, identifiers = {"self", *(reserved or [])}, []
    for name in names:
        base = "".join(c if c.isalnum() else "_" for c in name)
        candidates = chain([base], (f"{base}_{number}" for number in count(1)))
        identifiers.append(next(candidate for candidate in candidates if candidate not in used_names))
        used_names.add(identifiers[-1])
    return identifiers


def _find_wrapped_attribute(module: nn.Module) -> str | None:
    """Return the name of the attribute that holds a wrapper's inner module; None if `module` is not a wrapper."""
    names = (WRAPPERS.get(cls.__name__) for cls in type(module).__mro__)
    return next((name for name in names if isinstance(getattr(module, name or "", None), nn.Module)), None)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as DistributedModelParallel, DistributedDataParallel, OptimizedModule."""
    while (name := _find_wrapped_attribute(module)) is not None:
        module = module.get_submodule(name)
    return module


def map_unwrapped_names(root: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map paths of modules and tensors under `root` to their paths without wrappers."""
    plain_names = {name: f"{name}." for name in names}
    for path, module in reversed([*root.named_modules(remove_duplicate=False)]):  # inner wrappers first
        if (child := _find_wrapped_attribute(module)) is not None:
            inner = f"{path}.{child}."
            wrapped = (name for name, plain_name in plain_names.items() if plain_name.startswith(inner))
            plain_names |= {name: f"{path}.{plain_names[name].removeprefix(inner)}" for name in wrapped}
    return {name: plain_name[:-1] for name, plain_name in plain_names.items()}


def as_path(path: Any) -> Path:
    """Convert a user's argument to a path. Raises InputError for an argument that is no path."""
    try:
        return Path(path)
    except TypeError:
        raise InputError(f"path={path!r}: give a string or a pathlib.Path") from None
