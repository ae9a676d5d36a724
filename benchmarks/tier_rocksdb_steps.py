"""What RocksDB costs a training step: processor time to read 12,000 random rows, write 12,000 others, and compact.

    python benchmarks/tier_rocksdb_steps.py --folder /ssd
    python benchmarks/tier_rocksdb_steps.py --folder /ssd --options compaction_style=kCompactionStyleLevel

The table, 10 M rows of 144 bytes, is loaded and compacted once into the folder and copied for each run, so it begins in
the page cache. Times are of processors, not of the clock, so other load disturbs them little: of the calling thread,
the only one that reads and writes, and of RocksDB's threads in the background.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np

from tierbed.engine import _core
from tierbed.engine.store.rocksdb import SHARDS, RocksDB

ROW_BYTES = 144
BATCH = 12_000
LOAD = 200_000  # rows a write


class Lines:
    """Memory for `count` rows."""

    def __init__(self, count: int) -> None:
        self.memory = np.ones((count, ROW_BYTES), np.uint8)
        self.tables = np.zeros(count, np.uint32)
        self.lines = self.memory.ctypes.data + ROW_BYTES * np.arange(count, dtype=np.uint64)


def load(folder: Path, rows: int) -> None:
    tier = RocksDB(folder, ROW_BYTES // 4 - 2)
    lines = Lines(LOAD)
    for first in range(0, rows, LOAD):
        keys = np.arange(first, min(first + LOAD, rows), dtype=np.uint64)
        tier.write(lines.tables[: len(keys)], keys, lines.lines[: len(keys)])
    tier.compact()
    tier.close()


def train(folder: Path, rows: int, steps: int, mode: str, options: str) -> str:
    tier = RocksDB(folder, ROW_BYTES // 4 - 2, SHARDS, read_mode=mode, read_threads=1, options=options)
    random = np.random.default_rng(0)
    lines = Lines(BATCH)
    read = write = 0.0
    process, thread = time.process_time(), time.thread_time()
    for _ in range(steps):
        for part in ("read", "write"):
            keys = random.choice(rows, BATCH, replace=False, shuffle=False).astype(np.uint64)
            began = time.thread_time()
            if part == "read":
                assert tier.read(lines.tables, keys, lines.lines).all()
                read += time.thread_time() - began
            else:
                tier.write(lines.tables, keys, lines.lines)
                write += time.thread_time() - began
    background = (time.process_time() - process) - (time.thread_time() - thread)
    metrics = tier.metrics()["ssd"]
    tier.close()
    parts = [1e3 * seconds / steps for seconds in (read, write, background)]
    return (
        f"ms a step: read {parts[0]:.1f}, write {parts[1]:.1f}, background {parts[2]:.1f}, all {sum(parts):.1f}; "
        f"write amplification {metrics['write_amplification']:.2f}, "
        f"files {metrics['sst_bytes'] / (rows * ROW_BYTES):.2f} x the rows, stalled {metrics['stall_seconds']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="on the disk to measure; the loaded table stays in it"
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--read-mode", choices=["buffered", "mmap", "direct"], default="buffered")
    parser.add_argument("--options", default="", help="RocksDB's options string, over tierbed's own settings")
    arguments = parser.parse_args()
    _core.set_threads(1)
    loaded = arguments.folder / f"loaded-{arguments.rows}"
    if not loaded.exists():
        load(loaded, arguments.rows)
    running = arguments.folder / "running"
    shutil.rmtree(running, ignore_errors=True)
    shutil.copytree(loaded, running)
    print(train(running, arguments.rows, arguments.steps, arguments.read_mode, arguments.options))
    shutil.rmtree(running)


if __name__ == "__main__":
    main()
