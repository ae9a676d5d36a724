"""Snapshots in another folder than the live rows are found, kept and gone back to like those of the store folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.stores import options
from tierbed import MultiTableEmbedding, OptionError, StoreError


def embedding(folder: Path, store: str = "host", elsewhere: str | None = "elsewhere", **more: Any) -> Any:
    place = None if elsewhere is None else folder / elsewhere
    return make(options(store, folder / "live", snapshot_path=place, **more), "adam")


def stepped(rows: MultiTableEmbedding, steps: int = 2) -> bytes:
    for step in range(steps):
        train(rows, torch.arange(step, step + 50), torch.arange(50) % 3)
    return contents(rows).tobytes()


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_snapshots_lie_in_snapshot_path_and_rows_do_not(tmp_path, store) -> None:
    with embedding(tmp_path, store) as rows:
        stepped(rows)
        rows.save_snapshot("a")
        rows.save_snapshot("b", kind="incremental")
        rows.save_snapshot("c", background=True).wait()
    assert sorted(p.name for p in (tmp_path / "elsewhere" / "rows" / "snapshots").iterdir()) == ["a", "b", "c"]
    assert [p.name for p in (tmp_path / "live" / "rows").iterdir() if p.is_symlink()] == ["snapshots"]
    with make(options(store, tmp_path / "one", snapshot_path=tmp_path / "one")) as rows:  # which is no other place
        rows.save_snapshot("a")
    assert not (tmp_path / "one" / "rows" / "snapshots").is_symlink()
    with pytest.raises(OptionError, match=r"snapshot_path='/a': .*; give persistent_path too"):
        options("host", snapshot_path="/a")


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_run_goes_on_from_its_live_rows_and_from_its_snapshot_after_a_kill(tmp_path, store) -> None:
    with embedding(tmp_path, store) as rows:
        saved = stepped(rows)
        rows.save_snapshot("a", kind="full")
        closed = stepped(rows)
    with embedding(tmp_path, store) as rows:
        assert contents(rows).tobytes() == closed
        rows.load_snapshot("a")
        assert contents(rows).tobytes() == saved
    shutil.rmtree(tmp_path / "live" / "rows" / "live", ignore_errors=True)
    (tmp_path / "live" / "rows" / "MARK").unlink()
    with embedding(tmp_path, store) as rows:
        assert contents(rows).tobytes() == saved
    shutil.rmtree(tmp_path / "live")  # as with a disk that was replaced
    with embedding(tmp_path, store) as rows:
        assert contents(rows).tobytes() == saved


def test_a_run_without_the_option_keeps_to_the_place_of_before(tmp_path) -> None:
    with embedding(tmp_path) as rows:
        stepped(rows)
        rows.save_snapshot("a")
    with embedding(tmp_path, elsewhere=None) as rows:
        rows.save_snapshot("b")
        rows.prune_snapshots(keep_last=1)
    assert os.listdir(tmp_path / "elsewhere" / "rows" / "snapshots") == ["b"]


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_snapshots_that_are_in_another_place_are_not_left_behind(tmp_path, before) -> None:
    with embedding(tmp_path, elsewhere=before) as rows:
        saved = stepped(rows)
        rows.save_snapshot("a")
    with pytest.raises(StoreError, match=r"has its snapshots in .*, but snapshot_path now leads to .*\. Move the"):
        embedding(tmp_path, elsewhere="new").size()
    old = tmp_path / ("live" if before is None else before) / "rows" / "snapshots"
    shutil.move(old / "a", tmp_path / "new" / "rows" / "snapshots" / "a")
    (tmp_path / "live" / "rows" / "MARK").unlink()
    with embedding(tmp_path, elsewhere="new") as rows:
        assert contents(rows).tobytes() == saved
    os.rename(tmp_path / "new", tmp_path / "newer")
    with embedding(tmp_path, elsewhere="newer") as rows:
        rows.load_snapshot("a")


def test_two_stores_with_the_same_snapshots_are_not_open_at_once(tmp_path) -> None:
    place = tmp_path / "elsewhere"
    with make(options("host", tmp_path / "one", snapshot_path=place)) as rows:
        rows.size()
        with pytest.raises(StoreError, match=r"elsewhere/rows' is in use by process .*this process"):
            make(options("host", tmp_path / "two", snapshot_path=place)).size()
    with make(options("host", tmp_path / "two", snapshot_path=place)) as rows:
        rows.size()
