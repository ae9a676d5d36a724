"""RocksDB files that are cut or damaged, and a second process: the error has path and remedy, and the remedy works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.embeddings import contents, make, train
from support.forked import in_process
from support.small_snapshots import flip_bit
from support.stores import options
from support.twins import ON_DISK
from tierbed import StoreError, TierbedError
from tierbed.cli import main

KEYS = torch.arange(6000)


def closed_store(path: Path, store: str) -> bytes:
    """A store with a snapshot, closed after two more steps; its rows at the snapshot."""
    with make(options(store, path), "adam", tables=1) as embedding:
        train(embedding, KEYS)
        embedding.save_snapshot("good")
        saved = contents(embedding).tobytes()
        train(embedding, KEYS)
        train(embedding, KEYS[:50])
    return saved


def newest(path: Path) -> Path:
    return max(path.glob("rows/live/*/*.sst"), key=lambda file: int(file.stem))


def goes_back_to_the_snapshot(path: Path, store: str, saved: bytes) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["snapshot", "load", str(path / "rows"), "good"])
    assert not exit.value.code
    with make(options(store, path), "adam", tables=1) as embedding:
        assert contents(embedding).tobytes() == saved


@pytest.mark.parametrize("store", ON_DISK)
def test_one_flipped_bit_costs_the_rows_of_its_block_alone(tmp_path: Path, store: str) -> None:
    saved = closed_store(tmp_path, store)
    with make(options(store, tmp_path), tables=1) as embedding:
        expected = embedding.get(KEYS)
    file = newest(tmp_path)
    flip_bit(file, 8 * (file.stat().st_size // 3))
    with make(options(store, tmp_path), tables=1) as embedding:
        lost = 0
        for begin in range(0, len(KEYS), 20):
            some = slice(begin, begin + 20)
            try:
                assert torch.equal(embedding.get(KEYS[some]), expected[some])
            except StoreError as error:
                assert str(tmp_path / "rows") in str(error)  # noqa: PT017
                assert "snapshot" in str(error)  # noqa: PT017
                lost += 1
        assert 0 < lost < len(KEYS) / 20 / 2
        with pytest.raises(TierbedError, match="snapshot"):
            contents(embedding)
    goes_back_to_the_snapshot(tmp_path, store, saved)


def test_a_damaged_store_that_cannot_be_opened_can_be_begun_anew(tmp_path: Path) -> None:
    closed_store(tmp_path, "ssd")
    file = newest(tmp_path)
    flip_bit(file, 8 * (file.stat().st_size // 3))
    policy = {"capacity": 10_000, "eviction": "lru"}  # knows every row, so that opening reads all
    with pytest.raises(StoreError, match="a clean marker and cannot be read") as said:
        make(options("ssd", tmp_path, **policy), "adam", tables=1).size()
    with make(options("ssd", tmp_path, open="fresh", **policy), "adam", tables=1) as embedding:
        train(embedding, KEYS)
        assert embedding.size() == len(KEYS)
    assert 'open="fresh"' in str(said.value)  # the error was held meanwhile, and with it what its frames refer to


@pytest.mark.parametrize("rest", [0, 0.5])
def test_a_cut_file_is_missed_at_once(tmp_path: Path, rest: float) -> None:
    saved = closed_store(tmp_path, "ssd")
    file = newest(tmp_path)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * rest)])
    for _ in range(2):
        with pytest.raises(StoreError, match=r"rows' have a clean marker and cannot be read.*tierbed snapshot load"):
            make(options("ssd", tmp_path), "adam", tables=1).size()
    goes_back_to_the_snapshot(tmp_path, "ssd", saved)


def open_elsewhere(path: Path, store: str) -> str:
    with pytest.raises(StoreError) as error:
        make(options(store, path), "adam", tables=1).size()
    return str(error.value)


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_second_process_is_told_of_the_first_and_disturbs_nothing(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adam", tables=1) as embedding:
        train(embedding, KEYS)
        before = contents(embedding).tobytes()
        said = in_process(open_elsewhere, tmp_path, store)
        assert str(tmp_path / "rows") in said
        assert "in use by process" in said
        assert contents(embedding).tobytes() == before
        train(embedding, KEYS)
    with make(options(store, tmp_path, open="error"), "adam", tables=1) as again:
        assert set(contents(again)["updates"].tolist()) == {2}
