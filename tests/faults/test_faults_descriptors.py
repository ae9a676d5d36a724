"""No descriptors left, for real: calls say that, no good snapshot is called damaged, and nothing half-written stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, train
from support.forked import in_own_process
from support.killed import embedding_at
from support.limits import descriptors
from support.shell import command
from support.stores import STORES
from tierbed import SnapshotError, StoreError
from tierbed.snapshots import Snapshot, latest_snapshot, list_snapshots
from tierbed.snapshots.files.format import read_snapshot_id
from tierbed.snapshots.store.folder import StoreFolder

SPARE = range(8)  # descriptors that a call may open


def error_of(spare: int, action: Callable[[], Any]) -> str | None:
    """The error of a call without a descriptor, None if it had all that it needs."""
    try:
        with descriptors(spare):
            action()
    except (SnapshotError, StoreError) as error:
        message = str(error)
        assert "Too many open files" in message, message
        assert not [word for word in ("damaged", "delete", 'open="fresh"') if word in message], message
        return message
    return None


def leftovers(path: Path) -> list[str]:
    return [entry.name for entry in (path / "rows" / "snapshots").iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("kind", ["full", "incremental", "checkpoint"])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("kind")
@in_own_process
def test_a_save_and_a_close_without_descriptors_say_so_and_can_be_tried_again(
    tmp_path: Path, store: str, kind: str
) -> None:
    if kind == "checkpoint" and not store.startswith("ssd"):
        return
    embedding = embedding_at(tmp_path, store)
    train(embedding, torch.arange(900))
    embedding.save_snapshot("first")
    train(embedding, torch.arange(500))
    rows = contents(embedding).tobytes()
    failures = 0
    for spare in SPARE:
        name = f"s{spare}"
        failed = error_of(spare, lambda name=name: embedding.save_snapshot(name, kind))  # type: ignore[misc]
        failures += failed is not None
        embedding.prune_snapshots(keep_last=9)
        assert not leftovers(tmp_path)
        saved = tmp_path / "rows" / "snapshots" / name
        if failed is None:
            assert b"".join(part.tobytes() for _, part in Snapshot.open(saved).chunks()) == rows
        else:
            assert not saved.exists()
        train(embedding, torch.arange(500), grad=0.0)
        rows = contents(embedding).tobytes()
    assert failures
    step = embedding.metrics()["table"]["step"]
    if error_of(0, embedding.close) is not None:
        assert contents(embedding).tobytes() == rows
        embedding.close()
    with embedding_at(tmp_path, store, open="error") as again:
        assert again.metrics()["table"]["step"] == step
        assert contents(again).tobytes() == rows


@pytest.mark.parametrize(("store", "kind"), [("host", "incremental"), ("ssd", "checkpoint")])
@in_own_process
def test_a_good_snapshot_is_not_called_damaged_where_no_descriptor_is_left(
    tmp_path: Path, store: str, kind: str
) -> None:
    with embedding_at(tmp_path, store) as embedding:
        train(embedding, torch.arange(900))
        embedding.save_snapshot("first")
        train(embedding, torch.arange(500))
        embedding.save_snapshot("second", kind)
        rows = contents(embedding).tobytes()
    snapshots = tmp_path / "rows" / "snapshots"
    acts: list[Callable[[], Any]] = [
        lambda: Snapshot.open(snapshots / "second").verify(),
        lambda: latest_snapshot(snapshots),
        lambda: [None for _ in Snapshot.open(snapshots / "second").chunks()],
        lambda: embedding_at(tmp_path, store).close(),
        lambda: StoreFolder(tmp_path / "rows").unlock(),
    ]
    failures = 0
    for act in acts:
        for spare in SPARE:
            failures += error_of(spare, act) is not None
    assert failures >= 3
    for words in (["verify"], ["list"], ["inspect", "second"]):
        for spare, code in ((100, 0), (0, 1)):  # the first imports what a command needs
            with descriptors(spare):
                assert command("snapshot", words[0], tmp_path / "rows", *words[1:], "--json") == code
    assert not list_snapshots(snapshots).damaged
    with embedding_at(tmp_path, store, open="error") as again:
        assert contents(again).tobytes() == rows


@in_own_process
def test_a_merge_leaves_nothing_of_a_killed_save(tmp_path: Path) -> None:
    with embedding_at(tmp_path, "host") as embedding:
        train(embedding, torch.arange(9))
        embedding.save_snapshot("first")
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        embedding_at(tmp_path, "host").size()
        (tmp_path / "rows" / "snapshots" / ".tmp-killed").mkdir(parents=True)
        os._exit(0)
    assert leftovers(tmp_path)
    assert command("snapshot", "merge", tmp_path / "rows", "first", "merged") == 0
    assert not leftovers(tmp_path)
    assert (tmp_path / "rows" / "snapshots" / "merged").is_dir()


def test_without_descriptors_no_replaced_snapshot_is_taken_for_the_one_that_replaces_it(tmp_path: Path) -> None:
    with embedding_at(tmp_path, "host") as embedding:
        train(embedding, torch.arange(9))
        embedding.save_snapshot("x")
    with (
        descriptors(0),
        pytest.raises(StoreError, match=r"id of snapshot .*/x. cannot be read: .*Too many open.*ulimit"),
    ):
        read_snapshot_id(tmp_path / "rows" / "snapshots" / "x")
