"""Snapshots that nobody saved: what the tests of them share."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import zlib
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support import shell
from support.embeddings import contents, make, train
from support.snapshot_parts import in_parts, save_changes_in_parts
from support.stores import options
from tierbed import MultiTableEmbedding, SnapshotError
from tierbed.engine import _core
from tierbed.engine.durable import seal, unseal
from tierbed.engine.store.merging import find_changes
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files.format import make_npy_header
from tierbed.snapshots.store.selection import Types

MANIFEST = "manifest.msgpack"
KINDS = ["full", "incremental", "checkpoint"]
TYPES: list[Types] = [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")]
CRC32C = {"block_based_table_factory": {"checksum": "kCRC32c"}}  # of blocks, which `with_right_checksums` knows
TRAILER_BYTES = 5  # behind a block: its compression, and its checksum
PAGE = 4096  # with which an aligned block begins


def of_rows(types: Types) -> dict[str, Any]:
    dtype, state_dtype = (getattr(torch, type) for type in types)
    return {"tables": 1, "dtype": dtype, "state_dtype": state_dtype}


def save_each_kind(path: Path, types: Types = TYPES[0], **more: Any) -> Path:
    """A folder of snapshots: one of each kind, by that name."""
    with make(options("ssd", path, **more), "adagrad", **of_rows(types)) as embedding:
        for number, kind in enumerate(KINDS):
            train(embedding, range(6 * number, 6 * number + 12))
            embedding.delete(range(3 * number, 3 * number + 3))
            embedding.save_snapshot(kind, kind)
    return path / "rows" / "snapshots"


def save_parts(sound: Path, folder: Path) -> Path:
    """The full one of `save_each_kind` in two parts, and an incremental one over it in three, by these names."""
    parent = in_parts(Snapshot.open(sound / "full"), folder / "full", 2)
    now = Snapshot.open(sound / "incremental")
    changes = find_changes(parent.chunks(), now.chunks())
    save_changes_in_parts(folder / "incremental", parent, now.description, now.manifest.rows, changes, 3)
    return folder


def copied(snapshots: Path, path: Path) -> Path:
    """The snapshots in the store folder of the embedding that has `path`, which is open: it would go back to one."""
    folder = path / "rows" / "snapshots"
    shutil.copytree(snapshots, folder)
    return folder


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """A manifest with a change, sealed again."""
    content = unseal((folder / MANIFEST).read_bytes())
    edit(content)
    (folder / MANIFEST).write_bytes(seal(content))


def write_rows(folder: Path, name: str, rows: NDArray[np.void]) -> None:
    """Other rows in a file of a snapshot; checksums and counts are right."""
    header = make_npy_header(rows.dtype, len(rows))
    (folder / name).write_bytes(header + rows.tobytes())

    def edit(content: dict[str, Any]) -> None:
        files = content["files"]
        was = files.get(name, {"rows": 0})["rows"]
        files[name] = {"rows": len(rows), "bytes": len(header) + rows.nbytes, "crc32": zlib.crc32(rows.tobytes())}
        count = "deleted" if name.startswith("deleted") else "rows"
        content[count] += len(rows) - was

    change(folder, edit)


def write_file(folder: Path, name: str, data: bytes) -> None:
    """Other content of a file of RocksDB in a checkpoint, under the checksum that the manifest has of it."""
    path = folder / "rocksdb" / name
    path.unlink()
    path.write_bytes(data)
    checksum = _core.Crc32c()
    checksum.update(np.frombuffer(data, np.uint8))
    entry = {"bytes": len(data), "crc32c": checksum.finish()}
    change(folder, lambda content: content["rocksdb"]["files"].update({name: entry}))


def blocks_of(data: bytes) -> list[tuple[int, int]]:
    """Where blocks of a file of `CRC32C` begin and end, their trailers behind: where checksums are right."""
    found, begin, crc = [], 0, 0xFFFFFFFF
    for place, byte in enumerate(data):
        if place < begin:
            continue
        crc = _crc32c(crc, byte)
        if data[place + 1 : place + TRAILER_BYTES] == _masked(crc):
            found.append((begin, place))
            begin, crc = place + TRAILER_BYTES, 0xFFFFFFFF
            page = -(-begin // PAGE) * PAGE
            if page <= len(data) and not any(data[begin:page]):  # only zeros are before it
                begin = page
    return found


def with_right_checksums(data: bytes, blocks: list[tuple[int, int]]) -> bytes:
    """The file with the checksum of each block as it is now."""
    result = bytearray(data)
    for begin, end in blocks:
        result[end + 1 : end + TRAILER_BYTES] = _masked(reduce(_crc32c, data[begin : end + 1], 0xFFFFFFFF))
    return bytes(result)


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, appendix B.4, by its definition."""
    return reduce(_crc32c, data, 0xFFFFFFFF) ^ 0xFFFFFFFF


def _crc32c(crc: int, byte: int) -> int:
    crc ^= byte
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def _masked(crc: int) -> bytes:
    crc ^= 0xFFFFFFFF
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32).to_bytes(4, "little")


def command(*words: Any) -> tuple[int, Any]:
    """The exit code of `tierbed snapshot ... --json`, and the document, which is JSON as its standard has it."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        code = shell.command("snapshot", *words, "--json")
    return code, json.loads(out.getvalue(), parse_constant=_no_json)


def _no_json(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


def is_sound(snapshots: Path, name: str) -> bool:
    code, said = command("verify", snapshots.parent, name)
    if "error" in said:
        assert code == 1
        return False
    assert code == (0 if said["sound"] == [name] else 1)
    return code == 0


def refused(embedding: MultiTableEmbedding, snapshots: Path, name: str, match: str) -> None:
    """By `verify` and by a load, which leaves the rows as they were."""
    before = contents(embedding).tobytes()
    assert not is_sound(snapshots, name)
    with pytest.raises(SnapshotError, match=match) as error:
        embedding.load_snapshot(name)
    assert str(snapshots) in str(error.value)
    assert contents(embedding).tobytes() == before
