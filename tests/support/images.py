"""What the tests of images share: small chunks, rows in their order, and calls that change rows."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from support.embeddings import DIM, contents, make, train
from tierbed import CapacityError, MultiTableEmbedding
from tierbed.engine.row_format import Chunks, row_dtype
from tierbed.engine.store import image, rocksdb
from tierbed.engine.table.table import OpenTable

in_memory = pytest.mark.parametrize("store", ["device", "host", "cached_host"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of Adagrad at once, so that much happens within a bucket."""
    size = 3 * row_dtype(2 * DIM).itemsize
    monkeypatch.setattr(image, "CHUNK_BYTES", size)
    monkeypatch.setattr(image, "CHANGES_READ_ROWS", 2)
    monkeypatch.setattr(image, "CHANGES_CHUNK_ROWS", 3)
    monkeypatch.setattr(rocksdb, "SCAN_BYTES", size)


def joined(chunks: Chunks) -> bytes:
    last = (-1, -1, -1)
    rows = []
    for bucket, part in chunks:
        for row in part:
            name = bucket, int(row["table"]), int(row["key"])
            assert last < name
            last = name
        rows.append(part.tobytes())
    return b"".join(rows)


def change(embedding: MultiTableEmbedding, number: int) -> None:
    random = torch.Generator().manual_seed(number)
    ids = (torch.rand(40, generator=random) ** 2 * 150).to(torch.int64)
    tables = torch.randint(0, 3, (40,), generator=random)
    with contextlib.suppress(CapacityError):
        train(embedding, ids, tables)
    with contextlib.suppress(CapacityError):
        embedding.put(ids[:9] + 3, torch.rand(9, DIM, generator=random), tables[:9])
    embedding.delete(ids[5:12] + 1, tables[5:12])


def changed(how: Any, numbers: range) -> bytes:
    with make(how, "adagrad") as embedding:
        for number in numbers:
            change(embedding, number)
        return contents(embedding).tobytes()


def check_image(how: Any, other: Any, twin: Any, gaps: list[int], before: int, place: Any = "cpu") -> None:
    """As many chunks are read as each of `gaps` says, then rows change; on stores of three options, in one place."""
    expected = changed(twin, range(before))  # a scan of this store would leave no rows to write back
    with make(how, "adagrad").to(place) as embedding:
        for number in range(before):
            change(embedding, number)
        image = embedding.table_handle().table.observers.open_image()
        steps = iter(range(before, 20))

        def read() -> Chunks:
            chunks = image.chunks()
            for gap in gaps:
                for _ in range(gap):
                    if (chunk := next(chunks, None)) is None:
                        return
                    yield chunk
                change(embedding, next(steps))
            yield from chunks

        assert joined(read()) == expected
        image.close()
        last = next(steps)
        change(embedding, last)
        rows = contents(embedding).tobytes()
    assert rows == changed(other, range(last + 1))


def table_of(embedding: MultiTableEmbedding) -> OpenTable:
    return embedding.table_handle().table
