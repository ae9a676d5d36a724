"""The RocksDB tier alone, against a bare C++ loop over the same librocksdb and against rocksdict from PyPI.

    make peers
    python benchmarks/tier_rocksdb.py       # or: --folder /ssd --rows 500000 --repeats 15 --read-mode mmap

Fetch and write back of 50,000 random rows of 512 and of 1536 bytes, table in page cache. The bare loop opens a copy of
the tier's folder with the options that RocksDB wrote there, the same number of threads, and keys that are made and
sorted outside of the clock. rocksdict (one database, its own RocksDB, the same block size, filter, memtables and
compaction, no compression and no log) gets keys made and sorted outside of the clock too; fetched values end in an
array, written ones come from one, as the tier's do. They take turns; figures are medians of one run, shown only if all
three hold the same rows, before and after.

Interpreter-held time of a write: for how long it blocks another Python thread that only counts. Linux tells how long a
thread ran and how long it waited for a processor; for the rest of its time it waited for the interpreter.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rocksdict
from numpy.typing import NDArray

from tierbed.engine import _core
from tierbed.engine.store.rocksdb import MB, SHARDS, WRITE_BUFFER_BYTES, RocksDB

BATCH = 50_000
BARS = {("bare", "fetch"): 0.9, ("bare", "write"): 0.9, ("rocksdict", "fetch"): 2.5, ("rocksdict", "held"): 5.0}
U8 = NDArray[np.uint8]


class Rows:
    """Rows of one table in the order of RocksDB's keys, with `lines` to read to and write from."""

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
    def __init__(self, folder: Path, row_bytes: int, mode: str) -> None:
        self._tier = RocksDB(folder, row_bytes // 4 - 2, SHARDS, read_mode=mode)

    def fetch(self, rows: Rows) -> None:
        assert self._tier.read(rows.tables, rows.keys, rows.lines).all()

    def write(self, rows: Rows) -> None:
        self._tier.write(rows.tables, rows.keys, rows.lines)

    def close(self) -> None:
        self._tier.close()


class Bare:
    def __init__(self, folder: Path, row_bytes: int, threads: int) -> None:
        self._native = _compiled()
        self._row_bytes = row_bytes
        self._handle = self._native.bare_open(str(folder).encode(), SHARDS, threads)

    def _call(self, function: Any, rows: Rows) -> None:
        arrays = (array.ctypes.data for array in (rows.names, rows.begin, rows.lines))
        function(self._handle, *arrays, self._row_bytes)

    def fetch(self, rows: Rows) -> None:
        self._call(self._native.bare_fetch, rows)

    def write(self, rows: Rows) -> None:
        self._call(self._native.bare_write, rows)

    def close(self) -> None:
        self._native.bare_close(self._handle)


def _compiled() -> ctypes.CDLL:
    source = Path(__file__).with_name("rocksdb_bare.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "bare.so")
        flags = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["g++", *flags, "-o", str(library), str(source), "-lrocksdb"], check=True)
        native = ctypes.CDLL(str(library))
    native.bare_open.restype = ctypes.c_void_p
    native.bare_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    native.bare_close.argtypes = [ctypes.c_void_p]
    for function in (native.bare_fetch, native.bare_write):
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t]
    return native


class Rocksdict:
    def __init__(self, folder: Path, row_bytes: int, mode: str) -> None:
        self._row_bytes = row_bytes
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
        batch = rocksdict.WriteBatch(raw_mode=True)
        values = memoryview(rows.memory.reshape(-1)).toreadonly()
        size = self._row_bytes
        for index, name in enumerate(rows.bytes):
            batch.put(name, bytes(values[index * size : (index + 1) * size]))
        self._db.write(batch)

    def flush(self) -> None:
        self._db.flush()
        self._db.compact_range(None, None)

    def close(self) -> None:
        self._db.close()


def interpreter_held(write: Callable[[], None], seconds: float = 1.5) -> float:
    """Seconds that one write keeps another Python thread from running."""
    blocked: list[float] = []
    done = threading.Event()

    def count() -> None:
        began, ran = time.perf_counter(), _ran_or_ready()
        while not done.is_set():
            for _ in range(100_000):
                pass
        blocked.append(time.perf_counter() - began - (_ran_or_ready() - ran))

    other = threading.Thread(target=count)
    other.start()
    began, writes = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        write()
        writes += 1
    done.set()
    other.join()
    return max(blocked[0], 1e-9) / writes


def _ran_or_ready() -> float:
    """Seconds that the calling thread had a processor or waited for one: the rest of its time it was blocked."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) * 1e-9


def measure(folder: Path, row_bytes: int, rows: int, repeats: int, threads: int, mode: str) -> bool:
    _core.set_threads(threads)
    random = np.random.default_rng(0)
    keys = random.permutation(rows).astype(np.uint64)
    tier = RocksDB(folder / "tierbed", row_bytes // 4 - 2, read_mode=mode)
    peer = Rocksdict(folder / "rocksdict", row_bytes, mode)
    for first in range(0, rows, BATCH):
        piece = Rows(keys[first : first + BATCH], row_bytes)
        piece.fill(first)
        tier.write(piece.tables, piece.keys, piece.lines)
        peer.write(piece)
    tier.compact()
    peer.flush()
    tier.close()
    shutil.copytree(folder / "tierbed", folder / "bare")
    contenders: dict[str, Any] = {
        "tierbed": Tierbed(folder / "tierbed", row_bytes, mode),
        "bare": Bare(folder / "bare", row_bytes, threads),
        "rocksdict": peer,
    }
    pieces = [Rows(random.choice(keys, BATCH, replace=False), row_bytes) for _ in range(4)]
    times: dict[tuple[str, str], list[float]] = {}
    same = True
    for turn in range(-2, repeats):  # the first two bring tables into the page cache
        piece = pieces[turn % len(pieces)]
        found = []
        order = list(contenders.items())
        for name, contender in order[turn % 3 :] + order[: turn % 3]:
            piece.memory[:] = 0
            began = time.perf_counter()
            contender.fetch(piece)
            times.setdefault((name, "fetch"), []).append(time.perf_counter() - began)
            found.append(piece.memory.tobytes())
        same &= len(set(found)) == 1 and any(found[0])
        piece.fill(turn + 10**6)
        for name, contender in contenders.items():
            began = time.perf_counter()
            contender.write(piece)
            times.setdefault((name, "write"), []).append(time.perf_counter() - began)
    for name in ("tierbed", "rocksdict"):
        times[name, "held"] = [interpreter_held(lambda c=contenders[name]: c.write(pieces[0])) for _ in range(3)]
    for contender in contenders.values():
        contender.close()
    if not same:
        print(f"{row_bytes} B: the contenders do not hold the same rows; no figures", file=sys.stderr)
        return False
    median = {what: statistics.median(seconds[2:] if len(seconds) > 5 else seconds) for what, seconds in times.items()}
    passed = True
    for (name, what), bar in BARS.items():
        ratio = median[name, what] / median["tierbed", what]
        passed &= ratio >= bar
        print(
            f"{row_bytes:5} B  {what:5}  tierbed {median['tierbed', what] * 1e3:8.2f} ms  {name:9} "
            f"{median[name, what] * 1e3:8.2f} ms  ratio {ratio:6.2f}  bar {bar}{'' if ratio >= bar else '  MISSED'}"
        )
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the disk to measure; temporary by default")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--read-mode", choices=["buffered", "mmap"], default="buffered")
    arguments = parser.parse_args()
    passed = True
    for row_bytes in (512, 1536):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            passed &= measure(
                Path(folder), row_bytes, arguments.rows, arguments.repeats, arguments.threads, arguments.read_mode
            )
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
