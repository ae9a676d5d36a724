"""DCNv2 from a KeyedJaggedTensor trains otherwise on another store, device or kind of loop, or without prefetch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support.cuda_tables import on_one_device, tables_on
from support.embeddings import contents
from support.places import EXAMPLES
from support.scripts import run_script
from tierbed.engine.ops.cuda.device import Device

sys.path.insert(0, str(EXAMPLES))
import multihot

DIM, ROWS, BATCH, STEPS, LR = 4, 500, 16, 30, 0.005
CACHE_MB = 0.1  # fewer rows than a batch and the coming ones need
LOOPS = pytest.mark.parametrize("loop", [False, True], ids=["graph", "loop"])


class Outcome(NamedTuple):
    """losses: of each step. rows: all of the store, sorted."""

    losses: list[float]
    rows: bytes
    metrics: dict[str, dict[str, Any]]


def train(store: str, path: Path, loop: bool, place: torch.device | None = None) -> Outcome:
    torch.manual_seed(0)
    clicks = multihot.Clicks(ROWS, seed=0)
    with multihot.make_collection(clicks.rows, DIM, multihot.STORES[store](str(path), CACHE_MB)) as ebc:
        model = multihot.DCNv2(ebc, DIM).to(place)
        batches = (multihot.Batch(*(part.to(place) for part in batch)) for batch in clicks.batches(STEPS, BATCH))
        if loop:
            run = multihot.train(model, LR, batches, loop)
        else:  # by default ahead would follow the misses
            run = multihot.TrainGraph(model, LR).run(batches, ahead=8 if store == "ssd" else None)
        losses = [loss.item() for loss in run]
        (embedding,) = ebc.embeddings.values()
        return Outcome(losses, contents(embedding).tobytes(), embedding.metrics())


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train("device", tmp_path_factory.mktemp("device"), loop=False)


def check(outcome: Outcome, expected: Outcome, store: str, announced: bool) -> None:
    assert len(outcome.losses) == STEPS
    assert outcome.losses == expected.losses
    assert outcome.rows == expected.rows
    table = outcome.metrics["table"]
    assert (table["prefetch_hits"], table["prefetch_misses"], table["prefetch_dropped"]) == (STEPS * announced, 0, 0)
    if store in ("cached_host", "ssd"):
        assert outcome.metrics["device"]["evictions_dirty"] > STEPS, "the cache was to be too small for the tables"


@LOOPS
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
@pytest.mark.rotated("loop")
def test_stores_and_loops_give_the_same_bits(store: str, loop: bool, on_device: Outcome, tmp_path: Path) -> None:
    check(train(store, tmp_path, loop), on_device, store, loop or store == "ssd")


@on_one_device
@LOOPS
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
@pytest.mark.slow
def test_a_gpu_gives_the_same(store: str, loop: bool, device: Device, on_device: Outcome, tmp_path: Path) -> None:
    with tables_on(device) as place:
        outcome = train(store, tmp_path, loop, place)
        expected = on_device
        if place.type == "cuda":  # where the dense part, which is torch's, has other bits
            assert outcome.losses == pytest.approx(expected.losses, rel=1e-3)
            expected = train("device", tmp_path / "full", loop, place)
        check(outcome, expected, store, loop or store == "ssd" or place.type == "cuda")


@pytest.mark.slow
def test_the_script_learns() -> None:
    arguments = "--store ssd --loop --cache-mb 0.5 --rows 500 --steps 100 --batch-size 128"
    done = run_script(Path(multihot.__file__), *arguments.split())
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+),", done.stdout))
    assert last < first < 0.75
