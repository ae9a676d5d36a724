"""Measure served lookups against FBGEMM's inference tables on a CPU, with one thread.

    make peers
    python benchmarks/serving.py [--rows 1000000] [--folder FOLDER]

Both have 26 tables of int8 rows with 64 columns, the same bytes in each. A call looks up one id of each table, for 1,
16 and 256 samples. Results must agree before anything is measured. Calls take turns, so all meet the same noise, and
each has ids of its own. The exit status is 1 if a figure misses its bar.

- `frozen`: a frozen EmbeddingBagCollection, called with a KeyedJaggedTensor of ids of 64 bits. It has the bars.
- `bare`: `ServedRows.look_up` of the same rows, with arguments that were checked before.
- `checked`: the call of the rows that checks its arguments.
- `fbgemm`: FBGEMM's tables with dense ids, the numbers of their rows.
- `fbgemm64`: the same with ids of 64 bits, which FBGEMM's hash map converts. The map that FBGEMM's module makes on a
  CPU, `PrunedMapCPU`, takes ids of 32 bits only. So this line calls `pruned_hashmap_lookup`, the operator that the
  module calls on a GPU; its CPU version takes 64 bits. This omits one of the module's two bounds checks.

`crafted` looks up ids whose hashes are neighbours, in a table with a million of such ids and as many random ones.

Then two threads look up batches of 256 in turn with one thread: in Python, and in C with `serving_threads.c`. The
figure is the best rate with two threads, divided by the best rate with one; only an idle machine can show it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch

from tierbed.engine import _core
from tierbed.engine.ops.batch import to_keys
from tierbed.engine.optim.row_state import RowState
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tierbed.serving import Served, freeze, open_served
from tierbed.serving.folder import ServingFolder
from tierbed.serving.row_file import RowFileWriter, encode, hash_rows
from tierbed.serving.served import ServedRows
from tierbed.serving.version import Current, RowFileEntry, ServedEmbedding, ServedTable, SnapshotEntry, Version

FEATURES, DIM = 26, 64
FACTOR = 7919  # ids are this multiple of the rows' numbers
EMBEDDING = f"ids-d{DIM}"
BARS = {1: 0.35, 16: 0.5, 256: 1.0}
THREADS_BAR = 1.8
POOL = 400  # batches that calls take in turn
Call = Callable[[int], Any]


def make_collection(num_tables: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(None, DIM, f"t{number}") for number in range(num_tables)], name="ids"
    )


def make_served(folder: Path, keys: list[Any], rows: Any) -> Served:
    """Write a version with a table for each array of keys, and open it."""
    served, tables = ServingFolder(folder), []
    with served.lock("a benchmark", create=True):
        pass  # makes the folders
    for table, table_keys in enumerate(keys):
        name, hashes = f"ids-{table}-base.rows", hash_rows(table, table_keys)
        writer, order = RowFileWriter(served.files / name, DIM, "int8", "base", table), np.argsort(hashes)
        for part in np.array_split(order, 16):
            writer.append_encoded(hashes[part], rows[part])
        tables.append(ServedTable(RowFileEntry(name, *writer.close()), None))
    description = make_collection(len(keys)).embedding(EMBEDDING).spec.describe(RowState(), [], 0)
    entry = ServedEmbedding(EMBEDDING, tuple(tables), SnapshotEntry("", "", 0, 0), description)
    served.write_version(Version(1, "int8", 0, 1, None, (entry,)))
    served.write_current(Current(1, created=1))
    return open_served(folder)


def make_fbgemm(rows: Any) -> Any:
    """FBGEMM's tables, with the given rows in each."""
    warnings.filterwarnings("ignore")
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    specs = [("", len(rows), DIM, SparseType.INT8, EmbeddingLocation.HOST)] * FEATURES
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, output_dtype=SparseType.FP32, device="cpu", pooling_mode=PoolingMode.SUM, row_alignment=1
    )
    tables.initialize_weights()
    for weight, _ in tables.split_embedding_weights(split_scale_shifts=False):
        weight.copy_(torch.from_numpy(rows))
    return tables


def make_hash_map(keys: list[Any]) -> tuple[Any, Any]:
    """FBGEMM's hash map of each table's 64-bit ids to the numbers of their rows, half full as by default."""
    num_rows = len(keys[0])
    slots = torch.full((2 * num_rows * FEATURES, 2), -1)
    starts = torch.arange(FEATURES + 1) * num_rows
    ids, numbers = torch.from_numpy(np.concatenate(keys).view(np.int64)), torch.arange(num_rows).repeat(FEATURES)
    torch.ops.fbgemm.pruned_hashmap_insert(ids, numbers, starts, slots, 2 * starts)
    return slots, 2 * starts


def measure(calls: dict[str, Call], reps: int) -> dict[str, list[float]]:
    """Returns each call's sorted times in microseconds. Calls take turns in random order: each leaves caches behind."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, random = [*calls], np.random.default_rng(2)
    for number in range(reps):
        for turn in random.permutation(len(calls)):
            index = (number + turn * (POOL // len(calls))) % POOL
            begin = time.perf_counter_ns()
            calls[names[turn]](index)
            times[names[turn]].append((time.perf_counter_ns() - begin) / 1e3)
    return {name: sorted(each) for name, each in times.items()}


def report(label: str, times: dict[str, list[float]], reference: str, bar: float) -> bool:
    """Print medians and 99th percentiles. Returns True if the first call's share of the reference's median is low."""
    medians = {name: each[len(each) // 2] for name, each in times.items()}
    texts = [f"{name} {medians[name]:.1f} (p99 {each[len(each) * 99 // 100]:.1f})" for name, each in times.items()]
    ratio = next(iter(medians.values())) / medians[reference]
    print(
        f"{label}: {', '.join(texts)} us; {next(iter(times))} takes {ratio:.2f} of {reference}, bar {bar}", flush=True
    )
    return ratio <= bar


def compare_with_fbgemm(folder: Path, num_rows: int) -> bool:
    """Returns True if all bars are met."""
    random = np.random.default_rng(0)
    features = [*range(FEATURES)]
    keys = [random.permutation(num_rows).astype(np.uint64) * np.uint64(FACTOR) for _ in features]
    rows = encode(random.standard_normal((num_rows, DIM), np.float32) * np.float32(0.05), "int8", 0, keys[0])
    served, fbgemm, collection, is_met = (
        make_served(folder, keys, rows),
        make_fbgemm(rows),
        make_collection(FEATURES),
        True,
    )
    frozen, table_rows, hash_map = freeze(collection, served), served.current[EMBEDDING], make_hash_map(keys)
    names = [f"t{number}" for number in features]
    for batch, bar in BARS.items():
        numbers = [random.integers(0, num_rows, (FEATURES, batch)) for _ in range(POOL)]
        arrays = [np.concatenate([keys[t][each[t]] for t in features]).view(np.int64) for each in numbers]
        ids = [torch.from_numpy(each) for each in arrays]
        dense = [torch.from_numpy(each.reshape(-1).astype(np.int32)) for each in numbers]
        offsets = torch.arange(batch * FEATURES + 1)
        offsets32, tables = offsets.int(), np.arange(FEATURES, dtype=np.uint32)
        batches = [KeyedJaggedTensor(names, each, offsets=offsets) for each in ids]
        arguments, shape = (tables, offsets.numpy(), tables, batch), (batch, FEATURES * DIM)

        def call_fbgemm64(i: int, ids: Any = ids, offsets: Any = offsets) -> Any:
            return fbgemm(torch.ops.fbgemm.pruned_hashmap_lookup(ids[i], offsets, *hash_map), offsets)

        calls: dict[str, Call] = {
            "frozen": lambda i, batches=batches: frozen(batches[i]).values(),
            "bare": lambda i, ids=ids, a=arguments, shape=shape: table_rows.look_up((to_keys(ids[i]), *a), shape),
            "checked": lambda i, ids=ids, o=offsets: table_rows(ids[i], None, o, "sum", features=features).flatten(1),
            "fbgemm": lambda i, dense=dense, offsets=offsets32: fbgemm(dense[i], offsets),
            "fbgemm64": call_fbgemm64,
        }
        with torch.inference_mode():
            for i in range(20):
                expected = calls["fbgemm"](i)
                for name, call in calls.items():
                    bound = {"rtol": 0, "atol": 0} if name == "fbgemm64" else {"rtol": 1e-5, "atol": 1e-6}
                    torch.testing.assert_close(call(i), expected, **bound)
            is_met &= report(f"batch {batch}", measure(calls, 2000 if batch < 256 else 600), "fbgemm", bar)
    return compare_threads(folder, table_rows, num_rows) and is_met


def compare_threads(folder: Path, rows: ServedRows, num_rows: int, batch: int = 256) -> bool:
    """Returns True if two threads look up enough rows, compared with one."""
    random = np.random.default_rng(1)
    pool = [random.integers(0, num_rows, FEATURES * batch, np.uint64) * np.uint64(FACTOR) for _ in range(POOL)]
    tables, offsets = np.arange(FEATURES, dtype=np.uint32), np.arange(FEATURES * batch + 1)

    def count(seconds: float, counts: list[int]) -> None:
        end, number = time.monotonic() + seconds, int(random.integers(POOL))
        begin = number
        while time.monotonic() < end:
            rows.look_up((pool[number % POOL], tables, offsets, tables, batch), (batch, FEATURES * DIM))
            number += 1
        counts.append((number - begin) * FEATURES * batch)

    best = {1: 0.0, 2: 0.0}
    for _ in range(8):
        for num_threads in best:
            counts: list[int] = []
            threads = [Thread(target=count, args=(0.5, counts)) for _ in range(num_threads)]
            begin = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            best[num_threads] = max(best[num_threads], sum(counts) / (time.monotonic() - begin))
    with tempfile.TemporaryDirectory() as build:
        library, program = Path(_core.__file__).parent.parent / "serving", Path(build, "serving_threads")
        flags = [
            "-std=gnu99",
            "-O2",
            "-Wall",
            "-Wextra",
            "-pthread",
            f"-I{library}",
            f"-L{library}",
            f"-Wl,-rpath,{library}",
        ]
        source = Path(__file__).with_name("serving_threads.c")
        subprocess.run(["cc", *flags, source, "-o", program, "-ltierbed_serving"], check=True)
        command = [program, folder, EMBEDDING, *map(str, (num_rows, FACTOR, FEATURES, batch))]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    is_met = True
    for label, rates in (("Python", [*best.values()]), ("C", [*map(float, output.split())])):
        ratio = rates[1] / rates[0]
        print(
            f"lookups in {label}: {rates[0]:.3g} per second with 1 thread, {rates[1]:.3g} with 2; {ratio:.2f}, ", end=""
        )
        print(f"bar at least {THREADS_BAR}", flush=True)
        is_met &= ratio >= THREADS_BAR
    return is_met


def unhash(hashes: Any) -> Any:
    """The keys of table 0 with these hashes: the inverse of `hash_row` in engine/ops/kernels/hash.h."""
    x = hashes ^ hashes >> np.uint64(31) ^ hashes >> np.uint64(62)
    with np.errstate(over="ignore"):
        x = x * np.uint64(0x319642B2D24D8EC3)
        x = (x ^ x >> np.uint64(27) ^ x >> np.uint64(54)) * np.uint64(0x96DE1B173F119089)
    return x ^ x >> np.uint64(30) ^ x >> np.uint64(60) ^ np.uint64(0x9E3779B97F4A7C15)


def compare_crafted(folder: Path, num_rows: int) -> bool:
    """Returns True if lookups of crafted ids take at most twice the time of random ids."""
    random = np.random.default_rng(0)
    common = random.integers(0, 2**63, num_rows, np.uint64)
    crafted = unhash(np.uint64(1 << 62) + np.arange(num_rows, dtype=np.uint64))
    keys = np.unique(np.concatenate([common, crafted]))
    served = make_served(folder, [keys], encode(np.ones((len(keys), DIM), np.float32), "int8", 0, keys)).current[
        EMBEDDING
    ]
    batches = {
        name: [torch.from_numpy(random.choice(each, 4096).view(np.int64)) for _ in range(POOL)]
        for name, each in (("crafted", crafted), ("random", common))
    }
    assert bool((served(batches["crafted"][0]) == 1).all())
    calls: dict[str, Call] = {name: lambda i, ids=ids: served(ids[i]) for name, ids in batches.items()}
    return report("4,096 ids", measure(calls, 600), "random", 2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--folder", type=Path, help="where to write the files, 80 bytes a row and table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        is_met = compare_with_fbgemm(Path(folder, "fbgemm"), arguments.rows)
        return not (compare_crafted(Path(folder, "crafted"), arguments.rows) and is_met)


if __name__ == "__main__":
    sys.exit(main())
