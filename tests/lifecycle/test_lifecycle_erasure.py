"""After the recipe of docs/lifecycle.md no file has a byte of a deleted row: not its key, its hash, or its values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.embeddings import contents, make, train
from support.naive import hash_row
from support.small_snapshots import keys_of_few_files
from support.stores import options
from tierbed import MultiTableEmbedding

OTHERS = keys_of_few_files(1000)
SECRETS = [0x1122334455667788, -0x0123456789ABCDEF, 0x7EDCBA9876543210]
WORD = 8


def needles_of(embedding: MultiTableEmbedding) -> set[bytes]:
    """What shows the secret rows: keys and hashes in any form, and each pair of numbers next to each other."""
    found: set[bytes] = set()
    for key in np.array(SECRETS).view(np.uint64):
        for number in (int(key), hash_row(0, int(key))):
            found |= {number.to_bytes(WORD, order) for order in ("little", "big")} | {b"%d" % number, b"%x" % number}
        found.add(b"%d" % int(np.uint64(key).view(np.int64)))
    rows = contents(embedding)
    for row in rows[np.isin(rows["key"], np.array(SECRETS).view(np.uint64))]:
        values = row["values"].tobytes() if "values" in (rows.dtype.names or ()) else row["embedding"].tobytes()
        found |= {values[at : at + WORD] for at in range(0, len(values) - WORD + 1, 4)}
    return {needle for needle in found if any(needle)}


def files_with(needles: set[bytes], folder: Path) -> set[str]:
    return {
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file() and any(needle in content for content in [file.read_bytes()] for needle in needles)
    }


def trained(embedding: MultiTableEmbedding, kind: str) -> set[bytes]:
    """Steps with flushes and saves in between, so that files of all kinds begin and end with the secret rows."""
    needles: set[bytes] = set()
    if kind == "incremental":
        train(embedding, OTHERS)
        embedding.save_snapshot(f"first-{embedding.table_handle().table.step}")
    for _ in range(3):
        train(embedding, OTHERS)
        embedding.table_handle().table.flush()
        train(embedding, SECRETS)
        embedding.table_handle().table.flush()  # a file whose first and last key are secret
        needles |= needles_of(embedding)
        embedding.save_snapshot(f"with-{embedding.table_handle().table.step}", kind=kind)
    return needles


def delete(embedding: MultiTableEmbedding) -> None:
    assert embedding.delete(SECRETS, 0) == len(SECRETS)


def documented(embedding: MultiTableEmbedding, kind: str) -> None:
    delete(embedding)
    if embedding.store_options.store == "cached_ssd":
        embedding.compact()
    embedding.save_snapshot("without", kind="full" if kind == "incremental" else kind)
    embedding.prune_snapshots(keep_last=1)


def with_states(embedding: MultiTableEmbedding, kind: str) -> None:
    """Snapshots that state_dict() made are pruned by hand."""
    embedding.state_dict()
    documented(embedding, kind)
    embedding.state_dict()  # of snapshot "without"
    snapshots = Path(embedding.store_options.persistent_path, embedding.name, "snapshots")
    left = list(snapshots.glob("state_dict-*"))
    assert left
    for folder in left:
        shutil.rmtree(folder)


def merged_last(embedding: MultiTableEmbedding, kind: str) -> None:
    delete(embedding)
    embedding.save_snapshot("without")
    embedding.prune_snapshots(keep_last=1)
    embedding.compact()


def merged_while_read(embedding: MultiTableEmbedding, kind: str) -> None:
    """A scan keeps RocksDB's databases open while files are merged; the close does the rest."""
    rows = iter(embedding)
    next(rows)
    merged_last(embedding, kind)
    del rows


@pytest.mark.parametrize(
    ("store", "kind", "recipe"),
    [
        *((store, kind, documented) for store in ("host", "ssd") for kind in ("full", "incremental")),
        ("ssd", "checkpoint", documented),
        ("host", "full", with_states),
        ("ssd", "full", with_states),
        ("ssd", "full", merged_last),
        ("ssd", "full", merged_while_read),
    ],
)
def test_no_file_has_a_byte_of_a_deleted_row(
    tmp_path: Path, store: str, kind: str, recipe: Callable[[MultiTableEmbedding, str], None]
) -> None:
    with make(options(store, tmp_path), "adam", tables=1) as embedding:
        needles = trained(embedding, kind)
    assert len(files_with(needles, tmp_path)) > 2
    states = recipe is with_states
    with make(options(store, tmp_path, state_dict_snapshots=states), "adam", tables=1) as embedding:
        needles |= trained(embedding, kind)
        recipe(embedding, kind)
        train(embedding, OTHERS)
        if kind == "incremental":
            embedding.save_snapshot("later", kind="incremental")
        left = contents(embedding).tobytes()
    assert files_with(needles, tmp_path) == set()
    with make(options(store, tmp_path, open="error"), "adam", tables=1) as embedding:
        assert contents(embedding).tobytes() == left
        embedding.load_snapshot("without")
        assert embedding.size() == len(OTHERS)
