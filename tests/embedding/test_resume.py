"""A table goes on where its last run closed, on any store, and comes back from snapshots."""

from __future__ import annotations

import shutil

import pytest
import torch

from support.embeddings import DIM, attach, contents, make, rows_by_key, train
from support.killed import embedding_at, holds, remarks, steps, two_rows_a_chunk
from support.optimizers import few_optimizers
from support.small_snapshots import flip_bit
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, OptimizerError, SnapshotError, TierbedError
from tierbed.engine.options.lookup import Lookup

__all__ = ["two_rows_a_chunk"]
pytestmark = pytest.mark.usefixtures("two_rows_a_chunk")
every_store = pytest.mark.parametrize("store", STORES)
on_memory_and_disk = pytest.mark.parametrize("store", ["device", "ssd_host"])


@pytest.mark.parametrize("other", ["host", "ssd_host"])
@every_store
@pytest.mark.rotated("other")
def test_training_goes_on_after_a_close_on_any_store(tmp_path, store, other, caplog) -> None:
    for count, kind in enumerate((store, other, other, store)):
        with embedding_at(tmp_path, kind, open="error") as embedding:
            holds(embedding, 4 * count)
            steps(embedding, 4)
            holds(embedding, 4 * count + 4)
    assert not remarks(caplog)


@few_optimizers
def test_optimizer_state_and_step_come_back_with_the_rows(tmp_path, optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randint(-30, 30, (50,), generator=generator), torch.arange(50) % 3) for _ in range(3)]
    with make(options("device"), optimizer) as whole:
        for batch, store in zip(batches, ("ssd", "host", "ssd"), strict=True):
            train(whole, *batch)
            with make(options(store, tmp_path), optimizer) as part:
                train(part, *batch)
        with make(options("cached_host", tmp_path), optimizer) as part:
            assert contents(part).tobytes() == contents(whole).tobytes()
            mine, its = (made.metrics()["table"] for made in (part, whole))
            differ = [name for name in mine if name.startswith("train_")] + ["total_bytes"]  # since the open, by store
            assert mine | dict.fromkeys(differ) == its | dict.fromkeys(differ)


@every_store
def test_reading_leaves_a_clean_folder_clean_and_its_rows_alone(tmp_path, store, caplog) -> None:
    for optimizer in (None, "adagrad", "adagrad"):
        with embedding_at(tmp_path / "new", store, optimizer, open="error") as embedding:
            assert embedding.get([1, 2]).shape == (2, DIM)
            assert embedding.size() == 0
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
    assert not remarks(caplog)
    with embedding_at(tmp_path, store, None, open="error") as embedding:
        assert embedding.size() > 0
        attach(embedding, "adagrad")  # which finds rows and state
        steps(embedding, 1)
        holds(embedding, 6)


@pytest.mark.parametrize("other", ["host", "ssd_host"])
@every_store
@pytest.mark.rotated("other")
def test_a_snapshot_brings_rows_and_step_back_and_training_goes_on_from_it(tmp_path, store, other) -> None:
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


@on_memory_and_disk
def test_a_snapshot_that_cannot_be_loaded_leaves_the_running_table_as_it_was(tmp_path, store) -> None:
    place = tmp_path / "rows" / "snapshots"
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 3)
        for name in ("flipped", "headless"):
            embedding.save_snapshot(name)
        flip_bit(sorted((place / "flipped").glob("*.npy"))[-1], -8)
        (place / "headless" / "manifest.msgpack").unlink()
        for name, changes in {"wide": {"embedding_dim": 7}, "trained": {}}.items():
            usual = {"embedding_dim": DIM, "dtype": torch.float32, "key_type": torch.int64, "tables": None}
            there = options("device", tmp_path / name)
            with MultiTableEmbedding("other", **{**usual, **changes}, store_options=there) as other:
                if name == "trained":
                    attach(other, "adam")
                other.put([1], torch.ones(1, other.dim))
                other.save_snapshot("s")
            shutil.copytree(tmp_path / name / "other" / "snapshots" / "s", place / name)
        steps(embedding, 1)
        for name, message in {
            "missing": r"no snapshot 'missing' in .*; existing ones: 'flipped', 'headless'",
            "flipped": r"checksum",
            "headless": r"has no manifest\.msgpack: it is not a snapshot, or is damaged",
            "wide": r"snapshot 'wide' holds rows of embedding_dim \[7\], not \[5\]",
            "trained": r"snapshot 'trained' holds rows of optimizer adam",
        }.items():
            with pytest.raises((SnapshotError, OptimizerError), match=message):
                embedding.load_snapshot(name)
            holds(embedding, 4)
        steps(embedding, 1)
    with embedding_at(tmp_path, store) as embedding, pytest.raises(SnapshotError):
        embedding.load_snapshot("missing")  # before the first write
    with embedding_at(tmp_path, store, None, open="error") as reader:
        holds(reader, 5)
        with pytest.raises(OptimizerError, match=r"'rows'.*optimizer"):
            reader.put([5000], torch.ones(1, DIM))  # nobody knows the state that the new row begins with
        with pytest.raises(OptimizerError, match=r"'rows' has no optimizer"):
            reader.pin([Lookup(torch.tensor([1]))])
        holds(reader, 5)


@pytest.mark.parametrize("damage", ["all", "a part", "a bit"])
@on_memory_and_disk
@pytest.mark.rotated("store")
def test_live_rows_that_vanished_or_are_damaged_are_never_served(tmp_path, store, damage) -> None:
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 3)
        keys = [key for _, key in rows_by_key(embedding)]
    live = tmp_path / "rows" / "live"
    if damage == "all":
        shutil.rmtree(live)
    elif damage == "a part":
        part = sorted(path for path in live.iterdir() if path.name != "manifest.msgpack")[1]
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    else:  # of a row, and not of what lies behind the last
        file = sorted([*live.glob("*.npy"), *live.glob("*/*.sst")])[0]
        flip_bit(file, 8 * min(file.stat().st_size // 3, 200))
    for other in (store,) if damage == "a bit" else (store, "device", "ssd"):
        with pytest.raises(TierbedError, match="live"), embedding_at(tmp_path, other, None) as embedding:  # noqa: PT012
            embedding.get(keys)
            rows_by_key(embedding)
    with embedding_at(tmp_path, store, open="fresh") as embedding:
        holds(embedding, 0)
    with embedding_at(tmp_path, store) as embedding:  # which was closed without a step, and stays empty
        holds(embedding, 0)


@pytest.mark.parametrize("damaged", ["one", "two"])
def test_a_folder_without_mark_is_not_resumed_while_a_snapshot_cannot_be_read(tmp_path, damaged) -> None:
    with embedding_at(tmp_path, "host") as embedding:
        for name in ("one", "two"):
            steps(embedding, 1)
            embedding.save_snapshot(name)
    (tmp_path / "rows" / "MARK").unlink()
    manifest = tmp_path / "rows" / "snapshots" / damaged / "manifest.msgpack"
    flip_bit(manifest, 1000)
    with pytest.raises(SnapshotError, match=rf"cannot tell which step is the latest: .*{damaged}/manifest.msgpack"):
        embedding_at(tmp_path, "host").size()
    shutil.rmtree(manifest.parent)
    with embedding_at(tmp_path, "host") as embedding:
        holds(embedding, 1 if damaged == "two" else 2)
