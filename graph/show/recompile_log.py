"""Explain why a graph compiled another step: how the call differs from the most similar signature compiled before.

Signatures are quick to compare but contain no names. So each compilation also collects named facts about the call.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..passes.step_epilogue import StepEpilogue
from ..trace.names import HasBuild, map_tensor_names
from ..trace.signature import Call, get_module_hooks, name_arguments

_MAX_SHOWN = 6  # maximum number of differences shown per step
_VALUE = "value"  # facts of this kind are compared only if both traces read the value
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MODULE_KINDS = ("module", "training flag of", "hooks of", "attribute", "parameter", "buffer")

log = logging.getLogger("tierbed")


class Fact(NamedTuple):
    """A fact about a call. Two facts are equal if all fields are equal."""

    text: str  # shown to users
    key: Hashable = None  # differs if two different facts have the same text
    fields: Mapping[str, str] | None = None  # for a tensor: its shape, dtype, strides and so on


_NO_TENSOR, _ABSENT = Fact("no tensor"), Fact("missing")

Facts = dict[tuple[str, str], Fact]  # each key is a kind and a name, such as ("argument", "ids")


class RecompileLog:
    """A log of compiled steps: facts and reasons of the last `limit` steps, and the number and time of all steps."""

    def __init__(self, limit: int) -> None:
        self._facts: deque[Facts] = deque(maxlen=limit)
        self.reasons: deque[str] = deque(maxlen=limit)
        self.num_steps = 0
        self.seconds = 0.0

    def add(self, name: str, new_facts: Facts, seconds: float) -> None:
        """Add a step of the graph `name`. Log the reason for every step except the first."""
        if self._facts:
            differences = min((_find_differences(new_facts, old_facts) for old_facts in reversed(self._facts)), key=len)
            omitted = [f"and {len(differences) - _MAX_SHOWN} more"] * (len(differences) > _MAX_SHOWN)
            shown = "; ".join([*differences[:_MAX_SHOWN], *omitted])
            fallback = "an equal step was evicted, or tensors are tied differently"
            self.reasons.append(f"step {self.num_steps}: {shown or fallback}")
            log.info("%s compiled %s", name, self.reasons[-1])
        self._facts.append(new_facts)
        self.num_steps += 1
        self.seconds += seconds


def collect_facts(
    root: HasBuild,
    call: Call,
    is_dynamic: bool,
    optimizers: Iterable[Optimizer],
    epilogue: StepEpilogue,
    settings: Mapping[str, str],
    values: Mapping[str, tuple[str, Hashable]],
) -> Facts:
    """Return all facts that a compiled step depends on. values: maps names in the user's code to (text, key) pairs."""
    dynamic_dims = call.dynamic_dims if is_dynamic else ()
    facts: Facts = {}
    number = 0
    for name, leaf in zip(name_arguments(root.build, call.arguments), call.leaves, strict=True):
        if isinstance(leaf, Tensor):
            facts["argument", name] = _describe_tensor(leaf, dynamic=[d for i, d in dynamic_dims if i == number])
            number += 1
        else:
            facts["argument", name] = Fact(repr(leaf))
    facts["arguments", ""] = Fact("structure of lists, tuples, dicts and keywords", str(call.spec))
    facts["gradient mode", ""] = Fact(str(torch.is_grad_enabled()))
    facts["default dtype", ""] = Fact(str(torch.get_default_dtype()))
    for kind in ("cpu", "cuda"):
        is_on = torch.is_autocast_enabled(kind)
        facts["autocast on", kind] = Fact(str(torch.get_autocast_dtype(kind)) if is_on else "off")
    for i, optimizer in enumerate(optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        text = f"{type(optimizer).__name__} of {' + '.join(map(str, sizes))} parameters"
        facts["optimizer", str(i)] = Fact(text, (id(optimizer), *sizes))
    text = "as they are" if epilogue.is_identity else "clipped or unscaled"
    facts["gradients", ""] = Fact("accumulated" if epilogue.accumulate_steps > 1 else text)
    facts["gradient scaler", ""] = Fact("none" if epilogue.scaler is None else "GradScaler", epilogue.make_scale_key())
    facts.update({(name, ""): Fact(setting) for name, setting in settings.items()})
    facts.update({(_VALUE, label): Fact(*value) for label, value in values.items()})
    for path, module in root.named_modules():
        hooks = [number for hooks in get_module_hooks(module) for number in hooks]
        facts["module", path] = Fact(type(module).__name__, id(module))
        facts["training flag of", path] = Fact(str(module.training))
        facts["hooks of", path] = Fact(str(len(hooks)), tuple(hooks))
        for name, value in vars(module).items():
            if name not in _MODULE_ATTRIBUTES:
                fact = _describe_tensor(value, id(value)) if isinstance(value, Tensor) else _NO_TENSOR
                facts["attribute", f"{path}.{name}" if path else name] = fact
    names = map_tensor_names(root)
    for parameter in root.parameters():
        facts["parameter", names[id(parameter)]] = _describe_tensor(parameter, id(parameter))
    for buffer in root.buffers():
        facts["buffer", names[id(buffer)]] = _describe_tensor(buffer)
    return facts


def _describe_tensor(tensor: Tensor, identity: int | None = None, dynamic: Collection[int] = ()) -> Fact:
    """Describe a tensor. identity: its `id()`, if another tensor needs another step. dynamic: dynamic dimensions."""
    sizes = ", ".join("any" if d in dynamic else str(size) for d, size in enumerate(tensor.shape))
    shape = f"({sizes}{',' * (tensor.dim() == 1)})"
    fields = {name: str(getattr(tensor, name)) for name in ("dtype", "device", "requires_grad", "layout")}
    strides = str(tensor.stride()) if tensor.layout == torch.strided else "None"
    text = f"{fields['dtype'].removeprefix('torch.')} [{sizes}]"
    return Fact(text, identity, {"shape": shape, **fields, "strides": strides})


def _find_differences(new: Facts, old: Facts) -> list[str]:
    shared_names = new.keys() & old
    names_to_compare = [name for name in [*new, *(old.keys() - new)] if name[0] != _VALUE or name in shared_names]
    changed_names = [name for name in names_to_compare if new.get(name, _ABSENT) != old.get(name, _ABSENT)]
    texts = {name: _describe_difference(new.get(name, _ABSENT), old.get(name, _ABSENT)) for name in changed_names}
    if any(kind == "argument" for kind, _ in texts):
        texts.pop(("arguments", ""), None)
    return [
        f"{kind} {path or 'the graph' if kind in _MODULE_KINDS else path}".rstrip() + f": {text}"
        for (kind, path), text in texts.items()
        if not _is_explained(kind, path, texts)
    ]


def _describe_difference(new: Fact, old: Fact) -> str:
    if new.fields and old.fields:
        fields = [field for field, value in new.fields.items() if value != old.fields[field]]
        if "shape" in fields and "strides" in fields:
            fields.remove("strides")  # strides usually follow from the shape
        return ", ".join(f"{f} {new.fields[f]}, was {old.fields[f]}" for f in fields) or "another tensor"
    return f"{new.text}, was {old.text}" if new.text != old.text else f"another {new.text}"


def _is_explained(kind: str, path: str, changed: dict[tuple[str, str], str]) -> bool:
    """True if another change explains this change: an outer module was replaced or switched by `eval()`."""
    if kind not in _MODULE_KINDS or not path:
        return False
    outer_paths = ["", *accumulate(path.split(".")[:-1], "{}.{}".format)]
    if kind == "training flag of" and any(changed.get((kind, p)) == changed[kind, path] for p in outer_paths):
        return True
    return any(("module", p) in changed for p in (outer_paths if kind == "module" else [*outer_paths, path]))
