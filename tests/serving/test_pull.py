"""A pulled folder answers like its source; a damaged source, a removed version or a kill never harms its readers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import shim
from support.examples import examples
from support.killed import Warm
from support.limits import file_size_limit
from support.served_rows import rows_of, save_finite
from support.small_snapshots import flip_bit
from tierbed import OptionError, ServingError
from tierbed.serving import ServingFolder, open_served, publish, pull

Folders = pytest.TempPathFactory


def publish_next(source: Path, **options: Any) -> None:
    """Publish a version with other rows and dense weights than the last one."""
    versions = ServingFolder(source).list_versions()
    number = versions[-1] + 1 if versions else 1
    snapshot = source.parent / f"s{number}"
    if not snapshot.exists():
        save_finite(snapshot, 40 + number, step=number)
    publish(source, snapshot, "float32", tensors={"w": torch.full((3,), float(number))}, check=False, **options)


def contents(folder: Path) -> tuple[Any, ...]:
    """What readers see."""
    current = ServingFolder(folder).read_current()
    with open_served(folder) as served:
        assert served.current.tensors is not None
        dense = served.current.tensors["w"].tolist()
    return current, rows_of(folder, ServingFolder(folder).read_version(current.version)), dense


@examples(0.3)
@given(st.lists(st.sampled_from(["publish", "publish", "rollback", "release", "prune", "remake"]), max_size=8))
def test_readers_of_the_copy_see_what_readers_of_the_source_see(tmp_path_factory: Folders, acts: list[str]) -> None:
    path = tmp_path_factory.mktemp("pull")
    source, copy = ServingFolder(path / "source"), ServingFolder(path / "copy")
    publish_next(source.path)
    for act in acts:
        if act == "publish":
            publish_next(source.path)
        elif act == "rollback":
            source.rollback(source.list_versions()[0])
        elif act == "remake":  # version numbers begin at 1 again
            shutil.rmtree(source.path)
            publish_next(source.path)
        else:
            source.release() if act == "release" else source.prune(1)
        version = pull(source.path, copy.path)
        assert contents(copy.path) == contents(source.path)
        assert not copy.verify(version.version)
        assert len(copy.list_versions()) <= 2
        files = {file.name for number in copy.list_versions() for file in copy.read_version(number).files}
        assert {*os.listdir(copy.files)} == files


def test_only_missing_files_are_copied(tmp_path: Path) -> None:
    source, copy = ServingFolder(tmp_path / "source"), ServingFolder(tmp_path / "copy")
    publish_next(source.path)
    pull(source.path, copy.path)
    inodes = {path.name: path.stat().st_ino for path in copy.files.iterdir()}
    publish(source.path, tmp_path / "s1", "float32", tensors={"w": torch.ones(2)})  # new tensors over the same rows
    pull(source.path, copy.path)
    after = {path.name: path.stat().st_ino for path in copy.files.iterdir()}
    assert len(after.keys() - inodes.keys()) == 1
    assert inodes.items() <= after.items()
    for arguments, named in (((copy.path, tmp_path / "." / "copy"), "is the source"), (("", "x"), "folder=''")):
        with pytest.raises(OptionError, match=named):
            pull(*arguments)
    with pytest.raises(ServingError, match="has no file CURRENT"):
        pull(tmp_path / "nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_source_changes_nothing(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    with pytest.raises(ServingError, match="publish a version there first"):
        pull(source, copy)
    publish_next(source)
    pull(source, copy)
    before = contents(copy)
    publish_next(source)
    file = ServingFolder(source).read_version(2).files[-1]
    flip_bit(ServingFolder(source).find_file(file), 99)
    for problem in ("its checksum does not match", "cannot be read: No such file"):
        with pytest.raises(ServingError, match=problem):
            pull(source, copy)
        assert contents(copy) == before
        ServingFolder(source).find_file(file).unlink(missing_ok=True)
    with ServingFolder(copy).lock("a test"), pytest.raises(ServingError, match="is locked by a test"):
        pull(source, copy)
    for publisher in (source, tmp_path / "link"):
        publisher.exists() or publisher.symlink_to(source)
        with pytest.raises(ServingError, match="is the folder of a publisher: give"):
            pull(copy, publisher)


def test_a_full_disk_leaves_the_version_of_the_copy(tmp_path: Path) -> None:
    source, copy = ServingFolder(tmp_path / "source"), ServingFolder(tmp_path / "copy")
    for _ in range(2):
        publish_next(source.path)
        pull(source.path, copy.path)
    pull(source.path, copy.path)
    assert copy.list_versions() == [1, 2]
    before = contents(copy.path)
    source.rollback(1)
    with file_size_limit(0), pytest.raises(ServingError, match="cannot write to"):
        pull(source.path, copy.path)
    assert contents(copy.path) == before
    assert copy.list_versions() == [1, 2]


def killed(path: str, call: str, number: int, when: str, events: int) -> None:
    """Pull in this process, which dies at a call that changes the copy."""
    source, copy = Path(path, "source"), Path(path, "copy")
    shim.watch(copy)
    shim.die_at(call, number, when)
    pull(source, copy)
    os.write(events, b"returned\n")
    shim.live_on()


@pytest.mark.parametrize("call", ["sync", "rename", "write", "unlink"])
def test_a_killed_pull_leaves_a_version_and_the_next_one_cleans_up(tmp_path: Path, call: str) -> None:
    source, copy = ServingFolder(tmp_path / "source"), ServingFolder(tmp_path / "copy")
    warm, number, has_returned = Warm(killed), 1, False
    (tmp_path / "aside").mkdir()
    for _ in range(2):
        publish_next(source.path)
        pull(source.path, copy.path)
    while not has_returned:
        before = contents(copy.path)
        publish_next(source.path, keep=1)
        plan = {"path": str(tmp_path), "call": call, "number": number, "when": shim.WHEN[number % 2]}
        has_returned = warm.order(plan)["events"] == ["returned"]
        assert contents(copy.path) in (before, contents(source.path))
        assert all(not copy.verify(version) for version in copy.list_versions())
        pull(source.path, copy.path)
        assert contents(copy.path) == contents(source.path)
        files = {file.name for version in copy.list_versions() for file in copy.read_version(version).files}
        assert {*os.listdir(copy.files)} == files
        number += 1
    assert number > 2, f"no {call} was reached"
