from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from support.embeddings import make, train
from support.scripts import run_python, run_script
from support.shell import Cli, command
from support.small_snapshots import chunked, description, joined, make_buckets, make_rows, save
from support.stores import options
from tierbed.snapshots import Snapshot, write_incremental, write_snapshot
from tierbed.snapshots.files.format import FILES, LIVE, snapshot_id
from tierbed.snapshots.inspection.summary import NORM_EDGES, summarise
from tierbed.snapshots.store.folder import StoreFolder

COUNTS = {0: 20, 5: 1, 63: 9}
MARKED = {"live": "rows", "rows": 30}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """On a store that was closed cleanly at step 12."""
    path = tmp_path / "users"
    with StoreFolder(path) as store:
        write_snapshot(store.live, description(), chunked(make_buckets(6, COUNTS)))
        store.write_clean_marker(description() | MARKED)
    return Cli(path, capsys)


def test_saved_rows_are_the_live_rows(cli: Cli) -> None:
    entry = cli.json("save", "a")
    assert {field: entry[field] for field in ("name", "rows", "step")} == {"name": "a", "rows": 30, "step": 12}
    snapshot = Snapshot.open(cli.store / "snapshots" / "a")
    assert joined(snapshot.chunks()) == joined(Snapshot.open(cli.store / "live").chunks())
    assert snapshot.description == description()
    with StoreFolder(cli.store) as store:
        assert store.clean_marker == description() | MARKED


def test_loaded_rows_become_the_live_rows_with_their_own_step_and_optimizer(cli: Cli) -> None:
    save(cli.store / "snapshots" / "a", {7: 40}, step=99, optimizer="shampoo")
    code, out, _ = cli.run("load", "a")
    assert (code, out.startswith("loaded a: 40 rows")) == (0, True)
    rows = joined(Snapshot.open(cli.store / "snapshots" / "a").chunks())
    with StoreFolder(cli.store) as store:
        assert joined(Snapshot.open(store.live).chunks()) == rows
        expected = description(step=99, optimizer="shampoo") | {"live": "rows", "rows": 40}
        version = f"{snapshot_id(cli.store / 'snapshots' / 'a')}:0"
        assert store.clean_marker == expected | {FILES: snapshot_id(store.live), LIVE: version}
        assert not store.incoming.exists()
    assert cli.json("save", "b")["step"] == 99


def test_load_repairs_a_store_that_was_not_closed_and_save_refuses_it(cli: Cli) -> None:
    save(cli.store / "snapshots" / "a")
    with StoreFolder(cli.store) as store:
        store.clear_clean_marker()
    assert "not clean" in cli.fails("save", "b")
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
    assert "existing ones: 'bad', 'wide'" in cli.fails("load", "missing")
    assert joined(Snapshot.open(cli.store / "live").chunks()) == live
    with StoreFolder(cli.store) as store:
        assert store.clean_marker is not None
    assert sorted(entry.name for entry in cli.store.iterdir()) == ["LOCK", "MARK", "live", "snapshots"]


def test_store_in_use_is_refused(cli: Cli) -> None:
    with StoreFolder(cli.store):
        for word, *more in (["save"], ["load"], ["merge", "b"], ["store get"]):
            assert f"in use by process {os.getpid()}" in cli.fails(word, "1", *more, code=3)
        assert "in use by process" in cli.fails("prune", "--keep-last", "1", code=3)
        assert "in use by process" in cli.fails("store compact", code=3)
        assert "in use" in cli.json("load", "a", code=3)["error"]


def test_mistyped_store_is_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "typo", tmp_path / "other"):
        for arguments in (["save", "a"], ["load", "a"], ["list"], ["inspect", "a"], ["verify"]):
            assert "is not a store folder" in Cli(path, capsys).fails(*arguments)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["other"]


def test_an_import_takes_a_dtype_and_all_that_shows_rows_names_it(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
    np.save(tmp_path / "rows.npy", values)
    new = Cli(tmp_path / "new", capsys)
    made = new.json("import", "half", str(tmp_path / "rows.npy"), "--create", "--dtype", "bfloat16")
    assert (made["dtype"], made["state_dtype"]) == ("bfloat16", None)
    new.json("load", "half")
    stat = new.json("store stat")
    assert (stat["dtype"], stat["state_dtype"]) == ("bfloat16", None)
    assert "\ndtype      bfloat16\n" in new.says("store stat")
    (entry,) = new.json("list")["snapshots"]
    assert (entry["dtype"], entry["state_dtype"]) == ("bfloat16", None)
    row = new.json("store get", "2")["embedding"]
    assert row == torch.from_numpy(values).bfloat16().float()[2].tolist()
    with make(options("device", tmp_path / "trained"), "adagrad") as embedding:
        train(embedding, [1, 2])
        embedding.put([3], torch.full((1, 5), 1e6), table_ids=0)
        embedding.save_snapshot("full")
    source = str(tmp_path / "trained" / "rows" / "snapshots" / "full")
    other = Cli(tmp_path / "other", capsys)
    imported = other.json("import", "narrow", source, "--create", "--dtype", "bfloat16")
    assert (imported["dtype"], imported["state_dtype"]) == ("bfloat16", "float32")
    assert "bfloat16, state float32" in other.says("list")
    assert other.json("import", "same", source)["dtype"] == "float32"
    overflow = other.fails("import", "less", source, "--dtype", "float16")
    assert "1e+06 for key 3, which overflows float16; give smaller numbers, or dtype=torch.float32" in overflow


def test_list_shows_sound_and_damaged_snapshots(cli: Cli) -> None:
    assert cli.json("list") == {"snapshots": [], "damaged": {}}
    save(cli.store / "snapshots" / "[red]b", step=5)
    save(cli.store / "snapshots" / "a", step=6)
    entries = cli.json("list")["snapshots"]
    assert [(entry["name"], entry["rows"], entry["step"]) for entry in entries] == [("[red]b", 30, 5), ("a", 30, 6)]
    code, out, _ = cli.run("list")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["name", "kind", "parent", "dtype", "rows", "size", "step", "age"]
    assert [line[:4] for line in lines[1:]] == [["[red]b", "full", "float32", "30"], ["a", "full", "float32", "30"]]
    (cli.store / "snapshots" / "a" / "manifest.msgpack").unlink()
    code, out, err = cli.run("list")
    assert code == 1
    assert "[red]b" in out
    assert "damaged: a:" in err


def test_a_snapshot_whose_link_leads_nowhere_is_listed_as_damaged(cli: Cli, tmp_path: Path) -> None:
    snapshots = cli.store / "snapshots"
    save(snapshots / "a")
    (snapshots / "lost").symlink_to(tmp_path / "unmounted")
    (snapshots / "loop").symlink_to("loop")
    for word in ("list", "verify"):
        code, out, err = cli.run(word, "--json")
        assert code == 1
        damaged = json.loads(out)["damaged"]
        assert set(damaged) == {"lost", "loop"}
        assert f"it is a link to '{tmp_path / 'unmounted'}', which does not exist" in damaged["lost"]
        assert "damaged: lost:" in err
    assert "is a link to" in cli.fails("inspect", "lost")


def test_inspect_counts_rows_and_updates(cli: Cli) -> None:
    cli.json("save", "a")
    rows = [row for bucket in make_buckets(6, COUNTS).values() for row in bucket]
    updates = sorted(int(row["updates"]) for row in rows)
    summary = cli.json("inspect", "a")
    tables = [int(row["table"]) for row in rows]
    assert summary["rows_by_table"] == {str(table): tables.count(table) for table in sorted(set(tables))}
    assert summary["updates"] == {"min": updates[0], "median": updates[(len(updates) - 1) // 2], "max": updates[-1]}
    clips = {"clip_grad_value": 0.0, "clip_grad_row_norm": 0.0}
    hyper = {"lr": 0.1, "weight_decay": 0.0, "maximize": 0.0, "eps": 1e-10, **clips}
    assert summary["description"] == description(hyper=hyper)
    code, out, _ = cli.run("inspect", "a")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (lines["name"], lines["embedding"], lines["optimizer"], lines["step"]) == ("a", "users", "adagrad", "12")
    assert lines["updates"] == f"min: {updates[0]}, median: {summary['updates']['median']}, max: {updates[-1]}"


def test_inspect_of_an_empty_snapshot(cli: Cli) -> None:
    save(cli.store / "snapshots" / "none", {})
    summary = cli.json("inspect", "none")
    assert (summary["rows"], summary["rows_by_table"], summary["updates"]) == (0, {}, None)


def test_description_of_a_foreign_file_cannot_drive_the_terminal(cli: Cli) -> None:
    save(cli.store / "snapshots" / "a", name="\x1b[2Jusers", tables=["\x1b]0;x\x07", "\x9b", None])
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


def test_verify_of_some_names_tells_what_they_go_over(cli: Cli) -> None:
    snapshots = cli.store / "snapshots"
    save(snapshots / "base")
    save(snapshots / "other")
    parent = Snapshot.open(snapshots / "base")
    write_incremental(snapshots / "next", parent, description(), 30, iter([]))
    assert cli.json("verify", "next", "other", "next") == {"sound": ["next", "other"], "damaged": {}}
    os.truncate(snapshots / "base" / "bucket-05.npy", 10)
    code, out, err = cli.run("verify", "next", "other")
    assert (code, out) == (1, "sound: other\n")
    assert "damaged: base: " in err
    assert "damaged: next: its parent 'base' is damaged" in err
    (snapshots / "base").rename(snapshots / "elsewhere")
    code, _, err = cli.run("verify", "next")
    assert code == 1
    assert "lacks its parent: there is no snapshot 'base'" in err
    assert "no snapshot 'missing'" in cli.fails("verify", "missing")


def test_inspect_shows_rows_and_draws_them(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cli.json("save", "a")
    first = cli.json("inspect", "a", "--rows", "3")["first_rows"]
    rows = make_buckets(6, COUNTS)[0][:3]
    assert [(row["table"], row["key"] % 2**64) for row in first] == [(row["table"], row["key"]) for row in rows]
    assert first[0].keys() == {"table", "key", "embedding", "states", "updates", "step"}
    assert (len(first[0]["embedding"]), len(first[0]["states"]["sum"])) == (3, 3)
    save(cli.store / "snapshots" / "none", {})
    for name in ("a", "none"):
        cli.says("inspect", name, "--plot", str(tmp_path / f"{name}.png"))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "is not a picture" in cli.fails("inspect", "a", "--plot", str(tmp_path / "a.picture"))
    assert "create it first" in cli.fails("inspect", "a", "--plot", str(tmp_path / "no" / "a.png"))


def test_norms_are_of_the_embeddings_that_are_finite(cli: Cli) -> None:
    rows = make_rows(6, 40, 3, bucket=0)
    rows["values"] = np.random.default_rng(0).normal(size=(40, 6)) * np.geomspace(1e-12, 1e12, 40)[:, None]
    rows["values"][4, 1], rows["values"][5, 2], rows["values"][6, 5] = np.nan, np.inf, np.nan  # the last of the state
    write_snapshot(cli.store / "snapshots" / "a", description(), [(0, rows)])
    norms = np.linalg.norm(np.delete(rows, [4, 5])["values"][:, :3].astype(np.float64), axis=1)
    found = cli.json("inspect", "a")
    assert found["not_finite"] == 2
    assert found["norm"] == pytest.approx({"min": norms.min(), "mean": norms.mean(), "max": norms.max()})
    summary = summarise(Snapshot.open(cli.store / "snapshots" / "a"))
    assert summary.norms.sum() == 38
    for norm in norms:
        place = np.searchsorted(NORM_EDGES, norm, side="right") - 1
        assert summary.norms[place] > 0
        assert NORM_EDGES[place + 1] < 1.002 * NORM_EDGES[place]


def test_wrong_usage_exits_with_2() -> None:
    for arguments in (
        ["snapshot", "save"],
        ["snapshot", "nothing"],
        ["nothing"],
        ["snapshot", "list", "x", "--nothing"],
    ):
        assert command(*arguments) == 2


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from tierbed import __version__

    assert (command("--version"), capsys.readouterr().out) == (0, f"tierbed {__version__}\n")


def test_importing_snapshots_does_not_import_the_command_line_tool() -> None:
    script = "import sys, tierbed.snapshots; print('typer' in sys.modules, 'tierbed.cli' in sys.modules)"
    assert run_python(script) == "False False\n"


def test_load_killed_at_any_instant_leaves_rows_that_are_marked_as_what_they_are(cli: Cli) -> None:
    for step in (1, 2):
        save(cli.store / "snapshots" / str(step), dict.fromkeys(range(0, 64, 5), 100 * step), step=step)
    script = (
        "import os, random, signal, sys, time; from pathlib import Path\n"
        "from tierbed.snapshots.store.folder import StoreFolder\n"
        "from tierbed.snapshots.store.closed_store import load_into_stores; from tierbed.snapshots import Snapshot\n"
        "from tierbed.snapshots.files.format import snapshot_id\n"
        "path = Path(sys.argv[1])\n"
        "with StoreFolder(path) as store: load_into_stores([store], [Snapshot.open(store.snapshots / '2')])\n"
        "for round in range(15):\n"
        "    loader = os.fork()\n"
        "    while loader == 0:\n"
        "        for step in '12':\n"
        "            with StoreFolder(path) as store:\n"
        "                load_into_stores([store], [Snapshot.open(store.snapshots / step)])\n"
        "    time.sleep(random.uniform(0.02, 0.1))\n"
        "    os.kill(loader, signal.SIGKILL); os.waitpid(loader, 0)\n"
        "    with StoreFolder(path) as store:\n"
        "        mark = store.clean_marker\n"
        "        if mark is not None:\n"
        "            live = Snapshot.open(store.live); live.verify()\n"
        "            assert mark.pop('live_files') == snapshot_id(store.live)\n"
        "            assert mark.pop('version') in [f'{snapshot_id(one)}:0' for one in store.snapshots.iterdir()]\n"
        "            assert mark == live.description | {'live': 'rows', 'rows': live.manifest.rows}\n"
        "    print('marked' if mark else 'unmarked')\n"
    )
    assert run_script(script, cli.store).stdout.count("marked\n") == 15
    cli.json("load", "1")
    assert cli.json("save", "after")["step"] == 1
