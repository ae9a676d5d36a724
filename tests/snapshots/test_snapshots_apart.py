"""A checkpoint is read by a process of its own: where that cannot start, nothing is said of the checkpoint."""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.stores import options
from tierbed.cli import main
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files.read_errors import ReadIOError


@pytest.fixture
def set_executable() -> Iterator[Callable[[Any], None]]:
    before = multiprocessing.spawn.get_executable()
    yield multiprocessing.set_executable
    multiprocessing.set_executable(before)


def checkpoint(path: Path) -> Snapshot:
    with make(options("ssd", path), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(100))
        embedding.save_snapshot("good", "checkpoint")
    return Snapshot.open(path / "rows" / "snapshots" / "good")


# a program that has no Python beside it, one that was removed under the process, and those that are another program
@pytest.mark.parametrize("executable", [None, "", "/nowhere/python", "/etc/passwd", "/bin/true", "/bin/cat"])
def test_a_good_checkpoint_is_not_called_damaged_where_no_python_starts(
    tmp_path: Path, executable: Any, set_executable: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = checkpoint(tmp_path)
    set_executable(executable)
    for read in (snapshot.verify, lambda: list(snapshot.chunks())):
        with pytest.raises(ReadIOError, match=r"did not start: .* may be sound: .* multiprocessing\.set_executable"):
            read()
    with pytest.raises(SystemExit):
        main(["snapshot", "verify", str(tmp_path / "rows"), "--json"])
    assert "damaged" not in capsys.readouterr().out


def test_the_python_that_a_program_names_reads_a_checkpoint(
    tmp_path: Path, set_executable: Callable[[Any], None]
) -> None:
    snapshot, python = checkpoint(tmp_path), multiprocessing.spawn.get_executable()
    (tmp_path / "python").symlink_to(Path(python if isinstance(python, str) else python.decode()).resolve())
    set_executable(str(tmp_path / "python"))
    with make(options("ssd", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(500))
        embedding.load_snapshot("good")
        assert contents(embedding).tobytes() == b"".join(rows.tobytes() for _, rows in snapshot.chunks())
