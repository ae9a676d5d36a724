"""Checkpoints: parameters, buffers, optimizers, schedulers, random states and rows in one folder.

`graph.save` writes a graph's state, and `save_checkpoint` writes a plain loop's state. Both write this folder:

    checkpoint/
        graph.msgpack          plain values, sealed with a checksum; refers to tensors by name
        tensors.safetensors    the tensors; its checksum is in graph.msgpack
        rows/<number>/<name>   a snapshot per embedding, in the order of the graph's modules

Optimizer and scheduler states are stored as plain values and named tensors, so loading runs no code. The folder is
written under a temporary name and renamed once it is on disk, so it is complete or absent. With `overwrite`,
the new folder is exchanged atomically with the old one, and then the old one is removed.

With several ranks, each rank writes its shard of the rows. After the ranks have compared checksums, rank 0 writes
everything else, including its own buffers. `ranks` in graph.msgpack holds the other ranks' random states.

In graph.msgpack, `of` is "graph" or "loop", for a plain loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
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

from ...distributed.sendable import to_bytes
from ...distributed.world import World
from ...embedding.optim.resumed_rows import remember_run_ids
from ...embedding.saving.background_saving import CheckpointPart
from ...embedding.state_dict.model_snapshots import load_rows, save_rows
from ...embedding.state_dict.saved_rows import EXTRA_STATE_KEY, SnapshotEmbedding
from ...engine.checks import check_choice, check_flags, is_folder_name
from ...engine.checksum import crc32
from ...engine.durable import UnsyncedError, atomic_folder, check_exchange, fsync_file, make_temporary_path, seal
from ...engine.errors import (
    GraphError,
    InputError,
    OptimizerError,
    OptionError,
    SnapshotError,
    StoreError,
    TierbedError,
)
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.table.background_save import SaveHandle
from ...engine.table.change_observers import format_still_saving
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.selection import ALL, Selection
from ..passes.collectives import find_common_world
from ..trace.names import as_path, map_unwrapped_names
from . import folders
from .folders import LOADING_ERRORS, STATE_FILE, TENSOR_FILE, compute_checksum, read_checkpoint
from .optimizer_set import find_embeddings

_TYPES: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "list": list, "tuple": tuple}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in _TYPES.items()}
_PLAIN_TYPES = bool | int | float | str | bytes
_RESERVED = ("", "__metadata__")  # names that safetensors does not allow for tensors
_MAX_ITEMS = 1 << 16  # largest number of items in a container; `unseal` accepts no more
_REMEDY = "leave it out of the state, or save graph.state_dict() your own way"
_OBJECT_NAMES = {"graph": "graph", "loop": "model"}  # what error texts call the saved object
RandomStates = list[Tensor]  # states of a process's random generators
_unfinished: set[Path] = set()  # the checkpoints that this process is writing
log = logging.getLogger("tierbed")


def encode(value: Any, tensors: dict[str, Tensor], label: str, name: str = "") -> Any:
    """Encode containers as [tag, items] and tensors as ["tensor", name], adding the tensors to `tensors`.

    A tensor's name is its path of keys, joined by dots. Values of other types raise a GraphError about `label`.
    """
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested and not value.is_meta
        if not is_dense or not _can_store_dtype(value.dtype):
            raise GraphError(
                f"a checkpoint cannot hold {label}, a tensor of {value.dtype}, {value.layout}, on {value.device}. Use "
                f"a dense tensor of another dtype, or register a buffer with persistent=False, or {_REMEDY}"
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
                f"{label} has {len(value)} items, but a container in a checkpoint holds at most {_MAX_ITEMS}; use a "
                "tensor, or several containers"
            )
        items = []
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(key) is not str and not (type(key) is int and _fits_64_bits(key)):
                raise GraphError(
                    f"{label} has the key {key!r}, but keys in a checkpoint are strings or 64-bit integers; {_REMEDY}"
                )
            encoded = encode(item, tensors, f"{label}[{key!r}]", f"{name}.{key}" if name else str(key))
            items.append([key, encoded] if isinstance(value, dict) else encoded)
        return [_TAGS[type(value)], items]
    for plain_type in get_args(_PLAIN_TYPES):  # a subclass such as NumPy's float64 becomes the plain type
        if isinstance(value, plain_type) and (plain_type is not int or _fits_64_bits(value)):
            return plain_type(value)
    raise GraphError(
        f"{label} is a {type(value).__name__}{' of over 64 bits' * isinstance(value, int)}, which a checkpoint cannot "
        f"hold; {_REMEDY}"
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Decode the result of `encode`. Raises ValueError or KeyError for anything else."""
    if not isinstance(value, list):
        if not isinstance(value, _PLAIN_TYPES | NoneType):
            raise ValueError(f"a value is a {type(value).__name__}")
        return value
    tag, content = value
    if tag == "tensor":
        return tensors[content]
    if tag not in _TYPES:
        raise ValueError(f"unknown kind {tag!r}")
    if tag in ("list", "tuple"):
        return _TYPES[tag](decode(item, tensors) for item in content)
    for key, _ in content:
        if type(key) not in (str, int):
            raise ValueError(f"the key {key!r} is neither a string nor an integer")
    return _TYPES[tag]({key: decode(item, tensors) for key, item in content})


def _fits_64_bits(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 64


@cache
def _can_store_dtype(dtype: torch.dtype) -> bool:
    try:
        as_safetensors({"": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError, TypeError, ValueError):  # safetensors versions differ in their dtypes
        return False
    return True


def get_world(embeddings: Mapping[str, EmbeddingBase]) -> World:
    """Return the world whose ranks save and load together. A single process is a world of one rank."""
    return find_common_world(dict(embeddings)) or World.single()


@contextmanager
def _open_atomic_folder(world: World, label: str, folder: Path, overwrite: bool) -> Iterator[Path]:
    """Run `durable.atomic_folder` on rank 0, and raise its OS errors as SnapshotError."""
    stack = ExitStack()

    @_convert_to_snapshot_errors(folder)
    def begin() -> None:
        stack.enter_context(atomic_folder(folder, overwrite))

    world.call_on_rank_0(f"{label}: its folder", begin)
    try:
        yield make_temporary_path(folder)
    except BaseException:
        stack.__exit__(*sys.exc_info())
        raise
    world.call_on_rank_0(f"{label}: in place", _convert_to_snapshot_errors(folder)(stack.close))


def _check_equal_on_ranks(world: World, label: str, plain_values: Any, tensors: Mapping[str, Tensor]) -> None:
    """Compare values that must be equal on all ranks. If two ranks differ, raise GraphError on all ranks."""
    if world.size == 1:
        return
    rank_checksums: list[dict[str, int]] = world.all_gather_object(
        f"{label}: state",
        lambda: {
            "values that are not tensors": crc32(msgpack.packb(plain_values)),
            **{name: crc32(to_bytes(tensor).numpy().data) for name, tensor in tensors.items()},
        },
    )
    names = dict.fromkeys(name for checksums in rank_checksums for name in checksums)
    if conflicts := [name for name in names if len({checksums.get(name) for checksums in rank_checksums}) > 1]:
        raise GraphError(
            f"{label}: ranks have different values of {', '.join(conflicts[:5])}{' and more' * (len(conflicts) > 5)}, "
            "but a checkpoint stores one; train these values with an optimizer of the graph, or keep them in a buffer"
        )


def gather_random_states(world: World, label: str, own_states: RandomStates) -> list[RandomStates]:
    """Return the random states of every rank except rank 0."""
    own_bytes = [state.cpu().numpy().tobytes() for state in own_states]
    bytes_by_rank: list[list[bytes]] = world.all_gather_object(f"{label}: random numbers", lambda: own_bytes)
    return [[torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in states] for states in bytes_by_rank[1:]]


def select_random_state(world: World, rank_0_states: RandomStates, other_states: list[RandomStates]) -> RandomStates:
    """Return this rank's random state from a checkpoint. A rank without a saved state keeps its current state."""
    if world.rank == 0:
        return rank_0_states
    return other_states[world.rank - 1] if world.rank <= len(other_states) else [torch.get_rng_state()]


def parse_new_folder(
    root: nn.Module, path: Any, overwrite: bool, kind: Any = None, background: bool = False, extra: Any = None
) -> Path:
    """Check the arguments of a save, and return the new checkpoint's path.

    Raises SnapshotError, InputError, OptionError or GraphError.
    """
    world, label = get_world(_find_saved_embeddings(root)), "checking a checkpoint"
    parse = partial(_parse_folder, path, overwrite, kind, background, extra)
    folder: Path = world.call_on_all_ranks(f"{label}: its path", parse)
    shared_values = {"name": folder.name, "overwrite": overwrite, "background": background}
    world.call_on_all_ranks(f"{label}: its name", lambda: None, shared_values)
    world.call_on_rank_0(f"{label}: its folder", lambda: _check_can_write(folder, overwrite))
    return folder


def _parse_folder(path: Any, overwrite: Any, kind: Any, background: Any, extra: Any) -> Path:
    check_flags(InputError, overwrite=overwrite, background=background)
    if kind is not None:
        check_choice("kind", kind, ("full", "checkpoint"))
    if background and kind == "checkpoint":
        raise OptionError(
            "background=True, kind='checkpoint': a save in the background writes every row; leave out kind, or leave "
            "out background, because a RocksDB checkpoint takes little time"
        )
    if extra is not None and not isinstance(extra, Mapping):
        raise InputError(f"extra={extra!r}: give a dict of plain values and tensors, or None")
    folder = as_path(path).absolute()
    if not is_folder_name(folder.name) or len(folder.name.encode()) > 200 - 9:
        raise SnapshotError(
            f"checkpoint {str(folder)!r} cannot be used: its name has to be 1 to {200 - 9} printable bytes, without "
            "'\\' and without a leading '.'"
        )
    return folder


def _check_can_write(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not os.path.lexists(folder / STATE_FILE):
        raise SnapshotError(
            f"{str(folder)!r} exists and is not a checkpoint, so it is not overwritten: choose another path"
        )
    if not overwrite:
        raise SnapshotError(f"checkpoint {str(folder)!r} exists: choose another path, or save with overwrite=True")
    try:
        check_exchange(folder)
    except OSError as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} cannot be overwritten: {error}. Use another path") from error


def save(
    root: nn.Module,
    state: Mapping[str, Any],
    folder: Path,
    overwrite: bool = False,
    rows_kind: str | None = None,
    kind: str = "graph",
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
) -> SaveHandle | None:
    """Write `state` and the rows of all embeddings under `root`. The checkpoint is durable on return.

    rows_kind: the kind of the rows' snapshots; None for the cheapest. kind: "graph", or "loop" if the state consists of
    `model` and `training`. With `overwrite`, the old checkpoint's snapshots in store folders are replaced too.
    extra: the user's values. With `background`, only copies the state, and returns the save, which writes
    full snapshots while training continues. Raises SnapshotError if the checkpoint cannot be written, and GraphError
    for a state that a checkpoint cannot hold or that differs between ranks. Raises StoreError while another save runs.
    """
    embeddings = _find_saved_embeddings(root)
    world, label = get_world(embeddings), f"saving checkpoint {folder.name!r}"
    # a unique name, because all snapshots in a store folder need different names
    snapshot_name = world.call_on_rank_0(f"{label}: its rows' name", lambda: f"{folder.name}-{secrets.token_hex(4)}")
    tensors: dict[str, Tensor] = {}
    model_state = state if kind == "graph" else state["model"]
    names = map_unwrapped_names(root, [*model_state, *(versions := read_versions(state) or {})])
    state = _rename_entries(state, names, {names[path]: version for path, version in versions.items()}, kind)
    contents = world.call_on_all_ranks(f"{label}: state", lambda: _make_contents(state, tensors, kind, extra or {}))
    training, model = (EXTRA_STATE_KEY, "") if kind == "graph" else ("training", "model.")
    random_states = state[training]["random"] if training in state else []
    buffers = {model + name for name in map_unwrapped_names(root, dict(root.named_buffers())).values()}
    rank_0_keys = {key for key in tensors if key in buffers or key.startswith(f"{training}.random.")}
    shared_tensors = {key: tensor for key, tensor in tensors.items() if key not in rank_0_keys}
    plain_values = [contents.get(field) for field in ("state", "metadata", "extra")]
    _check_equal_on_ranks(world, label, plain_values, shared_tensors)
    contents |= {"embeddings": list(embeddings), "snapshot": snapshot_name}
    if other_states := gather_random_states(world, label, random_states):
        contents["ranks"] = encode(other_states, tensors, "random numbers of ranks", "ranks")
    managers = {path: embedding.table_handle().snapshot_manager for path, embedding in embeddings.items()}
    for manager in managers.values():
        manager.try_complete()  # another save may only wait for its end
    ending = ExitStack()
    try:
        temporary = ending.enter_context(_new_checkpoint(world, label, folder, overwrite, snapshot_name, managers))
        row_folders = _list_row_folders(temporary, snapshot_name, embeddings)
        # a copy, because training may go on, and safetensors refuses tensors that share memory
        copies = {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in tensors.items() if world.rank == 0}
        write = partial(_write_files, temporary, contents, copies, folder)
        if background:
            part = CheckpointPart(f"checkpoint {folder.name!r}", write if world.rank == 0 else lambda: None, ending)
            return save_rows([*embeddings.values()], row_folders, "full", part)
        world.call_on_rank_0(f"{label}: parameters", write)
        save_rows([*embeddings.values()], row_folders, rows_kind)
    except BaseException:
        ending.__exit__(*sys.exc_info())
        raise
    ending.close()
    return None


@contextmanager
def _new_checkpoint(
    world: World, label: str, folder: Path, overwrite: bool, snapshot_name: str, managers: Mapping[str, Any]
) -> Iterator[Path]:
    """Yield a new checkpoint's temporary folder, and rename it when the block ends. Another thread may end the block.

    If the block raises, removes the folder, and the checkpoint's snapshots in store folders. managers: the embeddings'
    `SnapshotManager`s, by path. Raises StoreError while this process writes a checkpoint to the same path.
    """
    if folder in _unfinished:
        raise StoreError(format_still_saving(f"checkpoint {folder.name!r}"))
    _unfinished.add(folder)
    try:
        replaced_snapshots, is_complete = _read_row_snapshots(folder), False
        try:
            with _open_atomic_folder(world, label, folder, overwrite) as temporary:
                yield temporary
            is_complete = True
        finally:
            # Ctrl-C may arrive after the checkpoint is renamed; its snapshots must then stay
            saved_names = [] if is_complete else [snapshot.name for snapshot in _read_row_snapshots(folder).values()]
            for manager in managers.values() if not is_complete and snapshot_name not in saved_names else ():
                with contextlib.suppress(SnapshotError):  # raise the first error only
                    manager.remove_failed_snapshot(snapshot_name)
        for path, snapshot in replaced_snapshots.items():  # drop the old checkpoint's snapshots from store folders
            try:
                if path in managers:
                    managers[path].remove_replaced_snapshot(snapshot)
            except TierbedError as error:
                log.warning("snapshot %r of the replaced checkpoint stays in its store: %s", snapshot.name, error)
    finally:
        _unfinished.discard(folder)


def _list_row_folders(checkpoint: Path, snapshot_name: str, embeddings: Mapping[str, SnapshotEmbedding]) -> list[Path]:
    return [checkpoint / folders.ROWS_FOLDER / str(index) / snapshot_name for index in range(len(embeddings))]


def _make_contents(
    state: Mapping[str, Any], tensors: dict[str, Tensor], kind: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the contents of STATE_FILE: the state without its tensors."""
    plain_state = encode(dict(state), tensors, "state")
    metadata = encode(read_versions(state), tensors, "metadata")
    plain_extra = encode(dict(extra), tensors, "extra", "extra")
    return {"format": folders.FORMAT, "of": kind, "extra": plain_extra, "state": plain_state, "metadata": metadata}


def _write_files(temporary: Path, contents: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    with _convert_to_snapshot_errors(folder):
        save_file(tensors, temporary / TENSOR_FILE)
        fsync_file(temporary / TENSOR_FILE)
        file_fields = {"checksum": compute_checksum(temporary / TENSOR_FILE), "created": time.time_ns()}
        try:
            sealed = seal({**contents, **file_fields})
        except ValueError as error:
            raise GraphError(
                f"the plain values in the state cannot be written together: {error}; keep large values, such as a "
                "module's get_extra_state, in tensors"
            ) from error
        (temporary / STATE_FILE).write_bytes(sealed)
        fsync_file(temporary / STATE_FILE)


@contextlib.contextmanager
def _convert_to_snapshot_errors(folder: Path) -> Iterator[None]:
    """Raise the block's errors as SnapshotError about the checkpoint `folder`."""
    try:
        yield
    except UnsyncedError as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} was written, but not synced: {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} was not written: {error}") from error


def load(
    root: nn.Module,
    folder: Path,
    check_state: Callable[[dict[str, Any]], None],
    apply_state: Callable[[dict[str, Any]], None],
    get_current_state: Callable[[], dict[str, Any]],
    selection: Selection = ALL,
    kind: str = "graph",
) -> dict[str, Any]:
    """Load the state with `apply_state`, then the rows of all embeddings under `root`. A failed load changes nothing.

    Returns the `extra` that was saved. Waits for saves in the background first.
    check_state: raises GraphError if a state does not fit. get_current_state: returns the present state. On failure,
    `apply_state` restores the present state. If restoring fails too, no embedding can be used until a load succeeds.
    Raises SnapshotError if the checkpoint is missing, damaged, malformed or belongs to another graph.
    """
    folder = folder.absolute()
    embeddings = _find_saved_embeddings(root)
    world, label = get_world(embeddings), f"loading checkpoint {folder.name!r}"
    for handle in filter(None, (embedding.open_handle for embedding in embeddings.values())):
        handle.snapshot_manager.wait_for_save()  # it may be replacing this checkpoint
    contents, state = world.call_on_all_ranks(f"{label}: reading", lambda: _read_files(folder, list(embeddings), kind))
    state = _rename_for_module(root, state, kind)
    shared = {"checkpoint": contents["snapshot"], "optimizers": selection.includes_state, "convert": selection.converts}
    world.call_on_all_ranks(f"{label}: its id", lambda: None, shared)
    row_folders = _list_row_folders(folder, contents["snapshot"], embeddings)

    def apply_rank_state() -> None:
        training = state.get(EXTRA_STATE_KEY if kind == "graph" else "training")
        if training is not None:
            training["random"] = select_random_state(world, training["random"], contents["ranks"])
        apply_state(state)

    try:
        world.call_on_all_ranks(f"{label}: state", lambda: check_state(state))
        for embedding, path in zip(embeddings.values(), row_folders, strict=True):
            embedding.table_handle(for_load=True).snapshot_manager.check_snapshot_at(path, selection)
        backup = copy_state(get_current_state())
        try:
            world.call_on_all_ranks(f"{label}: loading its state", apply_rank_state)
            load_rows([*embeddings.values()], row_folders, selection)
            remember_run_ids(root.parameters(), embeddings.values())
        except BaseException:
            try:
                apply_state(backup)
            except BaseException:
                for embedding in embeddings.values():
                    embedding.mark_load_failed(f"checkpoint {folder.name!r}")
            raise
    except (GraphError, OptimizerError, *LOADING_ERRORS) as error:
        if isinstance(error, TierbedError) and not isinstance(error, GraphError | OptimizerError):
            raise
        remedy = "; or load it with optimizers=False" if isinstance(error, OptimizerError) and kind == "graph" else ""
        raise SnapshotError(
            f"checkpoint {str(folder)!r} does not fit this {_OBJECT_NAMES[kind]}: {format_error(error)}{remedy}"
        ) from error
    return dict(contents["extra"])


def copy_state(state: Mapping[str, Any]) -> Any:
    """Copy a state to host memory. Lazy parameters without values are not copied."""
    copy = tree_map_only(Tensor, lambda t: t if is_lazy(t) else t.detach().to("cpu", copy=True), dict(state))
    return StateDict(copy, read_versions(state))


class StateDict(OrderedDict[str, Any]):
    """A state_dict with module versions. Torch keeps the versions in an attribute."""

    def __init__(self, items: Mapping[str, Any] = {}, versions: Any = None) -> None:
        super().__init__(items)
        self._metadata = versions


def read_versions(state: Mapping[str, Any]) -> Any:
    """Return the module versions that a state_dict stores, by module path, or None."""
    return getattr(state, "_metadata", None)


def format_error(error: BaseException) -> str:
    """Return the text of an error about a malformed value. A LookupError's own text is only the key."""
    return f"{type(error).__name__} {error}" if isinstance(error, LookupError) else str(error)


def _read_files(folder: Path, embeddings: list[str], kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint's contents and state, and check that it has the rows of `embeddings`. Raises SnapshotError."""
    save_name, load_name = folders.FUNCTION_NAMES[kind]
    if not os.path.isdir(folder):
        raise SnapshotError(f"there is no checkpoint {str(folder)!r}; give the path of one that {save_name} wrote")
    if not os.path.lexists(folder / STATE_FILE):
        names = sorted(file.parent.name for file in folder.glob(f"*/{STATE_FILE}"))
        raise SnapshotError(
            f"the folder {str(folder)!r} is not a checkpoint: it has no file {STATE_FILE}; "
            + (f"it holds the checkpoints {names}: give the path of one" if names else f"give one of {save_name}")
        )
    try:
        contents = folders.read_state_file(folder)
        if (saved_kind := contents["of"]) != kind:
            writer, reader = folders.FUNCTION_NAMES[saved_kind]
            raise ValueError(f"{writer} wrote it, but {load_name} only reads what {save_name} wrote; call {reader}")
        if compute_checksum(folder / TENSOR_FILE) != contents["checksum"]:
            raise ValueError(f"{TENSOR_FILE} is damaged: its checksum does not match")
        tensors = load_file(folder / TENSOR_FILE)
        state = StateDict(decode(contents["state"], tensors), decode(contents["metadata"], tensors))
        contents["ranks"] = decode(contents["ranks"], tensors) if "ranks" in contents else []
        contents["extra"] = decode(contents["extra"], tensors)
        _check_types(state, contents["ranks"], contents["extra"], kind)
    except (OSError, SafetensorError, *LOADING_ERRORS) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} cannot be read: {format_error(error)}") from error
    if embeddings != contents["embeddings"]:
        raise SnapshotError(
            f"checkpoint {str(folder)!r} has the rows of embeddings {contents['embeddings']}, but this "
            f"{_OBJECT_NAMES[kind]} has {embeddings}; load it into the {_OBJECT_NAMES[kind]} that saved it"
        )
    return contents, state


def _rename_for_module(root: nn.Module, state: Any, kind: str) -> Any:
    """Rename the state's entries to the names that `root.load_state_dict` accepts, regardless of module wrappers."""
    model_state, versions = state if kind == "graph" else state["model"], read_versions(state) or {}
    tensors = [*root.named_parameters(recurse=False), *root.named_buffers(recurse=False)]
    own_names = {EXTRA_STATE_KEY, *(name for name, _ in tensors)}
    own_names.update(name for path, child in root.named_children() for name in child.state_dict(prefix=f"{path}."))
    own_by_plain = {plain: own for own, plain in map_unwrapped_names(root, own_names).items()}
    names = {name: own_by_plain.get(name, name) for name in model_state}
    plain_paths = map_unwrapped_names(root, (path for path, _ in root.named_modules(remove_duplicate=False)))
    entries = {path: versions[plain] for path, plain in plain_paths.items() if plain in versions}
    return _rename_entries(state, names, entries, kind)


def _rename_entries(state: Any, names: Mapping[str, str], versions: Mapping[str, Any], kind: str) -> Any:
    model_state = {names[name]: value for name, value in (state if kind == "graph" else state["model"]).items()}
    return StateDict(model_state if kind == "graph" else {**state, "model": model_state}, versions)


def _check_types(state: OrderedDict[str, Any], ranks: Any, extra: Any, kind: str) -> None:
    """Raise ValueError if names, module versions, ranks' random states or `extra` have the wrong type."""
    versions = read_versions(state)
    model_state = state if kind == "graph" else state["model"]
    if not isinstance(model_state, dict) or not all(type(name) is str for name in [*state, *model_state]):
        raise ValueError("a name in the state is not a string")
    if versions is not None and not (
        isinstance(versions, dict)
        and all(type(name) is str and isinstance(entry, dict) for name, entry in versions.items())
        and all(type(entry.get("version")) in (int, NoneType) for entry in versions.values())
    ):
        raise ValueError("the versions of modules are malformed")
    if not (isinstance(ranks, list) and all(isinstance(entry, list) and entry for entry in ranks)):
        raise ValueError("the random states of ranks are malformed")
    if not isinstance(extra, dict):
        raise ValueError(f"extra is a {type(extra).__name__}")


def _find_saved_embeddings(root: nn.Module) -> dict[str, SnapshotEmbedding]:
    """Return the embeddings under `root`, by path. Raises GraphError for rows that a checkpoint cannot hold."""
    embedding_by_path: dict[str, SnapshotEmbedding] = {}
    embeddings = find_embeddings(root)
    for path, embedding in zip(map_unwrapped_names(root, embeddings).values(), embeddings.values(), strict=True):
        if not isinstance(embedding, SnapshotEmbedding):
            raise GraphError(
                f"{path} is a {type(embedding).__name__}, and a checkpoint cannot hold its rows; leave it out of the "
                "saved graph, or save its rows and the graph's state_dict() separately"
            )
        embedding_by_path[path] = embedding
    return embedding_by_path


def _read_row_snapshots(folder: Path) -> dict[str, Snapshot]:
    """Return a checkpoint's snapshots by embedding path, or an empty dict if the snapshots cannot be read."""
    with contextlib.suppress(SnapshotError):
        return read_checkpoint(folder).snapshots
    return {}
