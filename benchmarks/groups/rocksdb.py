"""The RocksDB tier alone: against a bare C++ loop over the same librocksdb and against rocksdict."""

from __future__ import annotations

import ctypes
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from native import compile_library
from numpy.typing import NDArray
from report import Figure, join_pairs
from timing import time_in_turns
from workload import Mismatch, figure, workload

from tierbed.engine import _core
from tierbed.engine.store.rocksdb import MB, SHARDS, WRITE_BUFFER_BYTES, RocksDB

THREADS = 2
PIECES = 4  # row sets that are used in turn


class Rows:
    """Rows of one table, sorted like RocksDB's keys, with memory (`lines`) for their bytes."""

    def __init__(self, keys: NDArray[np.uint64], row_bytes: int) -> None:
        tables = np.zeros(len(keys), np.uint32)
        buckets = _core.buckets(tables, keys)
        order = np.lexsort((keys, buckets))
        self.keys, self.tables = keys[order], tables
        self.begin = np.searchsorted(buckets[order], np.arange(65)).astype(np.uint64)
        self.names = np.zeros((len(keys), 13), np.uint8)
        self.names[:, 0] = buckets[order]
        self.names[:, 5:] = self.keys.astype(">u8").view(np.uint8).reshape(-1, 8)
        self.bytes = [name.tobytes() for name in self.names]
        self.memory = np.zeros((len(keys), row_bytes), np.uint8)
        self.lines = self.memory.ctypes.data + row_bytes * np.arange(len(keys), dtype=np.uint64)

    def fill(self, seed: int) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, np.uint8)


class Tierbed:
    def __init__(self, folder: Path, row_bytes: int, mode: str, shards: int | None = None) -> None:
        """shards: the number in an existing folder."""
        self._tier = RocksDB(folder, row_bytes // 4 - 2, shards, read_mode=mode)

    def fetch(self, rows: Rows) -> None:
        assert self._tier.read(rows.tables, rows.keys, rows.lines).all()

    def write(self, rows: Rows) -> None:
        self._tier.write(rows.tables, rows.keys, rows.lines)

    def compact(self) -> None:
        self._tier.compact()

    def close(self) -> None:
        self._tier.close()


class Bare:
    """A copy of the tier's folder, opened with the stored options and used by as many threads."""

    def __init__(self, folder: Path, row_bytes: int) -> None:
        self._native = compile_library(Path(__file__).resolve().parents[1] / "rocksdb_bare.cpp", "-lrocksdb")
        self._native.bare_open.restype = ctypes.c_void_p
        self._native.bare_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
        self._native.bare_close.argtypes = [ctypes.c_void_p]
        for function in (self._native.bare_fetch, self._native.bare_write):
            function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t]
        self._row_bytes = row_bytes
        self._handle = self._native.bare_open(str(folder).encode(), SHARDS, THREADS)

    def _call(self, function: Any, rows: Rows) -> None:
        arrays = (array.ctypes.data for array in (rows.names, rows.begin, rows.lines))
        function(self._handle, *arrays, self._row_bytes)

    def fetch(self, rows: Rows) -> None:
        self._call(self._native.bare_fetch, rows)

    def write(self, rows: Rows) -> None:
        self._call(self._native.bare_write, rows)

    def close(self) -> None:
        self._native.bare_close(self._handle)


class Rocksdict:
    """rocksdict from PyPI: one database with the tier's block size, filter, memtables and compaction."""

    def __init__(self, folder: Path, row_bytes: int, mode: str) -> None:
        import rocksdict

        self._row_bytes, self._new_batch = row_bytes, partial(rocksdict.WriteBatch, raw_mode=True)
        options = rocksdict.Options(raw_mode=True)
        table = rocksdict.BlockBasedOptions()
        table.set_block_size(4096)
        table.set_bloom_filter(10, False)
        table.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
        table.disable_cache()
        options.set_block_based_table_factory(table)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(WRITE_BUFFER_BYTES // 12)
        options.set_max_write_buffer_number(12)
        options.set_min_write_buffer_number_to_merge(8)
        options.set_memtable_whole_key_filtering(True)
        options.set_memtable_prefix_bloom_ratio(0.01)
        options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
        options.set_compaction_readahead_size(MB)
        options.set_max_background_jobs(2)
        options.set_allow_mmap_reads(mode == "mmap")
        self._db = rocksdict.Rdict(str(folder), options)
        write_options = rocksdict.WriteOptions()
        write_options.disable_wal = True
        self._db.set_write_options(write_options)
        read_options = rocksdict.ReadOptions()
        read_options.fill_cache(False)
        self._db.set_read_options(read_options)

    def fetch(self, rows: Rows) -> None:
        values = self._db.get(rows.bytes)
        rows.memory[:] = np.frombuffer(b"".join(values), np.uint8).reshape(rows.memory.shape)

    def write(self, rows: Rows) -> None:
        batch = self._new_batch()
        values = memoryview(rows.memory.reshape(-1)).toreadonly()
        size = self._row_bytes
        for index, name in enumerate(rows.bytes):
            batch.put(name, bytes(values[index * size : (index + 1) * size]))
        self._db.write(batch)

    def compact(self) -> None:
        self._db.flush()
        self._db.compact_range(None, None)

    def close(self) -> None:
        self._db.close()


def tier(
    folder: Path, row_bytes: int, rows: int = 500_000, batch: int = 50_000, mode: str = "buffered", repeats: int = 15
) -> Iterator[Figure]:
    """Fetch and write back random rows, against a bare loop and rocksdict. The table is in the page cache.

    Both peers' keys are made and sorted outside the clock. Also measures how long a write blocks other Python threads.
    """
    _core.set_num_threads(THREADS)
    random = np.random.default_rng(0)
    keys = random.permutation(rows).astype(np.uint64)
    ours, peer = Tierbed(folder / "tierbed", row_bytes, mode), Rocksdict(folder / "rocksdict", row_bytes, mode)
    for first in range(0, rows, batch):
        piece = Rows(keys[first : first + batch], row_bytes)
        piece.fill(first)
        ours.write(piece)
        peer.write(piece)
    ours.compact()
    peer.compact()
    ours.close()
    shutil.copytree(folder / "tierbed", folder / "bare")
    ours = Tierbed(folder / "tierbed", row_bytes, mode, SHARDS)
    sides: dict[str, Any] = {"tierbed": ours, "bare": Bare(folder / "bare", row_bytes), "rocksdict": peer}
    pieces = [Rows(random.choice(keys, batch, replace=False), row_bytes) for _ in range(PIECES)]
    check_rows(sides, pieces)
    fetches = {name: lambda turn, side=side: side.fetch(pieces[turn % PIECES]) for name, side in sides.items()}
    times = {"fetch": time_in_turns(fetches, repeats, 2)}
    for seed, piece in enumerate(pieces, rows):
        piece.fill(seed)
    writes = {name: lambda turn, side=side: side.write(pieces[turn % PIECES]) for name, side in sides.items()}
    times["write"] = time_in_turns(writes, repeats, PIECES)
    check_rows(sides, pieces)
    blocked_times = {
        name: [measure_blocked_seconds(partial(sides[name].write, pieces[0])) for _ in range(3)] for name in sides
    }
    for side in sides.values():
        side.close()
    for what, name, bar in (("fetch", "bare", 0.9), ("write", "bare", 0.9), ("fetch", "rocksdict", 2.5)):
        yield figure(
            f"time of a {what}, {name} / tierbed",
            times[what].ratio(name, "tierbed"),
            "x",
            bar=bar,
            notes=str(times[what]),
        )
    blocked = {name: median(seconds) for name, seconds in blocked_times.items()}
    notes = join_pairs((name, f"{1e3 * seconds:.2f} ms") for name, seconds in blocked.items())
    ratio = blocked["rocksdict"] / blocked["tierbed"]
    yield figure("interpreter held by a write, rocksdict / tierbed", ratio, "x", bar=5.0, notes=notes)


for row_bytes in (512, 1536):
    quick = {"rows": 2000, "batch": 200, "repeats": 2}
    workload(quick, name=f"rows-of-{row_bytes}", row_bytes=row_bytes)(tier)


def check_rows(sides: dict[str, Any], pieces: list[Rows]) -> None:
    """Raise Mismatch unless all sides store the same rows."""
    for piece in pieces:
        contents = set()
        for side in sides.values():
            piece.memory[:] = 0
            side.fetch(piece)
            contents.add(piece.memory.tobytes())
        if len(contents) != 1 or not piece.memory.any():
            raise Mismatch(f"rows of {piece.memory.shape[1]} bytes differ between {', '.join(sides)}")


def measure_blocked_seconds(write: Callable[[], None], seconds: float = 1.5) -> float:
    """Return for how many seconds one write keeps another Python thread from running.

    The other thread loops. Linux reports how long it ran or waited for a processor; the rest of the time it waited
    for the interpreter lock.
    """
    blocked: list[float] = []
    done = threading.Event()

    def spin() -> None:
        began, ran = time.perf_counter(), _runnable_seconds()
        while not done.is_set():
            for _ in range(100_000):
                pass
        blocked.append(time.perf_counter() - began - (_runnable_seconds() - ran))

    other = threading.Thread(target=spin)
    other.start()
    began, writes = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        write()
        writes += 1
    done.set()
    other.join()
    return max(blocked[0], 1e-9) / writes


def _runnable_seconds() -> float:
    """Return how long the calling thread ran or waited for a processor, as opposed to being blocked."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) * 1e-9
