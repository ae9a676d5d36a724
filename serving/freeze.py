"""`freeze` makes a copy of a trained model that looks up served rows, and has the dense weights of the same version.

A `FrozenModel` has a copy of the model for each version, whose dense weights are views of the version's file. These
copies never change. A call takes the copy for the current version once, so it needs no lock, and a refresh in another
thread cannot mix two versions. `Served.refresh` makes the next copy before it replaces the current version.
"""

from __future__ import annotations

import copy
import os
import zipfile
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from ..embedding.modules.embedding import MultiTableMultiColumnEmbedding
from ..embedding.modules.torch_modules import Embedding, EmbeddingBag
from ..embedding.tables.names import make_path_name
from ..engine.errors import OptionError, ServingError
from ..engine.ops.embedding_base import EmbeddingBase
from ..graph.graph import Graph
from ..graph.trace.names import map_unwrapped_names
from ..jagged.collections.embedding_collections import EmbeddingBagCollection
from ..jagged.tbe.module import TableBatchedEmbeddingBags
from ..jagged.tensors.jagged_tensor import JaggedTensor
from ..jagged.tensors.keyed_jagged_tensor import KeyedJaggedTensor
from .frozen_modules import (
    ROWS,
    ROWS_ID,
    FrozenEmbedding,
    FrozenEmbeddingBag,
    FrozenEmbeddingBagCollection,
    FrozenLookup,
    register_rows,
)
from .served import Served, ServedVersion

_PROGRAM_PREFIX = "model."  # a FrozenModel's weights have this prefix in exported programs
_keys = count()
_KNOWN_FORWARDS = [cls.forward for cls in (MultiTableMultiColumnEmbedding, Embedding, EmbeddingBag)]


class FrozenModel(nn.Module):
    """A model over a serving folder, made by `freeze` or `load_program`. Any number of threads may call it.

    Attributes:
        key: The model's number in `ServedVersion.models`.
        model: The module for the current version. It never changes, so use it if several calls must see one version.
    """

    model: nn.Module

    def __init__(self, template: nn.Module, served: Served, state_names: Iterable[str], is_program: bool) -> None:
        """`template`: a model with FrozenEmbeddings. `state_names`: the weights that a version must have."""
        super().__init__()
        self._served, self._is_program, self._needs_tensors = served, is_program, False
        self._state_names = frozenset(name for name in state_names if name.rpartition(".")[2] not in (ROWS_ID, ROWS))
        self.key = next(_keys)  # not `id(self)`: while torch.export traces, `self` is a proxy
        self.model, self.training = template, False
        served.add_model(self)

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.compile skips this function and compiles what it calls. So a compiled model takes its version here too.
        return self._served.current.models[self.key](*args, **kwargs)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The current module's `forward`; torch.export reads its signature."""
        return self.model.forward

    def bind(self, version: ServedVersion) -> nn.Module:
        """Returns a copy of the model for a version. Raises ServingError if the version does not fit the model."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        weights = dict(self.model.named_parameters(remove_duplicate=False)) | buffers
        memo: dict[int, Any] = {}  # what takes the place of objects in the copy, by `id`
        rows = {}
        for name in [name for name in buffers if name.rpartition(".")[2] == ROWS_ID]:
            lookup = FrozenLookup.unpack(weights.pop(name.removesuffix(ROWS_ID) + ROWS))
            rows_id = weights.pop(name)
            rows[id(rows_id)] = lookup.find_rows(version)
            memo[id(rows_id)] = register_rows(rows[id(rows_id)])
        for module in self.model.modules():
            if isinstance(module, FrozenEmbedding):
                memo[id(module.rows)] = rows[id(module.tierbed_rows_id)]
                memo[id(module.spec)] = module.spec
        memo[id(vars(self.model).get("served_rows", self))] = []
        self._take_weights(version, lookup, weights, memo)
        module = _copy_program(self.model, memo) if self._is_program else copy.deepcopy(self.model, memo)
        module.served_rows = list(rows.values())  # type: ignore[assignment]  # keeps them while the module exists
        return module

    def _take_weights(
        self, version: ServedVersion, lookup: FrozenLookup, weights: dict[str, Tensor], memo: dict[int, Any]
    ) -> None:
        """Add the version's dense weights to `memo`, and the model's own weights if the version has none."""
        if version.tensors is None and self._needs_tensors:
            remedy = "publish with graph.publish, or with tensors=model.state_dict()"
            raise ServingError(f"version {version.version} has no dense weights, and earlier versions had: {remedy}")
        tensors = version.tensors or {}
        for name, weight in weights.items():
            own_name = name.removeprefix(_PROGRAM_PREFIX) if self._is_program else name
            names = [lookup.prefix + own_name, lookup.prefix + lookup.renamed.get(own_name, own_name)]
            published = next((published for published in names if published in tensors), None)
            if published is None:
                continue
            new = tensors[published]
            if (new.shape, new.dtype) != (weight.shape, weight.dtype):
                difference = f"{new.dtype} {list(new.shape)}, and the model's is {weight.dtype} {list(weight.shape)}"
                problem = f"tensor {published!r} of version {version.version} is {difference}"
                raise ServingError(f"{problem}: freeze the model that was published")
            memo[id(weight)] = nn.Parameter(new, requires_grad=False) if isinstance(weight, nn.Parameter) else new
        missing = [name for name, weight in weights.items() if name in self._state_names and id(weight) not in memo]
        if version.tensors is not None and missing:
            name = missing[0].removeprefix(_PROGRAM_PREFIX) if self._is_program else missing[0]
            problem = f"version {version.version} has no tensor for the model's {name!r}"
            first = ", ".join(map(repr, [*tensors][:8])) or "none"
            remedy = "publish all weights; if the model is a part of the published one, give its name there as prefix="
            raise ServingError(f"{problem}; its first tensors are {first}: {remedy}")
        self._needs_tensors |= version.tensors is not None
        for weight in weights.values():
            memo.setdefault(id(weight), weight)

    def train(self, mode: bool = True) -> Self:
        """Refuse training. Raises OptionError."""
        if mode:
            raise OptionError("train(True): a frozen model's rows are read-only; train the model that you froze")
        return self

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        remedy = "convert its arguments and results"
        raise OptionError(
            f"a frozen model has mapped files on the CPU, so it cannot move or change its dtype: {remedy}"
        )


def freeze(model: nn.Module, served: Served, prefix: str = "") -> FrozenModel:
    """Make a copy of a model, in evaluation mode, that looks up served rows. The model does not change.

    Each tierbed embedding, collection and table-batched embedding becomes a module over the rows of the same name. If
    the version has tensors, the model's parameters and persistent buffers are the version's, by their names in
    `model.state_dict()`; otherwise they are copied from the model. Calls follow `served.refresh()`: each call has rows
    and weights of one version. `torch.compile(frozen, fullgraph=True)` and `torch.export.export(frozen, ...)` work;
    compiled models follow refreshes too, and exported ones with `load_program`.

    Args:
        model: A module that computes predictions. For a `Graph`, give the module that `build` calls, with its prefix.
        served: The folder, from `open_served`.
        prefix: The model's name inside the published model, such as "model" if a graph published `self.model`.

    Raises:
        OptionError: If the model has no embedding or cannot be copied.
        ServingError: If the folder has no such embedding or weight, or another dim, dtype or table. A later version
            for which this is true is refused by `served.refresh()`.

    Example:

        >>> served = tierbed.serving.open_served("serving")
        >>> frozen = tierbed.serving.freeze(model, served)
        >>> predictions = frozen(ids)
    """
    if not isinstance(model, nn.Module) or isinstance(model, Graph):
        remedy = "for a graph, give the module that build calls: freeze(graph.model, served, prefix='model')"
        raise OptionError(f"model: got a {type(model).__name__}; give a torch.nn.Module; {remedy}")
    _check_served(served)
    version = served.current
    paths = {module: path for path, module in model.named_modules() if isinstance(module, EmbeddingBase)}
    if not paths:
        raise OptionError(f"model: {type(model).__name__} has no tierbed embedding; give a model that has one")
    prefix += "." * bool(prefix)
    weights = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first_names: dict[int, str] = {}  # by weight
    holder = nn.Module()  # so that the model itself may be a wrapper
    holder.model = model
    plain = map_unwrapped_names(holder, [f"model.{name}" for name, _ in weights])
    published = {name: plain[f"model.{first_names.setdefault(id(weight), name)}"][6:] for name, weight in weights}
    renamed = {name: other for name, other in published.items() if other != name}
    memo: dict[int, Any] = {}
    for embedding, path in paths.items():
        given = [] if embedding.name_source == "path" else [embedding.name]
        other = [] if embedding.name_source == "given" else [make_path_name(path), make_path_name(prefix + path)]
        name = next((name for name in (*given, *other) if name in version.embeddings), (*given, *other)[0])
        memo[id(embedding)] = _freeze_embedding(embedding, FrozenLookup.of(embedding, name, prefix, renamed), version)
    try:
        template = copy.deepcopy(model, memo)
    except Exception as error:
        remedy = "freeze the module that computes predictions, without loaders, optimizers and wrappers"
        raise OptionError(f"model: {type(model).__name__} cannot be copied: {error}; {remedy}") from error
    for module in template.modules():
        if type(module) is EmbeddingBagCollection:
            module.__class__ = FrozenEmbeddingBagCollection
        elif isinstance(module, TableBatchedEmbeddingBags):
            module.freeze()
    return FrozenModel(template.eval().requires_grad_(False), served, template.state_dict(), is_program=False)


def load_program(program: str | os.PathLike[str] | torch.export.ExportedProgram, served: Served) -> FrozenModel:
    """Load a frozen model that was exported by `torch.export`, usually in another process.

    The program gets the rows and dense weights of the current version, and follows `served.refresh()`, as the frozen
    model does. The weights in the file are not used if versions have tensors.

    Args:
        program: The path of a file from `torch.export.save`, or the loaded program.
        served: The folder, from `open_served`.

    Raises:
        OptionError: If it is no program of a frozen model.
        ServingError: As for `freeze`.

    Example:

        >>> torch.export.save(torch.export.export(frozen, (ids,)), "model.pt2")
        >>> predict = tierbed.serving.load_program("model.pt2", tierbed.serving.open_served("serving"))
        >>> predictions = predict(ids)
    """
    _check_served(served)
    if not isinstance(program, torch.export.ExportedProgram):
        if not zipfile.is_zipfile(program):
            raise OptionError(f"program={str(program)!r}: give a file from torch.export.save")
        with torch.serialization.safe_globals([KeyedJaggedTensor, JaggedTensor]):  # as example inputs of the program
            program = torch.export.load(program)
    if not any(name.rpartition(".")[2] == ROWS_ID for name in program.state_dict):
        raise OptionError("program: it has no frozen embedding; export the result of freeze")
    return FrozenModel(program.module(), served, program.state_dict, is_program=True)


def _check_served(served: Any) -> None:
    if not isinstance(served, Served):
        raise OptionError(f"served={served!r:.80}: give the result of open_served")


def _copy_program(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Returns a program's copy with the tensors in `memo`. Its code is shared, so torch.compile need not run again."""
    result = object.__new__(type(module))
    vars(result).update(vars(module))
    for tensors in ("_parameters", "_buffers"):
        vars(result)[tensors] = {name: memo.get(id(old), old) for name, old in vars(module)[tensors].items()}
    vars(result)["_modules"] = {name: _copy_program(child, memo) for name, child in module.named_children()}
    return result


def _freeze_embedding(embedding: EmbeddingBase, lookup: FrozenLookup, version: ServedVersion) -> FrozenEmbedding:
    if type(embedding).forward not in _KNOWN_FORWARDS:
        raise OptionError(
            f"embedding {lookup.name!r}: {type(embedding).__name__} has a forward of its own, and freeze "
            "cannot copy it; move it to a module that calls a tierbed embedding"
        )
    rows = lookup.find_rows(version)
    if isinstance(embedding, EmbeddingBag):
        return FrozenEmbeddingBag(rows, lookup, embedding)
    return FrozenEmbedding(rows, lookup)
