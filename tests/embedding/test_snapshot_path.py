"""Snapshots in another folder than the live rows are found, kept and gone back to like those of the store folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.shell import Cli
from support.stores import options
from tierbed import MultiTableEmbedding, OptionError, StoreError

every_kind = pytest.mark.parametrize("store", ["host", "ssd"])


def embedding(folder: Path, store: str = "host", elsewhere: str | None = "elsewhere", **more: Any) -> Any:
    place = None if elsewhere is None else folder / elsewhere
    return make(options(store, folder / "live", snapshot_path=place, **more), "adam")


def stepped(rows: MultiTableEmbedding, steps: int = 2) -> bytes:
    for step in range(steps):
        train(rows, torch.arange(step, step + 50), torch.arange(50) % 3)
    return contents(rows).tobytes()


def forgotten(folder: Path) -> None:
    """The live rows and what the store folder says of them are lost, as with a disk that was replaced."""
    shutil.rmtree(folder / "live")


@every_kind
def test_snapshots_lie_in_snapshot_path_and_rows_do_not(tmp_path: Path, store: str) -> None:
    with embedding(tmp_path, store) as rows:
        stepped(rows)
        rows.save_snapshot("a")
        rows.save_snapshot("b", kind="incremental")
        rows.save_snapshot("c", background=True).wait()
    assert sorted(p.name for p in (tmp_path / "elsewhere" / "rows" / "snapshots").iterdir()) == ["a", "b", "c"]
    assert [p.name for p in (tmp_path / "live" / "rows").iterdir() if p.is_symlink()] == ["snapshots"]


@every_kind
def test_a_run_goes_on_from_its_live_rows_and_from_its_snapshot_after_a_kill(tmp_path: Path, store: str) -> None:
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


def test_snapshots_outlive_the_disk_of_the_live_rows(tmp_path: Path) -> None:
    with embedding(tmp_path) as rows:
        saved = stepped(rows)
        rows.save_snapshot("a")
    forgotten(tmp_path)
    with embedding(tmp_path) as rows:
        assert contents(rows).tobytes() == saved


def test_the_command_line_finds_them_by_the_store_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with embedding(tmp_path) as rows:
        saved = stepped(rows)
        rows.save_snapshot("a")
        stepped(rows)
    cli = Cli(tmp_path / "live" / "rows", capsys)
    cli.json("save", "b")
    assert [entry["name"] for entry in cli.json("list")["snapshots"]] == ["a", "b"]
    cli.json("load", "a")
    with embedding(tmp_path) as rows:
        assert contents(rows).tobytes() == saved
    assert (tmp_path / "elsewhere" / "rows" / "snapshots" / "b").is_dir()


def test_a_run_without_the_option_keeps_to_the_place_of_before(tmp_path: Path) -> None:
    with embedding(tmp_path) as rows:
        stepped(rows)
        rows.save_snapshot("a")
    with embedding(tmp_path, elsewhere=None) as rows:
        rows.save_snapshot("b")
        rows.prune_snapshots(keep_last=1)
    assert os.listdir(tmp_path / "elsewhere" / "rows" / "snapshots") == ["b"]


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_snapshots_that_are_in_another_place_are_not_left_behind(tmp_path: Path, before: str | None) -> None:
    with embedding(tmp_path, elsewhere=before) as rows:
        saved = stepped(rows)
        rows.save_snapshot("a")
    with pytest.raises(StoreError, match=r"has its snapshots in .*, but snapshot_path is .*: move them there"):
        embedding(tmp_path, elsewhere="new").size()
    old = tmp_path / ("live" if before is None else before) / "rows" / "snapshots"
    shutil.move(old / "a", tmp_path / "new" / "rows" / "snapshots" / "a")
    (tmp_path / "live" / "rows" / "MARK").unlink()
    with embedding(tmp_path, elsewhere="new") as rows:
        assert contents(rows).tobytes() == saved


def test_a_store_folder_that_was_moved_finds_its_snapshots_again(tmp_path: Path) -> None:
    with embedding(tmp_path) as rows:
        stepped(rows)
        rows.save_snapshot("a")
    os.rename(tmp_path / "elsewhere", tmp_path / "new")
    with embedding(tmp_path, elsewhere="new") as rows:
        rows.load_snapshot("a")


def test_two_stores_with_the_same_snapshots_are_not_open_at_once(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    with make(options("host", tmp_path / "one", snapshot_path=place)) as rows:
        rows.size()
        with pytest.raises(StoreError, match=r"elsewhere/rows' is in use by process .*, this one"):
            make(options("host", tmp_path / "two", snapshot_path=place)).size()
    with make(options("host", tmp_path / "two", snapshot_path=place)) as rows:
        rows.size()


def test_the_persistent_path_itself_is_no_other_place(tmp_path: Path) -> None:
    with make(options("host", tmp_path, snapshot_path=tmp_path)) as rows:
        rows.save_snapshot("a")
    assert not (tmp_path / "rows" / "snapshots").is_symlink()


def test_snapshots_need_a_store_on_disk() -> None:
    with pytest.raises(OptionError, match=r"snapshot_path='/a': .*; give persistent_path too"):
        options("host", snapshot_path="/a")
