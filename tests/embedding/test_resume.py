"""A table goes on where its last run closed, on any store, and comes back from snapshots."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import DIM, attach, contents, make, rows_by_key, train
from support.killed import embedding_at, holds, remarks, steps
from support.optimizers import OPTIMIZERS
from support.small_snapshots import flip_bit
from support.stores import STORES, options
from tierbed import ClosedError, MultiTableEmbedding, OptimizerError, SnapshotError, StoreError, TierbedError
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.store import rocksdb
from tierbed.snapshots.store.folder import StoreFolder

every_store = pytest.mark.parametrize("store", STORES)
on_memory_and_disk = pytest.mark.parametrize("store", ["device", "ssd_host"])


@pytest.fixture(autouse=True)
def two_rows_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of RocksDB comes in many chunks though tables are small."""
    monkeypatch.setattr(rocksdb, "SCAN_BYTES", 200)


@pytest.mark.parametrize("other", STORES)
@every_store
@pytest.mark.rotated("other")
def test_training_goes_on_after_a_close_on_any_store(
    tmp_path: Path, store: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    for count, kind in enumerate((store, other, other, store)):
        with embedding_at(tmp_path, kind, open="error") as embedding:
            holds(embedding, 4 * count)
            steps(embedding, 4)
            holds(embedding, 4 * count + 4)
    assert not remarks(caplog)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_and_step_come_back_with_the_rows(tmp_path: Path, optimizer: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randint(-30, 30, (50,), generator=generator), torch.arange(50) % 3) for _ in range(3)]
    with make(options("device"), optimizer) as whole:
        for batch in batches:
            train(whole, *batch)
        for number, batch in enumerate(batches):
            with make(options(("ssd", "host", "ssd")[number], tmp_path), optimizer) as part:
                train(part, *batch)
        with make(options("cached_host", tmp_path), optimizer) as part:
            assert contents(part).tobytes() == contents(whole).tobytes()
            mine, its = (made.metrics()["table"] for made in (part, whole))
            differ = [name for name in mine if name.startswith("train_")] + ["total_bytes"]  # since the open, by store
            assert mine | dict.fromkeys(differ) == its | dict.fromkeys(differ)


@every_store
def test_reading_leaves_a_clean_folder_clean_and_its_rows_alone(tmp_path: Path, store: str) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 5)
    marker = (tmp_path / "rows" / "MARK").read_bytes()
    for other in (store, "device", "ssd"):
        for optimizer in (None, "adagrad"):
            with embedding_at(tmp_path, other, optimizer, open="error") as embedding:
                holds(embedding, 5)
                assert len(rows_by_key(embedding)) == embedding.size() > 0
                embedding.get(torch.arange(1000))
            assert other != store or (tmp_path / "rows" / "MARK").read_bytes() == marker
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 5)
        steps(embedding, 1)
        holds(embedding, 6)


@every_store
def test_reading_a_new_folder_leaves_nothing_to_complain_of(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    for optimizer in (None, "adagrad", "adagrad"):
        with embedding_at(tmp_path, store, optimizer, open="error") as embedding:
            assert embedding.get([1, 2]).shape == (2, DIM)
            assert embedding.size() == 0
    assert not remarks(caplog)


@on_memory_and_disk
def test_a_store_with_state_is_read_only_without_its_optimizer(tmp_path: Path, store: str) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 3)
    with embedding_at(tmp_path, store, None) as reader:
        holds(reader, 3)
        with pytest.raises(OptimizerError, match=r"'rows'.*optimizer"):
            reader.put([5000], torch.ones(1, DIM))  # nobody knows the state that the new row begins with
        with pytest.raises(OptimizerError, match=r"'rows' has no optimizer"):
            reader.pin([Lookup(torch.tensor([1]))])
        holds(reader, 3)


def test_a_store_without_state_is_put_to_again(tmp_path: Path) -> None:
    expected = {}
    for key, store in enumerate(STORES):
        with embedding_at(tmp_path, store, None) as embedding:
            assert rows_by_key(embedding) == expected
            embedding.put([key], torch.full((1, DIM), float(key)))
            expected[0, key] = [float(key)] * DIM


@every_store
def test_an_optimizer_that_comes_after_reading_finds_rows_and_state(tmp_path: Path, store: str) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 2)
    with embedding_at(tmp_path, store, None, open="error") as embedding:
        assert embedding.size() > 0
        optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1, initial_accumulator_value=0.1)
        embedding.attach(optimizer, optimizer.param_groups[0])
        steps(embedding, 5)
        holds(embedding, 7)


@pytest.mark.parametrize("other", STORES)
@every_store
@pytest.mark.rotated("other")
def test_a_snapshot_brings_rows_and_step_back_and_training_goes_on_from_it(
    tmp_path: Path, store: str, other: str
) -> None:
    with embedding_at(tmp_path, store) as embedding:
        embedding.save_snapshot("empty")
        steps(embedding, 3)
        embedding.save_snapshot("three")
        steps(embedding, 3)
        embedding.save_snapshot("six")
        holds(embedding, 6)
        for name, count in (("six", 6), ("empty", 0), ("three", 3), ("three", 3)):
            embedding.load_snapshot(name)
            holds(embedding, count)
            steps(embedding, 2)
            holds(embedding, count + 2)
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 5)
        embedding.load_snapshot("six")
    with embedding_at(tmp_path, other, open="error") as embedding:
        holds(embedding, 6)
        embedding.load_snapshot("three")
        holds(embedding, 3)


def foreign_snapshot(target: Path, tmp_path: Path, optimizer: str | None = None, **changes: Any) -> None:
    """A snapshot of another embedding in `target`."""
    usual = {"name": "other", "embedding_dim": DIM, "dtype": torch.float32, "key_type": torch.int64, "tables": None}
    other = MultiTableEmbedding(**{**usual, "store_options": options("device", tmp_path), **changes})
    with other:
        if optimizer is not None:
            attach(other, optimizer)
        other.put([1], torch.ones(1, other.dim))
        other.save_snapshot("s")
    shutil.copytree(tmp_path / "other" / "snapshots" / "s", target)


@on_memory_and_disk
def test_a_snapshot_that_cannot_be_loaded_leaves_the_running_table_as_it_was(tmp_path: Path, store: str) -> None:
    place = tmp_path / "rows" / "snapshots"
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 3)
        for name in ("flipped", "shortened", "lacking", "headless", "unsealed"):
            embedding.save_snapshot(name)
        bucket = sorted(file.name for file in (place / "flipped").glob("*.npy"))[-1]
        flip_bit(place / "flipped" / bucket, -8)
        (place / "shortened" / bucket).write_bytes((place / "shortened" / bucket).read_bytes()[:-4])
        (place / "lacking" / bucket).unlink()
        (place / "headless" / "manifest.msgpack").unlink()
        flip_bit(place / "unsealed" / "manifest.msgpack", 8 * 30)
        (place / "hollow").mkdir()
        foreign_snapshot(place / "wide", tmp_path / "a", embedding_dim=7)
        foreign_snapshot(place / "narrow", tmp_path / "b", key_type=torch.int32)
        foreign_snapshot(place / "trained", tmp_path / "c", optimizer="adam")
        steps(embedding, 1)
        for name, message in {
            "missing": r"no snapshot 'missing' in .*; existing ones: 'flipped', 'headless'",
            "flipped": r"checksum",
            "shortened": rf"{re.escape(bucket)}' is damaged",
            "lacking": rf"{re.escape(bucket)}' is damaged",
            "headless": r"has no manifest\.msgpack: it is not a snapshot, or it is damaged",
            "unsealed": r"manifest\.msgpack' cannot be read",
            "hollow": r"has no manifest\.msgpack: it is not a snapshot",
            "wide": r"snapshot 'wide' holds rows of embedding_dim \[7\], not \[5\]",
            "narrow": r"snapshot 'narrow' holds rows of key_type int32, not int64",
            "trained": r"snapshot 'trained' holds rows of optimizer adam",
        }.items():
            with pytest.raises((SnapshotError, OptimizerError), match=message):
                embedding.load_snapshot(name)
            holds(embedding, 4)
        steps(embedding, 1)
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 5)


@on_memory_and_disk
def test_a_load_that_fails_before_the_first_write_leaves_the_folder_clean(tmp_path: Path, store: str) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 3)
    with embedding_at(tmp_path, store) as embedding, pytest.raises(SnapshotError):
        embedding.load_snapshot("missing")
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 3)


@on_memory_and_disk
def test_a_damaged_mark_is_no_mark(tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 2)
        embedding.save_snapshot("two")
        steps(embedding, 2)
    flip_bit(tmp_path / "rows" / "MARK", 100)
    with embedding_at(tmp_path, store) as embedding:
        holds(embedding, 2)
    assert "restored snapshot 'two'" in remarks(caplog)[0]


@pytest.mark.parametrize("loss", ["all", "a part"])
@on_memory_and_disk
def test_rows_that_vanished_behind_a_mark_are_missed(tmp_path: Path, store: str, loss: str) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 3)
    live = tmp_path / "rows" / "live"
    if loss == "all":
        shutil.rmtree(live)
    else:
        part = sorted(path for path in live.iterdir() if path.name != "manifest.msgpack")[1]
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    for other in (store, "device", "ssd"):
        with pytest.raises(TierbedError, match="live"):
            embedding_at(tmp_path, other).size()


@on_memory_and_disk
def test_damaged_live_rows_are_never_served(tmp_path: Path, store: str) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 3)
        everything = rows_by_key(embedding)
    files = sorted([*tmp_path.glob("rows/live/*.npy"), *tmp_path.glob("rows/live/*/*.sst")])
    flip_bit(files[0], 8 * min(files[0].stat().st_size // 3, 200))  # of a row, and not of what lies behind the last
    with pytest.raises(TierbedError, match="live"), embedding_at(tmp_path, store, None) as embedding:  # noqa: PT012
        embedding.get([key for _, key in everything])
        rows_by_key(embedding)
    with embedding_at(tmp_path, store, open="fresh") as embedding:
        holds(embedding, 0)


@on_memory_and_disk
def test_fresh_that_is_closed_without_a_step_stays_empty(tmp_path: Path, store: str) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 2)
        embedding.save_snapshot("s")
    with embedding_at(tmp_path, store, open="fresh") as embedding:
        holds(embedding, 0)
    with embedding_at(tmp_path, store) as embedding:
        holds(embedding, 0)
        embedding.load_snapshot("s")
        holds(embedding, 2)


@pytest.mark.parametrize("store", STORES)
def test_an_embedding_whose_folder_another_one_replaced_writes_nothing_there(tmp_path: Path, store: str) -> None:
    embedding = make(options(store, tmp_path), "sgd")
    train(embedding, range(50))
    shutil.rmtree(tmp_path / "rows")
    with StoreFolder(tmp_path / "rows") as other:
        for act in (lambda: embedding.save_snapshot("s"), lambda: embedding.load_snapshot("s"), embedding.close):
            with pytest.raises(StoreError, match="rows' was replaced by another while it was open"):
                act()
        embedding.close()
        with pytest.raises(ClosedError):
            embedding.size()
        assert [entry.name for entry in other.path.iterdir()] == ["LOCK"]
