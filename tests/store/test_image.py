"""The rows as of one step, read while they change: what snapshots in the background are made of."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from support.changed_rows import FIRST, applied, by_name
from support.cuda_tables import on_one_device, on_processors, with_policies
from support.embeddings import DIM, contents, make, train
from support.examples import examples
from support.images import change, changed, check_image, in_memory, joined, small_chunks, table_of
from support.lifecycle_model import POLICIES, batches
from support.stores import STORES, options
from tierbed import ClosedError, StoreError
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.row_format import Chunks, row_dtype
from tierbed.engine.store.cuda import changed_lines
from tierbed.engine.store.cuda import full_tier as cuda_image
from tierbed.engine.store.image import MemoryImage
from tierbed.engine.store.merging import merge_sorted
from tierbed.snapshots import Snapshot

__all__ = ["small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")
stores = pytest.mark.parametrize("store", STORES)


@stores
@with_policies({name: POLICIES[name] for name in ("lru", "sweeps", "sights")})
@examples(0.1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=st.lists(st.integers(0, 25), min_size=1, max_size=12), before=st.integers(0, 4))
@pytest.mark.rotated("store")
def test_an_image_is_of_one_instant_whatever_happens_while_it_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    place: torch.device,
    store: str,
    policy: dict[str, Any],
    gaps: list[int],
    before: int,
) -> None:
    path = tmp_path_factory.mktemp("store")
    check_image(*(options(store, path / part, **policy) for part in ("one", "other", "twin")), gaps, before, place)


@stores
@examples(0.1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=st.lists(st.integers(0, 9), min_size=1, max_size=12), before=st.integers(0, 4), during=st.integers(0, 4))
@pytest.mark.rotated("store")
def test_an_image_of_changes_is_of_one_instant(
    tmp_path_factory: pytest.TempPathFactory, store: str, gaps: list[int], before: int, during: int
) -> None:
    with make(options(store, tmp_path_factory.mktemp("store")), "adagrad") as embedding:
        observers = table_of(embedding).observers
        train(embedding, [1])
        for number in range(before):
            change(embedding, number)
        observers.track_changes(FIRST)
        old = by_name(contents(embedding))
        for number in range(before, before + during):
            change(embedding, number)
        expected, numbers = by_name(contents(embedding)), itertools.count(before + during)
        image = observers.open_image(parent_id=FIRST)
        changes = image.chunks()
        parts = []
        for gap in gaps:
            parts += itertools.islice(changes, gap)
            change(embedding, next(numbers))
        assert applied(old, itertools.chain(parts, changes))[0] == expected
        image.close()


def test_a_row_that_changes_where_reading_pauses_is_read_as_it_was() -> None:
    with make(options("host"), "adagrad") as embedding:
        train(embedding, range(1000))
        expected = contents(embedding).tobytes()
        chunks = table_of(embedding).observers.open_image().chunks()
        first = [next(chunks)]  # three of the rows of a bucket
        train(embedding, range(1000))
        assert joined(itertools.chain(first, chunks)) == expected


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("writes_back", [False, True])
def test_parts_of_an_image_hold_each_row_once(tmp_path: Path, shards: int, writes_back: bool) -> None:
    with make(options("ssd", tmp_path, shards=shards), "adagrad") as embedding:
        for number in range(6):
            change(embedding, number)
        image = table_of(embedding).observers.open_image(writes_back=writes_back)
        parts = image.parts()
        for number in range(6, 9):
            change(embedding, number)
        assert joined(merge_sorted(parts)) == changed(options("host"), range(6))
        image.close()


@stores
@on_processors
@pytest.mark.rotated("store")
def test_an_image_of_rows_that_a_step_holds(tmp_path: Path, place: torch.device, store: str) -> None:
    with make(options(store, tmp_path), "adagrad").to(place) as embedding:
        train(embedding, range(0, 100, 3))
        ids = torch.arange(100, device=place)
        pinned = embedding.pin([Lookup(ids, torch.zeros_like(ids))])  # some are new
        expected = contents(embedding).tobytes()
        image = table_of(embedding).observers.open_image()
        pinned.update([torch.ones(100, DIM, device=place)])
        assert contents(embedding).tobytes() != expected
        assert joined(image.chunks()) == expected


@pytest.mark.parametrize("store", ["cached_host", "ssd", "ssd_host"])
def test_an_image_while_batches_are_prefetched(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        lookups = [Lookup(ids, tables) for ids, tables in batches()]
        train(embedding, *lookups[0][:2])
        for lookup in lookups:
            embedding.prefetch(lookup.ids, lookup.table_ids)
        expected = contents(embedding).tobytes()
        chunks = table_of(embedding).observers.open_image().chunks()
        read = []
        for lookup in lookups:
            train(embedding, lookup.ids, lookup.table_ids)
            read += [chunk for _, chunk in zip(range(20), chunks, strict=False)]
        read += chunks
        assert joined(iter(read)) == expected
        assert embedding.metrics()["table"]["prefetch_hits"] > 0


@in_memory
@on_processors
@pytest.mark.rotated("store")
def test_what_is_kept_goes_with_its_bucket(tmp_path: Path, place: torch.device, store: str) -> None:
    with make(options(store, tmp_path), "adagrad").to(place) as embedding:
        train(embedding, range(900))
        image = table_of(embedding).observers.open_image()
        assert isinstance(image, MemoryImage)
        assert image._table_image is not None
        train(embedding, range(900))
        size = 900 * row_dtype(2 * DIM).itemsize
        assert 0.9 * size < (kept := image._table_image.before_image_bytes) < 4 * size
        train(embedding, range(900))  # kept already
        assert image._table_image.before_image_bytes == kept
        chunks = image.chunks()
        for bucket, _ in chunks:
            if bucket == 32:
                break
        train(embedding, range(900))  # or read already
        assert 0 < image._table_image.before_image_bytes < 0.7 * kept
        list(chunks)
        assert image._table_image.before_image_bytes == 0


def test_there_is_one_image_at_a_time() -> None:
    with make(options("device"), "adagrad") as embedding:
        table = table_of(embedding)
        image = table.observers.open_image()
        with pytest.raises(StoreError, match="has an image already"):
            table.observers.open_image()
        image.close()
        image.close()
        with pytest.raises(ClosedError):
            next(image.chunks())
        table.observers.open_image()


@on_one_device
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_snapshots_on_a_device_cost_the_change_and_training_goes_on(
    tmp_path: Path, place: torch.device, store: str
) -> None:
    with make(options(store, tmp_path), "adam").to(place) as embedding:
        train(embedding, range(300))
        embedding.save_snapshot("first")
        embedding.save_snapshot("noted", "incremental")
        state = contents(embedding).tobytes()
        save = embedding.save_snapshot("behind", background=True)
        assert save is not None
        train(embedding, [1, 2, 5000])
        embedding.delete([7, 9], 0)
        assert save.wait()
        after = contents(embedding).tobytes()
        embedding.save_snapshot("later", "incremental")
        later = Snapshot.open(tmp_path / "rows" / "snapshots" / "later").manifest
        assert (later.num_entries, later.deleted, later.rows) == (5, 2, 299)
        embedding.load_snapshot("behind")
        assert contents(embedding).tobytes() == state
        embedding.load_snapshot("later")
        assert contents(embedding).tobytes() == after


def first_out_of_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for its first call."""
    failures = iter([torch.OutOfMemoryError()])

    def call(*arguments: Any) -> Any:
        if error := next(failures, None):
            raise error
        return function(*arguments)

    return call


@on_one_device
@pytest.mark.parametrize("background", [False, True])
def test_changes_are_known_after_memory_of_a_device_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: torch.device, background: bool
) -> None:
    with make(options("device", tmp_path), "adam").to(place) as embedding:
        train(embedding, range(100))
        embedding.save_snapshot("first")
        embedding.save_snapshot("noted", "incremental")
        train(embedding, range(50))
        monkeypatch.setattr(changed_lines, "recover_keys", first_out_of_memory(changed_lines.recover_keys))
        with pytest.raises(torch.OutOfMemoryError):
            embedding.save_snapshot("a", "full" if background else "incremental", background=background)
        embedding.save_snapshot("b", "incremental")
        assert Snapshot.open(tmp_path / "rows" / "snapshots" / "b").manifest.num_entries == 50
        save = embedding.save_snapshot("c", background=True)
        assert save is not None
        assert save.wait()


@on_one_device
def test_what_a_device_could_not_keep_is_kept_the_next_time(
    monkeypatch: pytest.MonkeyPatch, place: torch.device
) -> None:
    with make(options("device"), "adam").to(place) as embedding:
        train(embedding, range(100))
        expected = contents(embedding).tobytes()
        rows = table_of(embedding).observers.open_image()
        monkeypatch.setattr(cuda_image, "itertools", SimpleNamespace(pairwise=first_out_of_memory(itertools.pairwise)))
        with pytest.raises(torch.OutOfMemoryError):
            train(embedding, range(50))
        train(embedding, range(50))
        assert joined(rows.chunks()) == expected


@on_one_device
def test_a_save_that_failed_on_a_device_holds_no_rows(place: torch.device) -> None:
    with make(options("device"), "adam").to(place) as embedding:
        train(embedding, range(100))
        alive: list[weakref.ref[Any]] = []

        def write(chunks: Chunks) -> None:
            next(chunks)
            kept = table_of(embedding).observers.image
            assert isinstance(kept, MemoryImage)
            alive.append(weakref.ref(kept._table_image))
            raise OSError("as planned")

        save = table_of(embedding).observers.save_in_background("it", write)
        with pytest.raises(OSError, match="as planned"):
            save.wait()
        gc.collect()
        assert alive[0]() is None
