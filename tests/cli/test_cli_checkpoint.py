"""`tierbed checkpoint` lists, inspects, verifies and prunes the checkpoints of graphs and of plain loops."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from support.checkpoints import IDS, rating, steps
from support.scripts import run_python
from support.shell import Cli
from support.small_snapshots import flip_bit
from tierbed import save_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, and the folder `kept` with three checkpoints: of steps 2 and 4 of a graph, and one of a module."""
    path = tmp_path_factory.mktemp("made")
    graph = rating("host", path / "store")
    for name in ("two", "four"):
        steps(graph, IDS[:2])
        graph.save(path / "kept" / name)  # within a second, and not in the order of names
    save_checkpoint(path / "kept" / "dense", torch.nn.Linear(2, 3), extra={"epoch": 1})
    graph.rows.close()
    return path


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def test_checkpoints_are_listed_inspected_verified_and_pruned(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(saved / "kept", capsys, "checkpoint")
    listed = cli.json("list")["checkpoints"]
    assert [(one["name"], one["of"]) for one in listed] == [("two", "graph"), ("four", "graph"), ("dense", "loop")]
    assert [one["embeddings"].get("rows", {}).get("step") for one in listed] == [2, 4, None]
    assert "rows 4" in cli.says("list")
    assert cli.json("verify")["sound"] == ["two", "four", "dense"]
    one = Cli(saved / "kept" / "four", capsys, "checkpoint")
    shown = one.json("inspect")
    assert shown["embeddings"]["rows"]["name"] == "rows"
    assert shown["bytes"] > shown["embeddings"]["rows"]["bytes"] > 0
    assert any(name.endswith("weight") for name in shown["tensors"])
    assert "mlp" in one.says("inspect")
    assert "holds the checkpoints dense, four, two" in cli.fails("inspect")
    assert "is one checkpoint" in one.fails("prune", "--keep-last", "1")
    would = {"removed": ["two"], "kept": ["four", "dense"], "dry_run": True}
    assert cli.json("prune", "--keep-last", "2", "--dry-run") == would
    (saved / "kept" / ".tmp-.two").mkdir()  # of a removal that was killed
    assert "removed two\n1 of 3" in cli.says("prune", "--keep-last", "2")
    assert sorted(place.name for place in (saved / "kept").iterdir()) == ["dense", "four"]
    graph = rating("host", saved / "store")
    graph.load(saved / "kept" / "four")


def test_damage_is_told_and_nothing_is_pruned_then(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = saved / "kept" / "two" / "tensors.safetensors"
    flip_bit(tensors, 8 * tensors.stat().st_size - 8)
    (saved / "kept" / "dense" / "graph.msgpack").write_bytes(b"x")
    cli = Cli(saved / "kept", capsys, "checkpoint")
    for dry_run in ([], ["--dry-run"]):
        assert "nothing is pruned" in cli.fails("prune", "--keep-last", "1", *dry_run)
    code, out, err = cli.run("verify")
    assert (code, out) == (1, "sound: four\n")
    assert all(f"damaged: {name}" in err for name in ("two", "dense"))
    tensors.unlink()
    code, out, err = cli.run("list")
    assert (code, out.count("\n")) == (1, 2)
    assert "damaged: two: " in err
    assert len([*(saved / "kept").iterdir()]) == 3


def test_each_command_names_the_other_for_its_folder(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (saved / "kept", saved / "kept" / "two"):
        for group, command in (("snapshot", "list"), ("snapshot", "verify"), ("store", "stat")):
            assert "use `tierbed checkpoint`" in Cli(path, capsys, group).fails(command)
    for path in (saved / "store", saved / "store" / "rows"):
        assert "use `tierbed snapshot`" in Cli(path, capsys, "checkpoint").fails("list")
    (saved / "kept" / "two").rename(saved / "store" / "two")
    for group, command, *more in (("store", "stat"), ("snapshot", "inspect", "x")):
        said = Cli(saved / "store", capsys, group).fails(command, *more)
        assert f"give the path of one of its stores, '{saved}/store/rows'" in said
    assert "is not a checkpoint and contains none" in Cli(saved / "none", capsys, "checkpoint").fails("list")


def test_ages_names_and_links(saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = saved / "kept"
    (kept / "best").symlink_to("two")
    for name in ("two", "four"):
        os.utime(kept / name / "graph.msgpack", (10**9, 10**9))  # as a copy has it
    cli = Cli(kept, capsys, "checkpoint")
    listed = cli.json("list")["checkpoints"]
    assert [one["name"] for one in listed] == ["two", "four", "dense"]
    assert all(datetime.now(UTC) - datetime.fromisoformat(one["created"]) < timedelta(hours=1) for one in listed)
    assert cli.json("prune", "--keep-last", "2")["removed"] == ["two"]
    shutil.move(kept / "four", saved / "four" / "four")
    assert Cli(saved / "four", capsys, "checkpoint").json("inspect")["name"] == "four"
    monkeypatch.chdir(saved / "four" / "four")
    assert Cli(Path("."), capsys, "checkpoint").json("inspect")["name"] == "four"


def test_listing_loads_no_torch(saved: Path) -> None:
    script = """
import sys; from pathlib import Path; from tierbed.graph.state.folders import list_checkpoints
print(len(list_checkpoints(Path(sys.argv[1]))[0]), 'torch' in sys.modules)
"""
    assert run_python(script, saved / "kept") == "3 False\n"
