"""`tierbed serve`: what the commands print, which version readers take after them, and their exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.served_rows import save_finite
from support.shell import Cli
from support.small_snapshots import flip_bit
from tierbed.serving import ServingFolder


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    for number in range(1, 4):
        save_finite(tmp_path / f"s{number}", 100 * number, step=number)
    return Cli(tmp_path / "served", capsys, "serve")


def current(cli: Cli) -> tuple[int, bool]:
    found = ServingFolder(cli.store).read_current()
    return found.version, found.hold


def test_versions_are_published_listed_held_released_and_pruned(cli: Cli, tmp_path: Path) -> None:
    for number in range(1, 4):
        said = cli.says("publish", str(tmp_path / f"s{number}"), "--encoding", "float16")
        assert said.startswith(f"published version {number}: {number}00 rows, ")
        assert f"step {number}, in " in said
    lines = [line.split() for line in cli.says("list").splitlines()]
    assert lines[0][:3] == ["version", "encoding", "rows"]
    assert [line[:3] for line in lines[1:3]] == [["1", "float16", "100"], ["2", "float16", "200"]]
    assert lines[3][:4] == ["3", "current", "float16", "300"]
    assert cli.says("rollback", "1") == "readers are held at version 1\n"
    assert current(cli) == (1, True)
    document = cli.json("publish", str(tmp_path / "s3"), "--rebase", "--keep", "2")
    assert (document["version"], document["encoding"], document["rows"], document["step"]) == (4, "int8", 300, 3)
    listed = cli.json("list")
    assert (listed["current"], listed["hold"], [v["version"] for v in listed["versions"]]) == (1, True, [1, 3, 4])
    assert "held" in cli.says("list").splitlines()[1]
    assert cli.says("release") == "readers take version 4 and later ones\n"
    assert current(cli) == (4, False)
    assert cli.says("prune", "--keep", "1") == "removed versions: 1, 3\n"
    assert cli.json("prune") == {"removed": []}
    assert cli.json("verify") == {"sound": ["4"], "damaged": {}}


def test_options_accept_what_is_otherwise_refused(cli: Cli, tmp_path: Path) -> None:
    cli.says("publish", str(tmp_path / "s3"))
    assert "check=False" in cli.fails("publish", str(tmp_path / "s1"))
    cli.says("publish", str(tmp_path / "s1"), "--no-check")
    assert "no snapshot 's9'" in cli.fails("publish", str(tmp_path / "s9"))
    assert cli.run("publish", str(tmp_path / "s1"), "--encoding", "int4")[0] == 2


def test_problems_have_exit_codes(cli: Cli, tmp_path: Path) -> None:
    for words in (["list"], ["release"], ["verify"], ["rollback", "1"]):
        found, out, err = cli.run(*words)
        assert (found, out) == (1, "")
        assert "has no" in err
        assert "damaged" not in err
        assert not cli.store.exists()
    cli.says("publish", str(tmp_path / "s1"))
    cli.says("publish", str(tmp_path / "s2"))
    assert "no version 7; it has: 1, 2" in cli.fails("rollback", "7")
    with ServingFolder(cli.store).lock("a test"):
        for words in (["publish", str(tmp_path / "s3")], ["rollback", "1"], ["release"], ["prune"]):
            assert "is locked" in cli.fails(*words, code=3)
        assert cli.says("verify") == "sound: 1\nsound: 2\n"
    damaged = ServingFolder(cli.store).read_version(1).files[0].name
    flip_bit(cli.store / "files" / damaged, 300)
    document = cli.json("verify", code=1)
    assert document["sound"] == ["2"]
    assert damaged in document["damaged"]["1"]
    assert damaged in cli.fails("rollback", "1")
    assert current(cli) == (2, False)
