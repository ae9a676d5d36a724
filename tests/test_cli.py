from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stored import chunked, description, joined, make_buckets, run_python, save

from tierbed.engine.store.folder import StoreFolder
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.cli import main

COUNTS = {0: 20, 5: 1, 63: 9}


class Cli:
    """Runs `tierbed snapshot COMMAND STORE ...` in this process."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.store = store
        self._capsys = capsys

    def run(self, command: str, *arguments: str) -> tuple[int, str, str]:
        """The exit code, stdout and stderr."""
        with pytest.raises(SystemExit) as exit:
            main(["snapshot", command, str(self.store), *arguments])
        out, err = self._capsys.readouterr()
        return int(exit.value.code or 0), out, err

    def json(self, command: str, *arguments: str) -> Any:
        """The document of a run that finds no problem."""
        code, out, err = self.run(command, *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    def fails(self, command: str, *arguments: str) -> str:
        """The message of a run that finds a problem and prints no result."""
        code, out, err = self.run(command, *arguments)
        assert (code, out) == (1, "")
        assert "Traceback" not in err
        return err


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """On a store that was closed cleanly at step 12."""
    path = tmp_path / "users"
    with StoreFolder(path) as store:
        write_snapshot(store.live, description(), chunked(make_buckets(6, COUNTS)))
        store.set_mark(description() | {"live": "rows"})
    return Cli(path, capsys)


def test_saved_rows_are_the_live_rows(cli: Cli) -> None:
    entry = cli.json("save", "a")
    assert {field: entry[field] for field in ("name", "rows", "step")} == {"name": "a", "rows": 30, "step": 12}
    snapshot = Snapshot.open(cli.store / "snapshots" / "a")
    assert joined(snapshot.chunks()) == joined(Snapshot.open(cli.store / "live").chunks())
    assert snapshot.description == description()
    with StoreFolder(cli.store) as store:
        assert store.read_mark() == description() | {"live": "rows"}


def test_loaded_rows_become_the_live_rows_with_their_own_step_and_optimizer(cli: Cli) -> None:
    save(cli.store / "snapshots" / "a", {7: 40}, step=99, optimizer="lamb")
    code, out, _ = cli.run("load", "a")
    assert (code, out.startswith("loaded a: 40 rows")) == (0, True)
    rows = joined(Snapshot.open(cli.store / "snapshots" / "a").chunks())
    with StoreFolder(cli.store) as store:
        assert joined(Snapshot.open(store.live).chunks()) == rows
        assert store.read_mark() == description(step=99, optimizer="lamb") | {"live": "rows", "rows": 40}
        assert not store.incoming.exists()
    assert cli.json("save", "b")["step"] == 99


def test_load_repairs_a_store_that_was_not_closed_and_save_refuses_it(cli: Cli) -> None:
    save(cli.store / "snapshots" / "a")
    with StoreFolder(cli.store) as store:
        store.clear_mark()
    assert "not consistent" in cli.fails("save", "b")
    assert not (cli.store / "snapshots" / "b").exists()
    cli.json("load", "a")
    cli.json("save", "b")


def test_damaged_or_foreign_snapshot_leaves_the_live_rows(cli: Cli) -> None:
    live = joined(Snapshot.open(cli.store / "live").chunks())
    save(cli.store / "snapshots" / "wide", width=8)
    save(cli.store / "snapshots" / "bad")
    with (cli.store / "snapshots" / "bad" / "bucket-63.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xee")
    assert "of another table" in cli.fails("load", "wide")
    assert "bucket-63.npy' is damaged: its checksum" in cli.fails("load", "bad")
    assert "those there: 'bad', 'wide'" in cli.fails("load", "missing")
    assert joined(Snapshot.open(cli.store / "live").chunks()) == live
    with StoreFolder(cli.store) as store:
        assert store.read_mark() is not None
    assert sorted(entry.name for entry in cli.store.iterdir()) == ["LOCK", "MARK", "live", "snapshots"]


def test_store_in_use_is_refused(cli: Cli) -> None:
    with StoreFolder(cli.store):
        for command in ("save", "load"):
            assert "in use by process" in cli.fails(command, "a")


def test_name_that_exists_or_leads_elsewhere_is_refused(cli: Cli) -> None:
    cli.json("save", "a")
    assert "choose another name" in cli.fails("save", "a")
    for command in ("save", "load", "inspect", "verify"):
        for name in ("../a", "", "..", ".tmp-a"):
            assert "snapshot name" in cli.fails(command, name)


def test_mistyped_store_is_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "typo", tmp_path / "other"):
        for arguments in (["save", "a"], ["load", "a"], ["list"], ["inspect", "a"], ["verify"]):
            assert "is no store folder" in Cli(path, capsys).fails(*arguments)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["other"]


def test_list_shows_sound_and_damaged_snapshots(cli: Cli) -> None:
    assert cli.json("list") == {"snapshots": [], "damaged": {}}
    save(cli.store / "snapshots" / "[red]b", step=5)
    save(cli.store / "snapshots" / "a", step=6)
    entries = cli.json("list")["snapshots"]
    assert [(entry["name"], entry["rows"], entry["step"]) for entry in entries] == [("[red]b", 30, 5), ("a", 30, 6)]
    code, out, _ = cli.run("list")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["name", "rows", "bytes", "step", "created"]
    assert [line[:4] for line in lines[1:]] == [[e["name"], "30", str(e["bytes"]), str(e["step"])] for e in entries]
    (cli.store / "snapshots" / "a" / "manifest.msgpack").unlink()
    code, out, err = cli.run("list")
    assert code == 1
    assert "[red]b" in out
    assert "damaged: a:" in err


def test_inspect_counts_rows_and_updates(cli: Cli) -> None:
    cli.json("save", "a")
    rows = [row for bucket in make_buckets(6, COUNTS).values() for row in bucket]
    updates = sorted(int(row["updates"]) for row in rows)
    summary = cli.json("inspect", "a")
    tables = [int(row["table"]) for row in rows]
    assert summary["rows_by_table"] == {str(table): tables.count(table) for table in sorted(set(tables))}
    assert summary["updates"] == {"min": updates[0], "median": updates[(len(updates) - 1) // 2], "max": updates[-1]}
    assert summary["description"] == description()
    code, out, _ = cli.run("inspect", "a")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} >= {"rows_by_table", "updates", "optimizer", "step"}


def test_inspect_of_an_empty_snapshot(cli: Cli) -> None:
    save(cli.store / "snapshots" / "none", {})
    summary = cli.json("inspect", "none")
    assert (summary["rows"], summary["rows_by_table"], summary["updates"]) == (0, {}, None)


def test_description_of_a_foreign_file_cannot_drive_the_terminal(cli: Cli) -> None:
    save(cli.store / "snapshots" / "a", name="\x1b[2Jusers", tables=["\x1b]0;x\x07", b"\xff"])
    for arguments in (["inspect", "a"], ["inspect", "a", "--json"], ["list"]):
        code, out, _ = cli.run(*arguments)
        assert code == 0
        assert "\x1b" not in out


def test_verify_names_every_damaged_snapshot(cli: Cli) -> None:
    for name in ("a", "b", "c"):
        save(cli.store / "snapshots" / name)
    assert cli.json("verify") == {"sound": ["a", "b", "c"], "damaged": {}}
    os.truncate(cli.store / "snapshots" / "a" / "bucket-05.npy", 10)
    os.truncate(cli.store / "snapshots" / "b" / "manifest.msgpack", 10)
    code, out, err = cli.run("verify")
    assert (code, out) == (1, "sound: c\n")
    assert "bucket-05.npy" in err
    assert "manifest.msgpack" in err
    code, out, _ = cli.run("verify", "--json")
    assert (code, list(json.loads(out)["damaged"])) == (1, ["b", "a"])
    assert cli.run("verify", "a")[0] == 1
    assert cli.run("verify", "c")[0] == 0


def test_wrong_usage_exits_with_2_and_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["snapshot", "save"],
        ["snapshot", "nothing"],
        ["nothing"],
        ["snapshot", "list", "x", "--nothing"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
    for command in ("save", "load", "list", "inspect", "verify"):
        with pytest.raises(SystemExit) as exit:
            main(["snapshot", command, "--help"])
        assert exit.value.code == 0
        assert f"Example: tierbed snapshot {command} " in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from tierbed.engine import __version__

    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert (exit.value.code, capsys.readouterr().out) == (0, f"tierbed {__version__}\n")


def test_installed_command_reports_a_problem_without_a_traceback(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("tierbed")
    done = subprocess.run([command, "snapshot", "list", tmp_path / "none"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tierbed: ")
    assert done.stderr.count("\n") == 1


def test_importing_snapshots_does_not_import_the_command_line_tool() -> None:
    script = "import sys, tierbed.snapshots; print('typer' in sys.modules, 'tierbed.snapshots.cli' in sys.modules)"
    assert run_python(script) == "False False\n"


def test_load_killed_at_any_instant_leaves_rows_that_are_marked_as_what_they_are(cli: Cli) -> None:
    for step in (1, 2):
        save(cli.store / "snapshots" / str(step), dict.fromkeys(range(0, 64, 5), 100 * step), step=step)
    script = (
        "import os, random, signal, sys, time; from pathlib import Path\n"
        "from tierbed.engine.store.folder import StoreFolder\n"
        "from tierbed.snapshots.live import load_live; from tierbed.snapshots import Snapshot\n"
        "path = Path(sys.argv[1])\n"
        "with StoreFolder(path) as store: load_live(store, Snapshot.open(store.snapshots / '2'))\n"
        "for round in range(15):\n"
        "    loader = os.fork()\n"
        "    while loader == 0:\n"
        "        for step in '12':\n"
        "            with StoreFolder(path) as store: load_live(store, Snapshot.open(store.snapshots / step))\n"
        "    time.sleep(random.uniform(0.02, 0.1))\n"
        "    os.kill(loader, signal.SIGKILL); os.waitpid(loader, 0)\n"
        "    with StoreFolder(path) as store:\n"
        "        mark = store.read_mark()\n"
        "        if mark is not None:\n"
        "            live = Snapshot.open(store.live); live.verify()\n"
        "            assert mark == live.description | {'live': 'rows', 'rows': live.manifest.rows}\n"
        "    print('marked' if mark else 'unmarked')\n"
    )
    assert run_python(script, cli.store).count("marked\n") == 15
    cli.json("load", "1")
    assert cli.json("save", "after")["step"] == 1
