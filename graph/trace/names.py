"""What a trace needs of a graph: its `build`, names of tensors for errors and files, and paths that users give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...embedding.tables.names import WRAPPERS
from ...engine.errors import InputError
from ...engine.ops.rows_contract import NoTorchScript


class HasBuild(NoTorchScript, nn.Module):
    """A module whose `build` is one step, such as a subclass of `Graph`."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step, written by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} defines no build(self, ...)")


def tensor_names(root: nn.Module) -> dict[int, str]:
    """The path of each parameter and buffer under `root`, by id; of a tied tensor, the first path."""
    return {id(tensor): name for name, tensor in [*root.named_buffers(), *root.named_parameters()]}


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
    """Each name as a unique identifier, none of `reserved`: `model.emb` becomes model_emb, a second `adam` adam_1."""
    taken, names = {"self", *(reserved or [])}, []
    for name in wanted:
        base = "".join(c if c.isalnum() else "_" for c in name)
        candidates = chain([base], (f"{base}_{number}" for number in count(1)))
        names.append(next(one for one in candidates if one not in taken))
        taken.add(names[-1])
    return names


def _wrapped(module: nn.Module) -> str | None:
    """The name of the module that a wrapper wraps; None for any other module."""
    names = (WRAPPERS.get(kind.__name__) for kind in type(module).__mro__)
    return next((name for name in names if isinstance(getattr(module, name or "", None), nn.Module)), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in wrappers, such as DistributedModelParallel, DistributedDataParallel or that of torch.compile."""
    while (name := _wrapped(module)) is not None:
        module = module.get_submodule(name)
    return module


def plain_names(root: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Paths under `root` of modules and tensors, each with the path that it has without wrappers under `root`."""
    plain = {name: f"{name}." for name in names}
    for path, module in reversed([*root.named_modules(remove_duplicate=False)]):  # inner wrappers first
        if (child := _wrapped(module)) is not None:
            inner = f"{path}.{child}."
            changed = (name for name, one in plain.items() if one.startswith(inner))
            plain |= {name: f"{path}.{plain[name].removeprefix(inner)}" for name in changed}
    return {name: one[:-1] for name, one in plain.items()}


def path_of(path: Any) -> Path:
    """A user's argument as a path. InputError if it is of another type."""
    try:
        return Path(path)
    except TypeError:
        raise InputError(f"path={path!r}: give a string or a pathlib.Path") from None
