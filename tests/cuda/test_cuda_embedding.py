"""Embeddings and graphs whose tables are on a device: the same bits as on the CPU, whatever store and rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.cuda_tables import on_one_device, tables_on
from support.device_steps import VARIANTS, started
from support.embeddings import DIM, contents
from support.optimizers import OPTIMIZERS
from tierbed import MultiTableEmbedding
from tierbed.engine.ops.cuda.device import Device
from tierbed.snapshots.files.reader import Snapshot

STORES = ["device", "host", "cached_host", "ssd", "ssd_host", *VARIANTS]
COUNTED = ("hits", "misses", "evictions_clean", "evictions_dirty", "insertions", "overflows", "resident_rows")


def same(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.view(torch.uint8).numpy().tobytes() == y.view(torch.uint8).numpy().tobytes()


def of_steps(store: str, embedding: MultiTableEmbedding) -> dict[str, Any]:
    """What metrics count of rows at the top. Memory differs, and in a host cache the order of a batch's rows."""
    metrics = embedding.metrics()
    top = metrics["device" if "device" in metrics else "host"]
    counts = {name: top[name] for name in COUNTED if name in top}
    tables = [list(numbers.values()) for numbers in metrics["tables"].values()]
    expected = [metrics["table"]["rows"], top["hits"], top["misses"], 0]  # none dropped
    assert np.sum(tables, 0).tolist() == expected
    if store not in ("device", "host", "capacity", "host_capacity"):  # on the CPU, rows without a set stay a while
        asked, gone = (counts.pop(one) + counts.pop(two) for one, two in (COUNTED[:2], COUNTED[2:4]))
        del counts["overflows"]
        table = metrics["table"]
        table |= {"train_asked": table.pop("train_hits") + table.pop("train_misses")}
        table |= {"evaluate_asked": table.pop("evaluate_hits") + table.pop("evaluate_misses")}
        counts |= {"asked": asked, "evictions": gone}
        tables = [[rows, hits + misses] for rows, hits, misses, _ in tables]
    return {**metrics["table"], "total_bytes": None, **counts, "tables": tables}


@on_one_device
@pytest.mark.parametrize(
    ("store", "optimizer"),
    [
        pytest.param(store, name, marks=[] if name == [*OPTIMIZERS][number % len(OPTIMIZERS)] else pytest.mark.slow)
        for number, store in enumerate(STORES)
        for name in OPTIMIZERS
    ],
)
def test_a_run_has_the_bits_of_the_cpu(tmp_path: Path, device: Device, store: str, optimizer: str) -> None:
    here = started(store, optimizer, tmp_path / "here", torch.device("cpu"))
    here.steps(0)
    with tables_on(device) as place:
        there = started(store, optimizer, tmp_path / "there", place)
        there.steps(0)
        pair = (here.graph.rows, there.graph.rows)
        same(here.seen, there.seen)
        assert contents(pair[1]).tobytes() == contents(pair[0]).tobytes()
        assert of_steps(store, pair[1]) == of_steps(store, pair[0])
        assert pair[1].size() == pair[0].size() > 100
        for a, b in zip(pair[0].chunks(), pair[1].chunks(), strict=True):
            same(list(a), list(b))
        keys = torch.arange(-9, 9).repeat(3, 1).T * (2**40 + 1)
        same([pair[0].get(keys)], [pair[1].get(keys).cpu()])
        same([pair[0](keys)], [pair[1](keys.to(place)).cpu()])
        for key in range(-9, 9):
            here_is, there_is = (rows.explain(key * (2**40 + 1), 2) for rows in pair)
            assert {**there_is, "tiers": []} == {**here_is, "tiers": []}
            assert bool(there_is["tiers"]) == bool(here_is["tiers"])
        for rows in pair:
            rows.put([[5, 6, 5]], torch.arange(3.0 * DIM).reshape(1, 3, DIM), [[0, 1, 0]])
            rows.save_snapshot("first")
        assert snapshot(tmp_path / "there") == snapshot(tmp_path / "here")
        for run in (here, there):
            run.steps(1, 3)
            run.graph.rows.load_snapshot("first")
            run.steps(2, 2)
        gone = torch.arange(-60, 60).repeat(2, 1) * (2**40 + 1)
        deleted = [rows.delete(gone, [[0], [2]]) for rows in pair]
        assert deleted[0] == deleted[1] > 20
        for run in (here, there):
            run.steps(5, 2)
        same(here.seen, there.seen)
        expected = contents(pair[0])
        assert contents(pair[1]).tobytes() == expected.tobytes()
        for rows in pair:
            rows.close()
        again = started(store, optimizer, tmp_path / "there", place)
        assert contents(again.graph.rows).tobytes() == expected.tobytes()
        again.steps(3, 2)
        expected = contents(again.graph.rows)
        again.graph.rows.close()
    # what a device left, the CPU goes on with
    resumed = started(store, optimizer, tmp_path / "there", torch.device("cpu"))
    assert contents(resumed.graph.rows).tobytes() == expected.tobytes()
    resumed.graph.rows.close()


def snapshot(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Its description, without the id of its run, and its files of rows by name."""
    folder = path / "rows" / "snapshots" / "first"
    return {**Snapshot.open(folder).description, "run": ""}, {
        file.name: file.read_bytes() for file in folder.glob("bucket*")
    }


@on_one_device
@pytest.mark.parametrize(
    ("store", "pooling", "dtype"), [("device", "sum", torch.float32), ("cached_host", "mean", torch.bfloat16)]
)
def test_bags_have_the_bits_of_the_cpu(device: Device, store: str, pooling: str, dtype: torch.dtype) -> None:
    here = started(store, "adagrad", None, torch.device("cpu"), pooling, output_dtype=dtype)
    here.steps(4)
    with tables_on(device) as place:
        there = started(store, "adagrad", None, place, pooling, output_dtype=dtype)
        there.steps(4)
        same(here.seen, there.seen)
        assert contents(there.graph.rows).tobytes() == contents(here.graph.rows).tobytes()


@on_one_device
@pytest.mark.parametrize(("store", "ahead", "dtype"), [("device", 0, torch.float32), ("ssd", 8, torch.bfloat16)])
def test_accumulated_calls_have_the_bits_of_the_cpu(
    tmp_path: Path, device: Device, store: str, ahead: int, dtype: torch.dtype
) -> None:
    def accumulated(path: Path, place: torch.device) -> tuple[Any, list[Any]]:
        run = started(store, "adagrad", path, place, "mean", output_dtype=dtype)
        run.graph.accumulate_grads(3, mean=True)
        run.graph.clip_grad_norm(2.0)
        found = list(run.graph.run(run.batches(0), ahead=ahead))
        assert run.graph.rows.metrics()["table"]["prefetch_hits"] == (2 if ahead else 0)
        return run.graph.rows, found

    rows, seen = accumulated(tmp_path / "here", torch.device("cpu"))
    with tables_on(device) as place:
        there, seen_there = accumulated(tmp_path / "there", place)
        for here_is, there_is in zip(seen, seen_there, strict=True):
            same(here_is, [value.cpu() for value in there_is])
        assert contents(there).tobytes() == contents(rows).tobytes()
        assert rows.metrics()["table"]["step"] == there.metrics()["table"]["step"] == 2
