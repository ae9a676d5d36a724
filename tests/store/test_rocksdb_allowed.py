"""Every option of RocksDB that users may set works at both ends of its range: no crash, no hang, the same rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.forked import in_process
from support.stores import options
from tierbed.engine.options.rocksdb_options import ALLOWED_OPTIONS, AllowedValues

NAMED = {name: allowed for of_purpose in ALLOWED_OPTIONS.values() for name, allowed in of_purpose.items()}
Setting = dict[str, Any]


def ends(allowed: AllowedValues) -> list[Any]:
    return [value for one in allowed for value in ([one] if isinstance(one, str) else dict.fromkeys(one))]


def nested(flat: Setting) -> Setting:
    made: Setting = {}
    for name, value in flat.items():
        struct, _, field = name.rpartition(".")
        (made.setdefault(struct, {}) if struct else made)[field] = value
    return made


def rows_after(path: Path, store: str, setting: Setting, read_mode: str = "buffered") -> bytes:
    """The rows after steps, flushes, evictions, snapshots, merges, and two runs."""
    more = {"rocksdb_options": nested(setting), "read_mode": read_mode} if store == "ssd" else {}
    for run in range(2):
        with make(options(store, path, **more), "adam", tables=2) as embedding:
            for step in range(12):
                ids = (torch.arange(600) * (step + 7 * run + 1)) % 5003
                train(embedding, ids, ids % 2)
                if store == "ssd":
                    embedding.table_handle().table.flush()
            embedding.delete(range(run, 5003, 9), table_ids=1)
            if store == "ssd":
                embedding.save_snapshot(f"linked-{run}", kind="checkpoint")
                embedding.save_snapshot(f"full-{run}")
                embedding.compact()
                train(embedding, range(4000))
            else:
                train(embedding, range(4000))
            rows = contents(embedding).tobytes()
    if store == "ssd":
        with make(options(store, path, open="error", **more), "adam", tables=2) as embedding:
            assert contents(embedding).tobytes() == rows
            embedding.load_snapshot("linked-1")
            linked = contents(embedding).tobytes()
            embedding.load_snapshot("full-1")
            assert contents(embedding).tobytes() == linked
    return rows


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return rows_after(tmp_path_factory.mktemp("host"), "host", {})


@pytest.mark.parametrize("end", [0, -1])
def test_all_options_together_at_one_end_of_their_ranges(tmp_path: Path, expected: bytes, end: int) -> None:
    assert in_process(rows_after, tmp_path, "ssd", {name: ends(of)[end] for name, of in NAMED.items()}) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_options_together(tmp_path: Path, expected: bytes, seed: int) -> None:
    chance = random.Random(seed)
    setting = {name: chance.choice(ends(of)) for name, of in NAMED.items() if chance.random() < 0.3}
    read_mode = "mmap" if seed % 2 else "buffered"
    assert in_process(rows_after, tmp_path, "ssd", setting, read_mode) == expected, setting
