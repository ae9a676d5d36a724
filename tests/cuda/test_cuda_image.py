"""Images and noted changes of rows on a GPU: what snapshots in the background and incremental ones are made of."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.changed_rows import Calls, calls, check_noted
from support.cuda_tables import on_one_device, tables_on
from support.embeddings import DIM, contents, make, train
from support.images import check_image, joined, small_chunks, table_of
from support.stores import options
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.row_format import Chunks, row_dtype
from tierbed.engine.store.cuda import changed_lines
from tierbed.engine.store.cuda import full as image
from tierbed.engine.store.image import MemoryImage
from tierbed.snapshots import Snapshot

__all__ = ["small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")
in_memory = pytest.mark.parametrize("store", ["device", "host", "cached_host"])
stores = pytest.mark.parametrize("store", ["device", "host", "cached_host", "ssd", "ssd_host"])


@on_one_device
@stores
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=st.lists(st.integers(0, 25), min_size=1, max_size=6), before=st.integers(0, 3))
def test_an_image_is_of_one_instant_whatever_happens_while_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, device: Device, store: str, gaps: list[int], before: int
) -> None:
    path = tmp_path_factory.mktemp("store")
    with tables_on(device) as place:
        check_image(*(options(store, path / part) for part in ("one", "other")), gaps, before, place)


@on_one_device
@stores
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=calls, during=calls, after=calls, chunk=st.integers(1, 9))
def test_noted_changes_make_the_rows_of_now_of_those_before(
    tmp_path_factory: pytest.TempPathFactory,
    device: Device,
    store: str,
    before: Calls,
    during: Calls,
    after: Calls,
    chunk: int,
) -> None:
    with tables_on(device) as place:
        check_noted(options(store, tmp_path_factory.mktemp("store")), before, during, after, chunk, place)


@on_one_device
@stores
def test_an_image_of_rows_that_a_step_holds(tmp_path: Path, device: Device, store: str) -> None:
    with tables_on(device) as place, make(options(store, tmp_path), "adagrad").to(place) as embedding:
        train(embedding, range(0, 100, 3))
        ids = torch.arange(100, device=place)
        pinned = embedding.pin([Lookup(ids, torch.zeros_like(ids))])  # some are new
        expected = contents(embedding).tobytes()
        rows = table_of(embedding).observers.image()
        pinned.update([torch.ones(100, DIM, device=place)])
        assert contents(embedding).tobytes() != expected
        assert joined(rows.chunks()) == expected


@on_one_device
@in_memory
def test_what_is_kept_goes_with_its_bucket(tmp_path: Path, device: Device, store: str) -> None:
    with tables_on(device) as place, make(options(store, tmp_path), "adagrad").to(place) as embedding:
        train(embedding, range(900))
        rows = table_of(embedding).observers.image()
        assert isinstance(rows, MemoryImage)
        assert rows._table is not None
        train(embedding, range(900))
        size = 900 * row_dtype(2 * DIM).itemsize
        assert 0.9 * size < (kept := rows._table.before_image_bytes) < 2 * size
        train(embedding, range(900))  # kept already
        assert rows._table.before_image_bytes == kept
        for bucket, _ in (chunks := rows.chunks()):
            if bucket == 32:
                break
        assert 0 < rows._table.before_image_bytes < 0.7 * kept
        list(chunks)
        assert rows._table.before_image_bytes == 0


@on_one_device
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_snapshots_cost_the_change_and_training_goes_on(tmp_path: Path, device: Device, store: str) -> None:
    with tables_on(device) as place, make(options(store, tmp_path), "adam").to(place) as embedding:
        train(embedding, range(1000))
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
        assert (later.own_rows, later.deleted, later.rows) == (5, 2, 999)
        embedding.load_snapshot("behind")
        assert contents(embedding).tobytes() == state
        embedding.load_snapshot("later")
        assert contents(embedding).tobytes() == after


class OutOfMemory:
    """In the place of a module or a function: its first use fails."""

    def __init__(self, patch: pytest.MonkeyPatch, module: object, name: str) -> None:
        self._original, self._failed = getattr(module, name), False
        patch.setattr(module, name, self)

    def __call__(self, *arguments: Any) -> Any:
        return self._use()(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._use(), name)

    def _use(self) -> Any:
        if not self._failed:
            self._failed = True
            raise torch.OutOfMemoryError
        return self._original


@on_one_device
@pytest.mark.parametrize("background", [False, True])
def test_changes_are_known_after_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device, background: bool
) -> None:
    with tables_on(device) as place, make(options("device", tmp_path), "adam").to(place) as embedding:
        train(embedding, range(100))
        embedding.save_snapshot("first")
        embedding.save_snapshot("noted", "incremental")
        train(embedding, range(50))
        OutOfMemory(monkeypatch, changed_lines, "keys_of")
        with pytest.raises(torch.OutOfMemoryError):
            embedding.save_snapshot("a", "full" if background else "incremental", background=background)
        embedding.save_snapshot("b", "incremental")
        assert Snapshot.open(tmp_path / "rows" / "snapshots" / "b").manifest.own_rows == 50
        save = embedding.save_snapshot("c", background=True)
        assert save is not None
        assert save.wait()


@on_one_device
def test_what_could_not_be_kept_is_kept_the_next_time(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    with tables_on(device) as place, make(options("device"), "adam").to(place) as embedding:
        train(embedding, range(100))
        expected = contents(embedding).tobytes()
        rows = table_of(embedding).observers.image()
        OutOfMemory(monkeypatch, image, "itertools")
        with pytest.raises(torch.OutOfMemoryError):
            train(embedding, range(50))
        train(embedding, range(50))
        assert joined(rows.chunks()) == expected


@on_one_device
def test_a_save_that_failed_holds_no_rows(device: Device) -> None:
    with tables_on(device) as place, make(options("device"), "adam").to(place) as embedding:
        train(embedding, range(100))
        alive: list[weakref.ref[Any]] = []

        def write(chunks: Chunks) -> None:
            next(chunks)
            kept = table_of(embedding).observers._image
            assert isinstance(kept, MemoryImage)
            alive.append(weakref.ref(kept._table))
            raise OSError("as planned")

        save = table_of(embedding).observers.save_in_background("it", write)
        with pytest.raises(OSError, match="as planned"):
            save.wait()
        gc.collect()
        assert alive[0]() is None
