"""`explain` shows the tiers that have a row, with the values of the tiers, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.embeddings import contents, make, train
from support.stores import STORES, options
from tierbed import InputError, MultiTableEmbedding
from tierbed.engine.options.lookup import Lookup

every_store = pytest.mark.parametrize("store", STORES)


def open_store(store: str, path: Path) -> MultiTableEmbedding:
    return make(options(store, path), "adagrad")


def places(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {place["tier"]: place for place in row["tiers"]}


@every_store
def test_every_row_is_explained_as_it_is_stored(store: str, tmp_path: Path) -> None:
    with open_store(store, tmp_path) as embedding:
        for step in range(6):
            train(embedding, np.arange(60) * (step + 1) % 90, step % 3)
        before = {(row["table"], row["key"]): (row["updates"], row["last_step"]) for row in everything(embedding)}
        tiers = list(embedding.metrics())[1:-1]  # between the table and what is counted by table
        for row in contents(embedding):
            explained = embedding.explain(int(row["key"]), int(row["table"]))
            assert explained["stored"]
            assert (explained["updates"], explained["last_step"]) == (row["updates"], row["step"])
            assert before[int(row["table"]), int(row["key"])] == (row["updates"], row["step"])
            places = [place["tier"] for place in explained["tiers"]]
            assert places == [tier for tier in tiers if tier in places]
            assert tiers[-1] in places  # everything was flushed by the scan
            assert not any(place.get("dirty") for place in explained["tiers"])


def everything(embedding: MultiTableEmbedding) -> list[dict[str, Any]]:
    return [embedding.explain(key, table) for table in range(3) for key in range(90)]


@every_store
def test_looking_changes_no_number(store: str, tmp_path: Path) -> None:
    with open_store(store, tmp_path) as embedding:
        for step in range(4):
            train(embedding, range(30 * step, 30 * step + 80))
        embedding.table_handle().table.flush()
        before = counted(embedding)
        everything(embedding)
        assert counted(embedding) == before


def counted(embedding: MultiTableEmbedding) -> dict[tuple[str, str], float]:
    """The metrics, but for what RocksDB counts by itself."""
    ours = {"hits", "misses", "rows_written", "bytes_in", "bytes_out", "fetch_seconds_p50", "fetch_seconds_max"}
    return {
        (tier, name): value
        for tier, values in embedding.metrics().items()
        for name, value in values.items()
        if tier != "ssd" or name in ours
    }


@pytest.mark.parametrize("store", ["device", "host", "cached_host"])
def test_a_row_that_was_never_written_is_initial(store: str, tmp_path: Path) -> None:
    with open_store(store, tmp_path) as embedding:
        train(embedding, [1, 2])
        assert embedding.explain(3, 0) == {
            "table": 0, "key": 3, "stored": False, "why": "not written since the table was opened",
            "updates": 0, "last_step": 0, "tiers": [],
        }  # fmt: skip
        assert embedding.explain(1, 0)["why"] is None
        assert not embedding.explain(1, table=1)["stored"]
        assert embedding.explain(-7, 2)["tiers"] == []
        assert embedding.size() == 2


def test_a_pinned_row_is_pinned_until_its_step_ends(tmp_path: Path) -> None:
    with open_store("cached_host", tmp_path) as embedding:
        train(embedding, [5])
        embedding.pin([Lookup(torch.tensor([5, 6]), torch.tensor([0, 0]))])
        known, new = embedding.explain(5, 0), embedding.explain(6, 0)
        assert known["stored"]
        assert places(known)["device"]["pinned"]
        assert not new["stored"]
        assert known["why"] is None
        assert new["why"] == "fetched for a step that has not written it"
        assert places(new)["device"]["pinned"]
        embedding.unpin_rows()
        assert not places(embedding.explain(5, 0))["device"]["pinned"]


def test_a_dirty_row_is_newer_than_below_until_it_is_flushed(tmp_path: Path) -> None:
    with open_store("cached_host", tmp_path) as embedding:
        train(embedding, [5])
        train(embedding, [5])
        assert places(embedding.explain(5, 0))["device"]["dirty"]
        assert list(places(embedding.explain(5, 0))) == ["device"]
        embedding.table_handle().table.flush()
        row = embedding.explain(5, 0)
        assert [(place["tier"], place["updates"], place.get("dirty")) for place in row["tiers"]] == [
            ("device", 2, False),
            ("host", 2, None),
        ]
        train(embedding, [5])
        row = embedding.explain(5, 0)
        assert row["updates"] == 3
        assert [place["updates"] for place in row["tiers"]] == [3, 2]


def test_what_cannot_be_a_row(tmp_path: Path) -> None:
    with make(options("device", tmp_path), "adagrad", padding_idx=-1) as embedding:
        padding = embedding.explain(-1, 0)
        assert (padding["stored"], padding["why"], padding["tiers"]) == (False, "padding_idx=-1 has no row", [])
        for table in (None, 3, -1, 0.0, [0]):
            with pytest.raises(InputError, match=r"table of embedding 'rows': got .+ from 0 to 2"):
                embedding.explain(1, table)  # type: ignore[arg-type]
        for key in ("one", [1], [1, 2], torch.tensor([1, 2]), 2.0):
            with pytest.raises(InputError, match="key of embedding 'rows'"):
                embedding.explain(key, 0)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="keys of embedding 'rows'"):
            embedding.explain(1 << 63, 0)
    with make(options("device", tmp_path / "one"), "adagrad", tables=1) as embedding:  # which need not be named
        train(embedding, [5])
        assert embedding.explain(np.int64(5)) == embedding.explain(5, 0)


def test_why_a_row_is_not_there_names_all_that_befell_rows(tmp_path: Path) -> None:
    life = {"capacity": 4, "eviction": "lru", "admission": 2}
    with make(options("host", tmp_path, **life), "adagrad") as embedding:
        whys = [embedding.explain(9, 0)["why"]]
        train(embedding, [1, 2, 3, 4])
        whys.append(embedding.explain(1, 0)["why"])
        train(embedding, [1, 2, 3, 4])
        embedding.put([5], torch.zeros(1, embedding.dim), 0)
        gone = next(row for row in everything(embedding) if row["key"] < 5 and row["why"] and row["table"] == 0)
        whys.append(gone["why"])
        embedding.delete([5], 0)
        whys.append(embedding.explain(5, 0)["why"])
    first = "not written since the table was opened"
    refused = f"{first} or refused by admission=2"
    assert whys == [first, refused, f"{refused} or evicted", f"{refused} or evicted or deleted"]
