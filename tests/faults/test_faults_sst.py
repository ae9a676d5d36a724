"""RocksDB files that are damaged: the error has path and remedy, and the remedy works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.embeddings import contents, train
from support.killed import embedding_at
from support.shell import command
from support.small_snapshots import flip_bit
from support.twins import ON_DISK
from tierbed import StoreError, TierbedError

KEYS = torch.arange(6000)


def damaged_store(path: Path, store: str) -> tuple[bytes, torch.Tensor]:
    """A store with a bit flipped, closed two steps after a snapshot; its rows at the snapshot, and its embeddings."""
    with embedding_at(path, store) as embedding:
        train(embedding, KEYS)
        embedding.save_snapshot("good")
        saved = contents(embedding).tobytes()
        train(embedding, KEYS)
        train(embedding, KEYS[:50])
        expected = embedding.get(KEYS)
    file = max(path.glob("rows/live/*/*.sst"), key=lambda file: int(file.stem))
    flip_bit(file, 8 * (file.stat().st_size // 3))
    return saved, expected


@pytest.mark.parametrize("store", ON_DISK)
def test_one_flipped_bit_costs_the_rows_of_its_block_alone(tmp_path: Path, store: str) -> None:
    saved, expected = damaged_store(tmp_path, store)
    with embedding_at(tmp_path, store, None) as embedding:
        lost = 0
        for begin in range(0, len(KEYS), 40):
            some = slice(begin, begin + 40)
            try:
                assert torch.equal(embedding.get(KEYS[some]), expected[some])
            except StoreError as error:
                assert str(tmp_path / "rows") in str(error)  # noqa: PT017
                assert "snapshot" in str(error)  # noqa: PT017
                lost += 1
        assert 0 < lost < len(KEYS) / 40 / 2
        with pytest.raises(TierbedError, match="snapshot"):
            contents(embedding)
    assert command("snapshot", "load", tmp_path / "rows", "good") == 0
    with embedding_at(tmp_path, store) as embedding:
        assert contents(embedding).tobytes() == saved


def test_a_damaged_store_that_cannot_be_opened_can_be_begun_anew(tmp_path: Path) -> None:
    damaged_store(tmp_path, "ssd")
    policy = {"capacity": 10_000, "eviction": "lru"}  # knows every row, so that opening reads all
    with pytest.raises(StoreError, match="a clean marker and cannot be read") as said:
        embedding_at(tmp_path, "ssd", **policy).size()
    with embedding_at(tmp_path, "ssd", open="fresh", **policy) as embedding:
        train(embedding, KEYS)
        assert embedding.size() == len(KEYS)
    assert 'open="fresh"' in str(said.value)  # the error was held meanwhile, and with it what its frames refer to
