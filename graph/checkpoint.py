"""All that training goes on from, in one folder: parameters, buffers, optimizers, schedules, random state, and rows.

    checkpoint/
        graph.msgpack          plain values, sealed; they name tensors by number
        tensors.safetensors    those tensors; its checksum is in graph.msgpack
        rows/<number>/<name>   the snapshot of each embedding, in the order of the graph's modules

The folder is made aside and renamed when all of it is on the disk: it is there whole or not at all.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..engine.embedding import MultiTableMultiColumnEmbedding
from ..engine.errors import SnapshotError
from ..engine.store.durable import fsync_dir, fsync_file, make_folder, read_record, remove_folder, seal, unseal
from .plain_state import decode, encode

FORMAT = 1
STATE, TENSORS, ROWS = "graph.msgpack", "tensors.safetensors", "rows"
_CHUNK = 1 << 24


def embeddings_of(root: nn.Module) -> dict[str, MultiTableMultiColumnEmbedding]:
    """The embeddings under `root`, by path."""
    return {path: m for path, m in root.named_modules() if isinstance(m, MultiTableMultiColumnEmbedding)}


def save(root: nn.Module, state: Mapping[str, Any], folder: Path) -> None:
    """Write `state`, and the rows of all embeddings under `root`. When it returns, the checkpoint survives anything.

    Raises SnapshotError where the folder exists or cannot be written, GraphError for a state that it cannot hold.
    """
    folder = folder.absolute()
    if os.path.lexists(folder):
        raise SnapshotError(f"checkpoint {str(folder)!r} exists: choose another path, or delete it first")
    tensors: list[Tensor] = []
    plain = encode(dict(state), tensors, "state")
    temporary = folder.parent / f".tmp-{folder.name}"
    name = f"{folder.name}-{secrets.token_hex(4)}"  # in a store folder, where names are used once
    try:
        make_folder(folder.parent)
        remove_folder(temporary)
        temporary.mkdir()
        embeddings = embeddings_of(root)
        for number, embedding in enumerate(embeddings.values()):
            embedding.save_rows(temporary / ROWS / str(number) / name)
        # equal bytes are written once for each: safetensors refuses tensors that share memory
        save_file({str(i): t.contiguous().clone() for i, t in enumerate(tensors)}, temporary / TENSORS)
        fsync_file(temporary / TENSORS)
        sealed = seal(
            {
                "format": FORMAT,
                "embeddings": list(embeddings),
                "snapshot": name,
                "checksum": _checksum(temporary / TENSORS),
                "state": plain,
            }
        )
        (temporary / STATE).write_bytes(sealed)
        fsync_file(temporary / STATE)
        fsync_dir(temporary)
        temporary.rename(folder)
        fsync_dir(folder.parent)
    except (OSError, ValueError, SafetensorError) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} was not written: {error}") from error
    finally:
        remove_folder(temporary)


def load(root: nn.Module, folder: Path) -> dict[str, Any]:
    """Load the rows of all embeddings under `root`, and return the state. Everything else is checked before.

    Raises SnapshotError where the checkpoint is missing, damaged or of another graph.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise SnapshotError(f"there is no checkpoint {str(folder)!r}; give the path of one that graph.save wrote")
    try:
        record = unseal(read_record(folder / STATE))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, and this tierbed reads {FORMAT}")
        if _checksum(folder / TENSORS) != record["checksum"]:
            raise ValueError(f"{TENSORS} is damaged: its checksum does not match")
        held = load_file(folder / TENSORS)
        state: dict[str, Any] = decode(record["state"], [held[str(i)] for i in range(len(held))])
    except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} cannot be read: {error}") from error
    embeddings = embeddings_of(root)
    if list(embeddings) != record["embeddings"]:
        raise SnapshotError(
            f"checkpoint {str(folder)!r} has the rows of embeddings {record['embeddings']}, and this graph has "
            f"{list(embeddings)}; load it into the graph that saved it"
        )
    for number, embedding in enumerate(embeddings.values()):
        embedding.load_rows(folder / ROWS / str(number) / record["snapshot"])
    return state


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            checksum = zlib.crc32(part, checksum)
    return checksum
