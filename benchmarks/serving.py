"""Measure served lookups against FBGEMM's inference tables on a CPU, with one thread.

    make peers
    python benchmarks/serving.py [--rows 1000000] [--folder FOLDER]

Both have 26 tables of int8 rows with 64 columns, the same bytes in each. A call looks up one id of each table, for 1,
16 and 256 samples. FBGEMM gets dense ids, the numbers of its rows; tierbed gets ids of 64 bits and hashes them. Results
must agree before anything is measured. Calls take turns, so both meet the same noise, and each has ids of its own. The
exit status is 1 if a median misses its bar. `tierbed` is `ServedRows.look_up`, which takes arguments that were checked
before; `checked` is the call that checks them. `crafted` looks up ids whose hashes are neighbours, in a table with a
million of such ids and as many random ones.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierbed.engine.ops.batch import to_keys
from tierbed.engine.options.initializers import make_normal_initializer, make_table_options
from tierbed.engine.options.table_spec import make_table_spec
from tierbed.serving.folder import ServingFolder
from tierbed.serving.row_file import RowFileWriter, encode, hash_rows
from tierbed.serving.served import ServedRows
from tierbed.serving.version import RowFileEntry, ServedEmbedding, ServedTable, SnapshotEntry

FEATURES, DIM = 26, 64
BARS = {1: 0.35, 16: 0.5, 256: 1.0}
POOL = 400  # batches that calls take in turn
Call = Callable[[int], Any]


def make_rows(folder: Path, keys: list[Any], rows: Any) -> ServedRows:
    """Write a table for each array of keys, and open them."""
    served, tables = ServingFolder(folder), []
    served.files.mkdir(parents=True)
    for table, table_keys in enumerate(keys):
        name, hashes = f"ids-{table}-base.rows", hash_rows(table, table_keys)
        writer, order = RowFileWriter(served.files / name, DIM, "int8", "base", table), np.argsort(hashes)
        for part in np.array_split(order, 16):
            writer.append_encoded(hashes[part], rows[part])
        tables.append(ServedTable(RowFileEntry(name, *writer.close(), len(table_keys), 0), None))
    options = [make_table_options(make_normal_initializer(0.0, 0.05))] * len(keys)
    spec = make_table_spec("ids", DIM, torch.int64, options, None, 0)
    description = {
        "name": "ids", "key_type": "int64", "dtype": "float32", "columns": [DIM], "width": DIM, "optimizer": None,
        "states": [], "state_widths": [], "initial": [], "hyper": [], "seed": 0, "tables": spec.describe_tables(),
        "padding_idx": None, "step": 0,
    }  # fmt: skip
    entry = ServedEmbedding("ids", tuple(tables), SnapshotEntry("", "", 0, 0), description)
    return ServedRows(entry, served, "initial", torch.float32, None)


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


def measure(calls: dict[str, Call], reps: int) -> dict[str, list[float]]:
    """Returns each call's sorted times in microseconds. The calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(reps):
        for offset, (name, call) in zip(range(0, POOL, POOL // 4), calls.items(), strict=False):
            begin = time.perf_counter_ns()
            call((number + offset) % POOL)
            times[name].append((time.perf_counter_ns() - begin) / 1e3)
    return {name: sorted(each) for name, each in times.items()}


def report(label: str, times: dict[str, list[float]], reference: str) -> float:
    """Print medians and 99th percentiles. Returns the first call's share of the reference's median."""
    medians = {name: each[len(each) // 2] for name, each in times.items()}
    texts = [f"{name} {medians[name]:.1f} (p99 {each[len(each) * 99 // 100]:.1f})" for name, each in times.items()]
    ratio = next(iter(medians.values())) / medians[reference]
    print(f"{label}: {', '.join(texts)} us; {ratio:.2f} of {reference}")
    return ratio


def compare_with_fbgemm(folder: Path, num_rows: int) -> bool:
    """Returns True if all bars are met."""
    random = np.random.default_rng(0)
    features = [*range(FEATURES)]
    keys = [random.permutation(num_rows).astype(np.uint64) * np.uint64(7919) for _ in features]
    rows = encode(random.standard_normal((num_rows, DIM), np.float32) * np.float32(0.05), "int8", 0, keys[0])
    served, fbgemm, is_met = make_rows(folder, keys, rows), make_fbgemm(rows), True
    for batch, bar in BARS.items():
        numbers = [random.integers(0, num_rows, (FEATURES, batch)) for _ in range(POOL)]
        arrays = [np.concatenate([keys[t][each[t]] for t in features]).view(np.int64) for each in numbers]
        ids = [torch.from_numpy(each) for each in arrays]
        dense = [torch.from_numpy(each.reshape(-1).astype(np.int32)) for each in numbers]
        offsets = torch.arange(batch * FEATURES + 1)
        offsets32, tables = offsets.int(), np.arange(FEATURES, dtype=np.uint32)

        def call_tierbed(
            i: int, ids: Any = ids, offsets: Any = offsets, tables: Any = tables, batch: int = batch
        ) -> Any:
            return served.look_up((to_keys(ids[i]), tables, offsets.numpy(), tables, batch), (batch, FEATURES))

        def call_checked(i: int, ids: Any = ids, offsets: Any = offsets) -> Any:
            return served(ids[i], None, offsets, "sum", features=features)

        def call_fbgemm(i: int, dense: Any = dense, offsets32: Any = offsets32) -> Any:
            return fbgemm(dense[i], offsets32)

        for i in range(20):
            torch.testing.assert_close(call_tierbed(i).flatten(1), call_fbgemm(i), rtol=1e-5, atol=1e-6)
            assert torch.equal(call_tierbed(i), call_checked(i))
        calls = {"tierbed": call_tierbed, "checked": call_checked, "fbgemm": call_fbgemm}
        with torch.inference_mode():
            is_met &= report(f"batch {batch}", measure(calls, 2000 if batch < 256 else 600), "fbgemm") <= bar
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
    served = make_rows(folder, [keys], encode(np.ones((len(keys), DIM), np.float32), "int8", 0, keys))
    batches = {
        name: [torch.from_numpy(random.choice(each, 4096).view(np.int64)) for _ in range(POOL)]
        for name, each in (("crafted", crafted), ("random", common))
    }
    assert bool((served(batches["crafted"][0]) == 1).all())
    calls: dict[str, Call] = {name: lambda i, ids=ids: served(ids[i]) for name, ids in batches.items()}
    return report("4,096 ids", measure(calls, 600), "random") <= 2.0


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
