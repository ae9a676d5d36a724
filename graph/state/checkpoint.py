"""All that training continues from, in one folder: parameters, buffers, optimizers, schedules, random state, and rows.

`graph.save` writes one of a graph, `save_checkpoint` one of a plain loop:

    checkpoint/
        graph.msgpack          plain values, sealed; they name tensors
        tensors.safetensors    those tensors; a parameter or buffer by its name. Its checksum is in graph.msgpack
        rows/<number>/<name>   the snapshot of each embedding, in the order of the graph's modules

States of optimizers and schedulers are plain values and named tensors, so that loading them runs no code.
The folder is written under a temporary name and renamed when all of it is on the disk, so it is complete or absent. A
folder that replaces another is exchanged with it atomically, and the old folder is removed after that.

Over ranks, each of them writes its shard of the rows, and rank 0 the rest, after checksums of all ranks agreed.
Buffers are those of rank 0; `ranks` in graph.msgpack has the random state of each of the others.

Format 1 numbered the tensors. Format 3 is of plain loops alone, and has `of`: "loop".
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import msgpack  # type: ignore[import-untyped]
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as as_safetensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from ...distributed.sendable import bytes_of
from ...distributed.world import World
from ...embedding.optim.dense_part import note_run
from ...embedding.state_dict.model_snapshots import load_rows, save_rows
from ...embedding.state_dict.saved_rows import EXTRA, SavedRows
from ...embedding.tables.names import bare_name
from ...engine.checks import check_flags, is_folder_name
from ...engine.durable import (
    UnsyncedError,
    atomic_folder,
    check_exchange,
    fsync_file,
    seal,
    temporary_path,
)
from ...engine.errors import GraphError, InputError, OptimizerError, SnapshotError, TierbedError
from ...engine.ops.rows_contract import EmbeddingBase
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.selection import ALL, Selection
from ..passes.collectives import refuse_worlds
from ..trace.names import path_of, plain_names
from .kept import CALLS, FORMATS, MALFORMED, ROWS, STATE, TENSORS, checksum, kept, read_format
from .optimizer_set import embeddings_of

_KINDS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "list": list, "tuple": tuple}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in _KINDS.items()}
_PLAIN = bool | int | float | str | bytes
_RESERVED = ("", "__metadata__")  # names that no tensor in a safetensors file has
_MAX_ITEMS = 1 << 16  # of a container that `unseal` reads
_REMEDY = "leave it out of the state, or save graph.state_dict() your own way"
_THINGS = {"graph": "graph", "loop": "model"}  # what a checkpoint is of, as messages call it
Random = list[Tensor]  # the states of a process's generators of random numbers
log = logging.getLogger("tierbed")


def encode(value: Any, tensors: dict[str, Tensor], where: str, name: str = "") -> Any:
    """`value` with containers as [tag, items] and tensors as ["tensor", name]; tensors are added to `tensors`.

    A name is the keys that lead to the tensor, joined by dots. GraphError, which names `where`, for any other value.
    """
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested and not value.is_meta
        if not is_dense or not _fits_dtype(value.dtype):
            raise GraphError(
                f"{where} is a tensor of {value.dtype}, {value.layout}, on {value.device}, which a checkpoint cannot "
                f"hold; make it a dense one of another dtype, register a buffer with persistent=False, or {_REMEDY}"
            )
        while name in tensors or name in _RESERVED:
            name += "'"
        tensors[name] = value.detach()
        return ["tensor", name]
    if value is None:
        return None
    if type(value) in _TAGS:
        if len(value) > _MAX_ITEMS:
            raise GraphError(
                f"{where} has {len(value)} items, and a container in a checkpoint at most {_MAX_ITEMS}; keep them in a "
                "tensor, or in several containers"
            )
        items = []
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(key) is not str and not (type(key) is int and _fits_64_bits(key)):
                raise GraphError(
                    f"{where} has the key {key!r}, and keys in a checkpoint are strings or 64-bit integers; {_REMEDY}"
                )
            encoded = encode(item, tensors, f"{where}[{key!r}]", f"{name}.{key}" if name else str(key))
            items.append([key, encoded] if isinstance(value, dict) else encoded)
        return [_TAGS[type(value)], items]
    for kind in get_args(_PLAIN):  # a subclass, such as NumPy's float64, becomes the plain type
        if isinstance(value, kind) and (kind is not int or _fits_64_bits(value)):
            return kind(value)
    raise GraphError(
        f"{where} is a {type(value).__name__}{' of over 64 bits' * isinstance(value, int)}, which a checkpoint cannot "
        f"hold; {_REMEDY}"
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `encode` was given. ValueError, KeyError for anything that `encode` does not return."""
    if not isinstance(value, list):
        if not isinstance(value, _PLAIN | NoneType):
            raise ValueError(f"a {type(value).__name__} among the values")
        return value
    tag, content = value
    if tag == "tensor":
        return tensors[str(content)]  # format 1 of checkpoints had numbers as names
    if tag not in _KINDS:
        raise ValueError(f"unknown kind {tag!r}")
    if tag in ("list", "tuple"):
        return _KINDS[tag](decode(item, tensors) for item in content)
    for key, _ in content:
        if type(key) not in (str, int):
            raise ValueError(f"the key {key!r}, and keys are strings or integers")
    return _KINDS[tag]({key: decode(item, tensors) for key, item in content})


def _fits_64_bits(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 64


@cache
def _fits_dtype(dtype: torch.dtype) -> bool:
    try:
        as_safetensors({"": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError, TypeError, ValueError):  # its versions know different dtypes
        return False
    return True


def shared_world(embeddings: Mapping[str, EmbeddingBase]) -> World:
    """The ranks that save or load a graph together; in a world of one, its methods are plain calls."""
    return refuse_worlds(dict(embeddings)) or World.of_one()


@contextmanager
def _atomic_folder(world: World, op: str, folder: Path, overwrite: bool) -> Iterator[Path]:
    """`durable.atomic_folder`, made by rank 0, whose errors of the system are raised as SnapshotError."""
    block = ExitStack()

    def begin() -> None:
        with _snapshot_errors(folder):
            block.enter_context(atomic_folder(folder, overwrite))

    def end() -> None:
        with _snapshot_errors(folder):
            block.close()

    world.call_on_rank_0(f"{op}: its folder", begin)
    try:
        yield temporary_path(folder)
    except BaseException:
        block.__exit__(*sys.exc_info())
        raise
    world.call_on_rank_0(f"{op}: in place", end)


def _check_equal(world: World, op: str, plain: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raises GraphError on all ranks if a value that training keeps equal differs between them."""
    if world.size == 1:
        return
    sums: list[dict[str, int]] = world.all_gather_object(
        f"{op}: state",
        lambda: {
            "values that are not tensors": zlib.crc32(msgpack.packb(plain)),
            **{name: zlib.crc32(bytes_of(tensor).numpy().data) for name, tensor in tensors.items()},
        },
    )
    every = dict.fromkeys(name for of_rank in sums for name in of_rank)
    if differ := [name for name in every if len({of_rank.get(name) for of_rank in sums}) > 1]:
        raise GraphError(
            f"{op}: ranks have other values of {', '.join(differ[:5])}{' and more' * (len(differ) > 5)}; a checkpoint "
            "holds those of one: train what differs by an optimizer of the graph, or keep it in a buffer"
        )


def others_random(world: World, op: str, own: Random) -> list[Random]:
    """The states of random numbers of every rank but the first."""
    sent = [state.cpu().numpy().tobytes() for state in own]
    ranks: list[list[bytes]] = world.all_gather_object(f"{op}: random numbers", lambda: sent)
    return [[torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in states] for states in ranks[1:]]


def own_random(world: World, first: Random, others: list[Random]) -> Random:
    """The random state of this rank in a checkpoint. A rank without one in it keeps its own."""
    if world.rank == 0:
        return first
    return others[world.rank - 1] if world.rank <= len(others) else [torch.get_rng_state()]


def check_save(root: nn.Module, path: Any, overwrite: bool) -> Path:
    """The folder of a new checkpoint; `overwrite`: an old one may exist. SnapshotError, InputError, GraphError."""
    world, op = shared_world(_saved(root)), "checking a checkpoint"
    folder: Path = world.call_on_all_ranks(f"{op}: its path", lambda: _folder_of(path, overwrite))
    world.call_on_all_ranks(f"{op}: its name", lambda: None, {"name": folder.name, "overwrite": overwrite})
    world.call_on_rank_0(f"{op}: its place", lambda: _check_free(folder, overwrite))
    return folder


def _folder_of(path: Any, overwrite: Any) -> Path:
    check_flags(InputError, overwrite=overwrite)
    folder = path_of(path).absolute()
    if not is_folder_name(folder.name) or len(folder.name.encode()) > 200 - 9:
        raise SnapshotError(
            f"checkpoint {str(folder)!r} cannot be used: its name has to be 1 to {200 - 9} printable bytes, without "
            "'\\' and without a leading '.'"
        )
    return folder


def _check_free(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not os.path.lexists(folder / STATE):
        raise SnapshotError(
            f"{str(folder)!r} exists and is not a checkpoint, and nothing else is overwritten: choose another path"
        )
    if not overwrite:
        raise SnapshotError(
            f"checkpoint {str(folder)!r} exists: choose another path, or delete it first, or save with overwrite=True"
        )
    try:
        check_exchange(folder)
    except OSError as error:
        raise SnapshotError(
            f"checkpoint {str(folder)!r} cannot be overwritten: {error}. Choose another path"
        ) from error


def save(root: nn.Module, state: Mapping[str, Any], folder: Path, overwrite: bool = False, of: str = "graph") -> None:
    """Write `state`, and the rows of all embeddings under `root`. The checkpoint is durable on return.

    folder: from `check_save`. of: whether a "graph" is saved, or a "loop", whose state has a `model` and `training`.
    With `overwrite` the checkpoint replaces an existing one, and its snapshots in store folders replace the old one's.
    Raises SnapshotError if it cannot be written, GraphError for a state that a checkpoint cannot hold, or that differs
    between ranks.
    """
    embeddings = _saved(root)
    world, op = shared_world(embeddings), f"saving checkpoint {folder.name!r}"
    # in a store folder, a name is used once
    name = world.call_on_rank_0(f"{op}: its rows' name", lambda: f"{folder.name}-{secrets.token_hex(4)}")
    tensors: dict[str, Tensor] = {}
    named = state if of == "graph" else state["model"]
    names = plain_names(root, [*named, *(versions := versions_of(state) or {})])
    state = _renamed(state, names, {names[path]: version for path, version in versions.items()}, of)
    record = world.call_on_all_ranks(f"{op}: state", lambda: _record(state, tensors, of))
    training, model = (EXTRA, "") if of == "graph" else ("training", "model.")
    random = state[training]["random"] if training in state else []
    buffers = {model + name for name in plain_names(root, dict(root.named_buffers())).values()}
    own = {key for key in tensors if key in buffers or key.startswith(f"{training}.random.")}
    trained = {key: tensor for key, tensor in tensors.items() if key not in own}
    _check_equal(world, op, [record["state"], record["metadata"]], trained)
    record |= {"embeddings": list(embeddings), "snapshot": name}
    if others := others_random(world, op, random):
        record["ranks"] = encode(others, tensors, "random numbers of ranks", "ranks")
    replaced, is_complete = _rows_in(folder), False
    try:
        with _atomic_folder(world, op, folder, overwrite) as temporary:
            world.call_on_rank_0(f"{op}: parameters", lambda: _write(temporary, record, tensors, folder))
            save_rows([*embeddings.values()], _row_folders(temporary, name, embeddings))
        is_complete = True
    finally:
        # Ctrl-C may come once the checkpoint is in place
        if not is_complete and all(snapshot.name != name for snapshot in _rows_in(folder).values()):
            for embedding in filter(attrgetter("is_open"), embeddings.values()):
                with contextlib.suppress(SnapshotError):  # the first error is the one to raise
                    embedding.table_handle().snapshots.discard_rows(name)
    for path, snapshot in replaced.items():  # those of the replaced checkpoint, in store folders
        try:
            if path in embeddings:
                embeddings[path].table_handle().snapshots.drop_rows(snapshot)
        except TierbedError as error:
            log.warning("snapshot %r of the replaced checkpoint stays in the store folder: %s", snapshot.name, error)


def _row_folders(checkpoint: Path, snapshot: str, embeddings: Mapping[str, SavedRows]) -> list[Path]:
    return [checkpoint / ROWS / str(number) / snapshot for number in range(len(embeddings))]


def _record(state: Mapping[str, Any], tensors: dict[str, Tensor], of: str) -> dict[str, Any]:
    """What the file STATE has of a state: all but its tensors."""
    plain = encode(dict(state), tensors, "state")
    metadata = encode(versions_of(state), tensors, "metadata")
    kind = {} if of == "graph" else {"of": of}
    return {"format": FORMATS[of], **kind, "state": plain, "metadata": metadata}


def _write(temporary: Path, record: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    with _snapshot_errors(folder):
        # equal bytes are written for each tensor: safetensors refuses tensors that share memory
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, temporary / TENSORS)
        fsync_file(temporary / TENSORS)
        written = {"checksum": checksum(temporary / TENSORS), "created": time.time_ns()}
        try:
            sealed = seal({**record, **written})
        except ValueError as error:
            raise GraphError(
                f"the values in the state that are not tensors cannot be written together: {error}; keep large ones, "
                "such as those of a module's get_extra_state, in tensors"
            ) from error
        (temporary / STATE).write_bytes(sealed)
        fsync_file(temporary / STATE)


@contextlib.contextmanager
def _snapshot_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the block as SnapshotError of the checkpoint `folder`."""
    try:
        yield
    except UnsyncedError as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} was written: {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} was not written: {error}") from error


def load(
    root: nn.Module,
    folder: Path,
    check: Callable[[dict[str, Any]], None],
    put: Callable[[dict[str, Any]], None],
    now: Callable[[], dict[str, Any]],
    selection: Selection = ALL,
    of: str = "graph",
) -> None:
    """Load the state by `put`, then the rows of all embeddings under `root`: all or nothing.

    of: as of `save`. `check` raises GraphError if a state does not fit. now: returns the state as it is, which `put`
    restores if the load fails; if that fails as well, no embedding can be used until a load succeeds. selection:
    whether rows are loaded with their state, and whether they are converted. Raises SnapshotError if the checkpoint is
    missing, damaged, malformed or of another graph.
    """
    folder = folder.absolute()
    embeddings = _saved(root)
    world, op = shared_world(embeddings), f"loading checkpoint {folder.name!r}"
    record, state = world.call_on_all_ranks(f"{op}: reading", lambda: _read(folder, list(embeddings), of))
    state = _with_own_names(root, state, of)
    same = {"checkpoint": record["snapshot"], "optimizers": selection.state, "convert": selection.convert}
    world.call_on_all_ranks(f"{op}: its id", lambda: None, same)
    rows = _row_folders(folder, record["snapshot"], embeddings)

    def put_state() -> None:
        training = state.get(EXTRA if of == "graph" else "training")
        if training is not None:
            training["random"] = own_random(world, training["random"], record["ranks"])
        put(state)

    try:
        world.call_on_all_ranks(f"{op}: state", lambda: check(state))
        for embedding, path in zip(embeddings.values(), rows, strict=True):
            embedding.table_handle(for_load=True).snapshots.check_rows(path, selection)
        before = copied(now())
        try:
            world.call_on_all_ranks(f"{op}: loading its state", put_state)
            load_rows([*embeddings.values()], rows, selection)
            note_run(root.parameters(), embeddings.values())
        except BaseException:
            try:
                put(before)
            except BaseException:
                for embedding in embeddings.values():
                    embedding.note_failed(f"checkpoint {folder.name!r}")
            raise
    except (GraphError, OptimizerError, *MALFORMED) as error:
        if isinstance(error, TierbedError) and not isinstance(error, GraphError | OptimizerError):
            raise
        remedy = "; or load it with optimizers=False" if isinstance(error, OptimizerError) and of == "graph" else ""
        raise SnapshotError(
            f"checkpoint {str(folder)!r} does not fit this {_THINGS[of]}: {error_text(error)}{remedy}"
        ) from error


def copied(state: Mapping[str, Any]) -> Any:
    """A copy of a state in host memory; lazy parameters are no values yet, and stay."""
    copy = tree_map_only(Tensor, lambda one: one if is_lazy(one) else one.detach().to("cpu", copy=True), dict(state))
    return StateDict(copy, versions_of(state))


class StateDict(OrderedDict[str, Any]):
    """A state_dict with versions of modules, which torch keeps in an attribute of it."""

    def __init__(self, items: Mapping[str, Any] = {}, versions: Any = None) -> None:
        super().__init__(items)
        self._metadata = versions


def versions_of(state: Mapping[str, Any]) -> Any:
    """The versions of modules in a state_dict by their paths; None without."""
    return getattr(state, "_metadata", None)


def error_text(error: BaseException) -> str:
    """What an error of a malformed value says. That of a lookup is the key alone."""
    return f"{type(error).__name__} {error}" if isinstance(error, LookupError) else str(error)


def _read(folder: Path, embeddings: list[str], of: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record and the state of a checkpoint that has rows of `embeddings`. Raises SnapshotError."""
    saves, loads = CALLS[of]
    if not os.path.isdir(folder):
        raise SnapshotError(f"there is no checkpoint {str(folder)!r}; give the path of one that {saves} wrote")
    if not os.path.lexists(folder / STATE):
        inside = sorted(file.parent.name for file in folder.glob(f"*/{STATE}"))
        raise SnapshotError(
            f"the folder {str(folder)!r} is not a checkpoint, which has a file {STATE}; "
            + (f"it holds the checkpoints {inside}: give the path of one" if inside else f"give one of {saves}")
        )
    try:
        record = read_format(folder)
        if (kind := record.get("of", "graph")) != of:
            raise ValueError(f"{CALLS[kind][0]} wrote it, and {loads} reads those of {saves}; call {CALLS[kind][1]}")
        if checksum(folder / TENSORS) != record["checksum"]:
            raise ValueError(f"{TENSORS} is damaged: its checksum does not match")
        tensors = load_file(folder / TENSORS)
        state = StateDict(decode(record["state"], tensors), decode(record["metadata"], tensors))
        record["ranks"] = decode(record["ranks"], tensors) if "ranks" in record else []
        _check_shape(state, record["ranks"], of)
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} cannot be read: {error_text(error)}") from error
    if [*map(bare_name, embeddings)] != [*map(bare_name, record["embeddings"])]:
        raise SnapshotError(
            f"checkpoint {str(folder)!r} has the rows of embeddings {record['embeddings']}, and this {_THINGS[of]} has "
            f"{embeddings}; load it into the {_THINGS[of]} that saved it"
        )
    return record, state


def _with_own_names(root: nn.Module, state: Any, of: str) -> Any:
    """The state of a checkpoint with the names that `load_state_dict` of `root` takes, whatever wrappers either had."""
    named, versions = state if of == "graph" else state["model"], versions_of(state) or {}
    tensors = [*root.named_parameters(recurse=False), *root.named_buffers(recurse=False)]
    own = {EXTRA, *(name for name, _ in tensors)}
    own.update(name for path, child in root.named_children() for name in child.state_dict(prefix=f"{path}."))
    by_bare = {bare_name(name): name for name in own}
    names = {name: name if name in own else by_bare.get(bare_name(name), name) for name in named}
    bare = {bare_name(path): version for path, version in versions.items()}
    found = {
        path: versions.get(path, bare.get(bare_name(path))) for path, _ in root.named_modules(remove_duplicate=False)
    }
    return _renamed(state, names, {path: version for path, version in found.items() if version is not None}, of)


def _renamed(state: Any, names: Mapping[str, str], versions: Mapping[str, Any], of: str) -> Any:
    named = {names[name]: value for name, value in (state if of == "graph" else state["model"]).items()}
    return StateDict(named if of == "graph" else {**state, "model": named}, versions)


def _check_shape(state: OrderedDict[str, Any], ranks: Any, of: str) -> None:
    """ValueError if the names, the versions of modules, or the random states of ranks are of another type."""
    versions = versions_of(state)
    named = state if of == "graph" else state["model"]
    if not isinstance(named, dict) or not all(type(name) is str for name in [*state, *named]):
        raise ValueError("a name in the state is not a string")
    if versions is not None and not (
        isinstance(versions, dict)
        and all(type(name) is str and isinstance(one, dict) for name, one in versions.items())
        and all(type(one.get("version")) in (int, NoneType) for one in versions.values())
    ):
        raise ValueError("the versions of modules are malformed")
    if not (isinstance(ranks, list) and all(isinstance(one, list) and one for one in ranks)):
        raise ValueError("the random states of ranks are malformed")


def _saved(root: nn.Module) -> dict[str, SavedRows]:
    """The embeddings under `root`, by path. GraphError for rows that no checkpoint can hold."""
    found: dict[str, SavedRows] = {}
    embeddings = embeddings_of(root)
    for path, embedding in zip(plain_names(root, embeddings).values(), embeddings.values(), strict=True):
        if not isinstance(embedding, SavedRows):
            raise GraphError(
                f"{path} is a {type(embedding).__name__}, whose rows no checkpoint holds; leave it out of the graph "
                "that is saved, or save its rows and the graph's state_dict() by themselves"
            )
        found[path] = embedding
    return found


def _rows_in(folder: Path) -> dict[str, Snapshot]:
    """The snapshots in a checkpoint, by the paths of their embeddings; none if they cannot be read."""
    with contextlib.suppress(SnapshotError):
        return kept(folder).rows
    return {}
