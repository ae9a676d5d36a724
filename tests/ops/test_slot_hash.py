"""Ids that were chosen by the fixed hash take no longer in memory than random ones, and no result differs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from support import naive
from support.caches import TABLE, batch_of, cache_over
from support.naive import MASK64
from support.scripts import run_cold, run_script
from tierbed.engine import _core

N, SLOTS = 4096, 8192
Row = tuple[int, int]


def key_of(table: int, hash_: int) -> int:
    """The id of a fixed hash: its steps undone."""
    x = hash_ ^ hash_ >> 31 ^ hash_ >> 62
    x = x * 0x319642B2D24D8EC3 & MASK64
    x ^= x >> 27 ^ x >> 54
    x = x * 0x96DE1B173F119089 & MASK64
    x ^= x >> 30 ^ x >> 60
    return (x ^ (table + 1) * 0x9E3779B97F4A7C15) & MASK64


def before_last_shift(x: int) -> int:
    return x ^ x >> 31


# rows of one bucket, by the hash that an attacker knows
CRAFTED: dict[str, Callable[[int], Row]] = {
    "equal low half": lambda i: (0, key_of(0, i << 32)),
    "equal high half": lambda i: (0, key_of(0, i)),
    "equal set, way and tag of the fixed hash": lambda i: (0, key_of(0, (i & 255) << 42 | (i >> 8) << 34)),
    **{f"a stride of 2^{s}": lambda i, s=s: (0, key_of(0, before_last_shift(i << s))) for s in range(8, 46, 6)},
    "a grid": lambda i: (0, key_of(0, before_last_shift((i & 63) << 9 | i >> 6 << 40))),
    "one hash in every table": lambda i: (i, key_of(i, 12345)),
    "two tables": lambda i: (i % 2, key_of(i % 2, i // 2 << 32)),
}


def numbers_of(seed: int) -> list[int]:
    """Numbers of another process."""
    draw = random.Random(seed).getrandbits
    return [draw(56) << 8, draw(56) << 8, draw(56) << 8 | 1, draw(56) << 8 | 1]


def probes(rows: list[Row], numbers: list[int]) -> float:
    """How many slots an insertion into a half full table looks at: linear probing, as in kernels/index.h."""
    taken, total = bytearray(SLOTS), 0
    for row in rows:
        at = naive.slot_hash(*row, numbers) % SLOTS
        while taken[at]:
            at, total = (at + 1) % SLOTS, total + 1
        taken[at], total = 1, total + 1
    return total / len(rows)


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_ids_share_no_slots(kind: str) -> None:
    rows = [CRAFTED[kind](i) for i in range(N)]
    assert len({naive.bucket(*row) for row in rows}) == 1
    assert max(probes(rows, numbers_of(seed)) for seed in range(4)) < 2  # 1.5 for random rows


@pytest.mark.parametrize("kind", [kind for kind in CRAFTED if kind != "one hash in every table"])
def test_crafted_ids_share_no_cache_set(kind: str) -> None:
    sets = 4 * 64  # four of the bucket, with room for 256 rows
    cache = cache_over(_core.FullTable(TABLE.layout), sets)
    cache.pin(batch_of([CRAFTED[kind](i) for i in range(160)]))
    assert cache.metrics()["overflows"] <= 3  # all but 64, were they in one set


def test_the_slot_hash_keeps_the_bucket_and_the_key() -> None:
    generator = np.random.default_rng(1)
    rows = list(zip(generator.integers(0, 3, 500).tolist(), generator.integers(0, 2**63, 500).tolist(), strict=True))
    for seed in range(4):
        hashes = [naive.slot_hash(*row, numbers_of(seed)) for row in rows]
        assert [hash_ >> 58 for hash_ in hashes] == [naive.bucket(*row) for row in rows]
        assert len(set(hashes)) == len(rows)
    keys = torch.tensor([[0, -1, 1, 2**62, -(2**63)]]).numpy().view(np.uint64)
    batch = _core.Batch([(keys.reshape(-1), np.full(5, 7, np.uint32), None)], 8, None)
    assert sorted(batch.keys.tolist()) == sorted(keys.reshape(-1).tolist())


SCRIPT = """
import hashlib, os, sys
os.environ.pop("TIERBED_HASH_SEED", None)
import torch, tierbed as t
from pathlib import Path
from tierbed.engine import _core
print(_core.slot_hash().tolist())
folder = Path(sys.argv[1])
for name, options in {
    "host": t.make_host_mem_store_options(folder / "host", capacity=900, eviction="lfu", admission=0.7),
    "cached": t.make_cached_host_mem_store_options(0.1, folder / "cached", capacity=900, eviction="lru", admission=2),
    "ssd": t.make_cached_ssd_store_options(0.1, folder / "ssd"),
}.items():
    tables = [t.make_table_options(t.make_uniform_initializer(-1, 1))] * 2
    e = t.MultiTableEmbedding(name, 8, torch.float16, torch.int64, tables, options)
    optimizer = t.EagerOptimizer(torch.optim.Adagrad(e.parameters(), lr=0.1), e)
    torch.manual_seed(0)
    for _ in range(12):
        e(torch.randint(0, 1500, (200, 2))).square().sum().backward()
        optimizer.step(), optimizer.zero_grad()
    e.save_snapshot("s")
    e.close()
    for file in sorted((folder / name / name / "snapshots" / "s").rglob("*")):
        if "manifest" not in file.name and file.is_file():
            print(f"{name}/{file.name}", hashlib.sha256(file.read_bytes()).hexdigest())
"""


def test_no_file_row_or_decision_depends_on_the_number_of_the_process(tmp_path: Path) -> None:
    done = run_script(SCRIPT, tmp_path / "ours"), run_cold(SCRIPT, tmp_path / "another")
    ours, others = (one.stdout.splitlines() for one in done)
    assert len(ours) > 3 * 60, done[0].stderr
    assert ours[0] == str(_core.slot_hash().tolist()) != others[0]
    assert ours[1:] == others[1:]


def test_the_number_of_a_process_is_its_own_or_that_of_the_seed() -> None:
    command = [sys.executable, "-c", "from tierbed.engine import _core; print(_core.slot_hash().tolist())"]
    numbers = []
    for seed in (os.environ["TIERBED_HASH_SEED"], "2", None, None):
        given = {name: value for name, value in os.environ.items() if name != "TIERBED_HASH_SEED"}
        given |= {} if seed is None else {"TIERBED_HASH_SEED": seed}
        numbers.append(subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.strip())
    assert numbers[0] == str(_core.slot_hash().tolist())
    assert len(set(numbers)) == 4
