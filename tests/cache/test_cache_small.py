"""A cache with less room than a batch has rows works in its overflow, and says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.embeddings import make, train
from support.killed import remarks
from support.stores import ONE_SET_MB, options

STORES = ["cached_host", "ssd"]


@pytest.mark.parametrize("store", STORES)
def test_a_batch_of_more_rows_than_the_cache_is_told_once_with_numbers(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "tierbed")
    with make(options(store, tmp_path), "adagrad") as embedding:
        train(embedding, range(64))
        assert remarks(caplog) == []
        for _ in range(3):
            train(embedding, range(1000))
        room = int(embedding.metrics()["device"]["capacity"])
    (said,) = remarks(caplog)
    found = re.search(r"room for (\d+) rows, and a batch has (\d+) different ones: (\d+) are .* at least (\S+),", said)
    assert found is not None
    assert said.startswith(f"embedding 'rows': cache_budget_mb={ONE_SET_MB} has room for")
    assert (int(found[1]), found[2]) == (room, "1000")
    assert int(found[3]) >= 1000 - room
    enough = float(found[4])
    with make(options(store, tmp_path / "more", enough), "adagrad") as embedding:
        train(embedding, range(1000))
    assert remarks(caplog) == []
