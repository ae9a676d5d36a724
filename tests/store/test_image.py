"""The rows as of one step, read while they change."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.embeddings import DIM, contents, make, train
from support.examples import examples
from support.images import change, check_image, in_memory, joined, small_chunks, table_of
from support.lifecycle_model import POLICIES, batches
from support.stores import STORES, options
from tierbed import ClosedError, StoreError
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.row_format import row_dtype
from tierbed.engine.store.image import MemoryImage

__all__ = ["small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")
stores = pytest.mark.parametrize("store", STORES)


policies = pytest.mark.parametrize(
    "policy", [{}, POLICIES["lru"], POLICIES["sweeps"], POLICIES["sights"]], ids=["none", "lru", "sweeps", "sights"]
)


@stores
@policies
@examples(0.2)
@given(gaps=st.lists(st.integers(0, 25), min_size=1, max_size=12), before=st.integers(0, 4))
@pytest.mark.rotated("policy")
def test_an_image_is_of_one_instant_whatever_happens_while_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, store: str, policy: dict[str, Any], gaps: list[int], before: int
) -> None:
    path = tmp_path_factory.mktemp("store")
    check_image(*(options(store, path / part, **policy) for part in ("one", "other")), gaps, before)


def test_a_row_that_changes_where_reading_pauses_is_read_as_it_was() -> None:
    with make(options("host"), "adagrad") as embedding:
        train(embedding, range(1000))
        expected = contents(embedding).tobytes()
        chunks = table_of(embedding).observers.image().chunks()
        first = [next(chunks)]  # three of the rows of a bucket
        train(embedding, range(1000))
        assert joined(itertools.chain(first, chunks)) == expected


@stores
def test_an_image_of_rows_that_a_step_holds(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        change(embedding, 0)
        ids, tables = torch.arange(100), torch.zeros(100, dtype=torch.int64)
        pinned = embedding.pin([Lookup(ids, tables)])  # some are new
        expected = contents(embedding).tobytes()
        image = embedding.table_handle().table.observers.image()
        pinned.update([torch.ones(100, DIM)])
        assert contents(embedding).tobytes() != expected
        assert joined(image.chunks()) == expected


@pytest.mark.parametrize("store", ["cached_host", "ssd", "ssd_host"])
def test_an_image_while_batches_are_prefetched(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        change(embedding, 0)
        lookups = [Lookup(ids, tables) for ids, tables in batches()]
        for lookup in lookups:
            embedding.prefetch(lookup.ids, lookup.table_ids)
        expected = contents(embedding).tobytes()
        chunks = embedding.table_handle().table.observers.image().chunks()
        read = []
        for lookup in lookups:
            train(embedding, lookup.ids, lookup.table_ids)
            read += [chunk for _, chunk in zip(range(20), chunks, strict=False)]
        read += chunks
        assert joined(iter(read)) == expected
        assert embedding.metrics()["table"]["prefetch_hits"] > 0


@in_memory
def test_what_is_kept_goes_with_its_bucket(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        train(embedding, range(3000))
        image = table_of(embedding).observers.image()
        assert isinstance(image, MemoryImage)
        chunks = image.chunks()
        train(embedding, range(3000))
        assert image._table is not None
        kept = [image._table.before_image_bytes]
        for bucket, _ in chunks:
            if bucket == 32:
                break
        kept.append(image._table.before_image_bytes)
        train(embedding, range(3000))  # kept already, or read already
        kept.append(image._table.before_image_bytes)
        list(chunks)
        kept.append(image._table.before_image_bytes)
        size = 3000 * row_dtype(2 * DIM).itemsize
        assert size < kept[0] < 4 * size
        assert 0 < kept[1] == kept[2] < 0.7 * kept[0]
        assert kept[3] == 0


def test_there_is_one_image_at_a_time() -> None:
    with make(options("device"), "adagrad") as embedding:
        table = table_of(embedding)
        image = table.observers.image()
        with pytest.raises(StoreError, match="has an image already"):
            table.observers.image()
        image.close()
        image.close()
        with pytest.raises(ClosedError):
            next(image.chunks())
        table.observers.image()
