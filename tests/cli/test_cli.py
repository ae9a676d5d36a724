"""The command line on one store of small snapshots: what it lists, inspects, verifies, loads and compares."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.embeddings import make, train
from support.shell import Cli, command
from support.small_snapshots import chunked, description, flip_bit, joined, make_buckets, make_rows, save
from support.stores import options
from tierbed import __version__
from tierbed.snapshots import Snapshot, write_incremental, write_snapshot
from tierbed.snapshots.files.format import LIVE_FILES, LIVE_VERSION, read_snapshot_id
from tierbed.snapshots.inspection.summary import NORM_EDGES, summarise
from tierbed.snapshots.store.folder import StoreFolder

COUNTS = {0: 20, 5: 1, 63: 9}
MARKED = {"live": "rows", "rows": 30, LIVE_VERSION: "run:1"}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """On a store that was closed cleanly at step 12."""
    path = tmp_path / "users"
    with StoreFolder(path) as store:
        write_snapshot(store.incoming, description(), chunked(make_buckets(6, COUNTS)))
        store.replace_live_rows(store.incoming, description() | MARKED)
    return Cli(path, capsys)


def test_loaded_rows_become_the_live_rows_with_their_own_step_and_optimizer(cli: Cli) -> None:
    cli.json("save", "before")
    live = joined(Snapshot.open(cli.store / "live").chunks())
    assert joined(Snapshot.open(cli.store / "snapshots" / "before").chunks()) == live
    save(cli.store / "snapshots" / "a", {7: 40}, step=99, optimizer="shampoo")
    with StoreFolder(cli.store) as store:
        assert store.clean_marker == description() | MARKED | {LIVE_FILES: read_snapshot_id(store.live_path)}
        store.clear_clean_marker()
    assert "not clean" in cli.fails("save", "b")
    assert not (cli.store / "snapshots" / "b").exists()
    assert cli.says("load", "a").startswith("loaded a: 40 rows")
    rows = joined(Snapshot.open(cli.store / "snapshots" / "a").chunks())
    with StoreFolder(cli.store) as store:
        assert joined(Snapshot.open(store.live_path).chunks()) == rows
        expected = description(step=99, optimizer="shampoo") | {"live": "rows", "rows": 40}
        version = f"{read_snapshot_id(cli.store / 'snapshots' / 'a')}:0"
        assert store.clean_marker == expected | {LIVE_FILES: read_snapshot_id(store.live_path), LIVE_VERSION: version}
        assert not store.incoming.exists()
    assert cli.json("save", "b")["step"] == 99


def test_damaged_or_foreign_snapshot_leaves_the_live_rows(cli: Cli) -> None:
    live = joined(Snapshot.open(cli.store / "live").chunks())
    save(cli.store / "snapshots" / "wide", width=8)
    save(cli.store / "snapshots" / "bad")
    flip_bit(cli.store / "snapshots" / "bad" / "bucket-63.npy", 8 * 256)
    for name, said in (("wide", "of another table"), ("bad", "bucket-63.npy' is damaged"), ("none", "'bad', 'wide'")):
        assert said in cli.fails("load", name)
    assert joined(Snapshot.open(cli.store / "live").chunks()) == live
    with StoreFolder(cli.store) as store:
        assert store.clean_marker is not None
    assert sorted(entry.name for entry in cli.store.iterdir()) == ["LOCK", "MARK", "live", "snapshots"]


def test_store_in_use_is_refused(cli: Cli) -> None:
    prune = ["prune", "--keep-last", "1"]
    with StoreFolder(cli.store):
        for words in (["save", "1"], ["load", "1"], ["merge", "1", "b"], ["store get", "1"], prune, ["store compact"]):
            assert f"in use by process {os.getpid()}" in cli.fails(*words, code=3)
        assert "in use" in cli.json("load", "a", code=3)["error"]


def test_a_mistyped_store_is_told_in_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "typo", tmp_path / "other"):
        for words in (["save", "a"], ["load", "a"], ["list"], ["inspect", "a"], ["verify"], ["watch"]):
            code, out, _ = Cli(path, capsys).run(*words, "--json")
            assert (code, out.count("\n")) == (1, 1)
            assert "is not a store folder" in json.loads(out)["error"]
    assert [entry.name for entry in tmp_path.rglob("*")] == ["other"]


def test_an_import_takes_a_dtype_which_is_shown(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    other.json("load", "narrow")
    assert "--convert" in other.fails("load", "same")
    assert other.json("load", "same", "--convert")["rows"] == 3
    overflow = other.fails("import", "less", source, "--dtype", "float16")
    assert "1e+06 for key 3, which overflows float16; give smaller numbers, or dtype=torch.float32" in overflow


def test_list_shows_sound_and_damaged_snapshots_and_no_description_drives_the_terminal(cli: Cli) -> None:
    assert cli.json("list") == {"snapshots": [], "damaged": {}}
    save(cli.store / "snapshots" / "[red]b", step=5)
    save(cli.store / "snapshots" / "a", step=6, name="\x1b[2Jusers", tables=["\x1b]0;x\x07", "\x9b", None])
    entries = cli.json("list")["snapshots"]
    assert [(entry["name"], entry["rows"], entry["step"]) for entry in entries] == [("[red]b", 30, 5), ("a", 30, 6)]
    out = cli.says("list")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["name", "kind", "parent", "dtype", "rows", "size", "step", "age"]
    assert [line[:4] for line in lines[1:]] == [["[red]b", "full", "float32", "30"], ["a", "full", "float32", "30"]]
    for shown in (out, cli.says("inspect", "a"), cli.says("inspect", "a", "--json")):
        assert "\x1b" not in shown
    (cli.store / "snapshots" / "a" / "manifest.msgpack").unlink()
    code, out, err = cli.run("list")
    assert (code, "[red]b" in out, "damaged: a:" in err) == (1, True, True)


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
    assert summary["rows_by_table"] == dict(sorted(Counter(str(row["table"]) for row in rows).items()))
    spread = {"min": updates[0], "median": updates[(len(updates) - 1) // 2], "max": updates[-1]}
    assert summary["updates"] == spread
    limits = {"clip_grad_value": 0.0, "clip_grad_row_norm": 0.0, "max_row_norm": 0.0}
    hyper = {"lr": 0.1, "weight_decay": 0.0, "maximize": 0.0, "eps": 1e-10, **limits}
    assert summary["description"] == description(hyper=hyper)
    lines = dict(line.split(maxsplit=1) for line in cli.says("inspect", "a").splitlines())
    assert (lines["name"], lines["embedding"], lines["optimizer"], lines["step"]) == ("a", "users", "adagrad", "12")
    assert lines["updates"] == ", ".join(f"{name}: {count}" for name, count in spread.items())


def test_verify_names_every_damaged_snapshot_and_what_it_goes_over(cli: Cli) -> None:
    snapshots = cli.store / "snapshots"
    for name in ("base", "b", "other"):
        save(snapshots / name)
    write_incremental(snapshots / "next", Snapshot.open(snapshots / "base"), description(), 30, iter([]))
    assert cli.json("verify") == {"sound": ["base", "b", "other", "next"], "damaged": {}}
    assert cli.json("verify", "next", "other", "next") == {"sound": ["next", "other"], "damaged": {}}
    os.truncate(snapshots / "base" / "bucket-05.npy", 10)
    os.truncate(snapshots / "b" / "manifest.msgpack", 10)
    code, out, err = cli.run("verify")
    assert (code, out) == (1, "sound: other\n")
    for said in ("bucket-05.npy", "manifest.msgpack", "damaged: base: ", "damaged: next: its parent 'base' is damaged"):
        assert said in err
    assert set(json.loads(cli.run("verify", "--json")[1])["damaged"]) == {"b", "base", "next"}
    assert [cli.run("verify", name)[0] for name in ("base", "next", "other")] == [1, 1, 0]
    (snapshots / "base").rename(snapshots / "elsewhere")
    code, _, err = cli.run("verify", "next")
    assert (code, "lacks its parent: there is no snapshot 'base'" in err) == (1, True)
    assert "no snapshot 'missing'" in cli.fails("verify", "missing")


def test_inspect_shows_rows_and_draws_them(cli: Cli, tmp_path: Path) -> None:
    cli.json("save", "a")
    first = cli.json("inspect", "a", "--rows", "3")["first_rows"]
    rows = make_buckets(6, COUNTS)[0][:3]
    assert [(row["table"], row["key"] % 2**64) for row in first] == [(row["table"], row["key"]) for row in rows]
    assert first[0].keys() == {"table", "key", "embedding", "states", "updates", "step"}
    assert (len(first[0]["embedding"]), len(first[0]["states"]["sum"])) == (3, 3)
    save(cli.store / "snapshots" / "none", {})
    summary = cli.json("inspect", "none")
    assert (summary["rows"], summary["rows_by_table"], summary["updates"]) == (0, {}, None)
    pytest.importorskip("matplotlib")
    for name in ("a", "none"):
        cli.says("inspect", name, "--plot", str(tmp_path / f"{name}.png"))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for place, said in (("a.picture", "is not a picture"), ("no/a.png", "create the folder")):
        assert said in cli.fails("inspect", "a", "--plot", str(tmp_path / place))


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


def test_wrong_usage_exits_with_2_and_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("snapshot save", "snapshot nothing", "nothing", "snapshot list x --nothing"):
        assert command(*line.split()) == 2
    capsys.readouterr()
    assert (command("--version"), capsys.readouterr().out) == (0, f"tierbed {__version__}\n")


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """On a store with snapshot "before", of finite rows."""
    write(tmp_path, "before", rows())
    return Cli(tmp_path, capsys)


def rows(seed: int = 0) -> dict[int, NDArray[np.void]]:
    buckets = make_buckets(6, COUNTS)
    for bucket in buckets.values():
        bucket["values"] = np.random.default_rng(seed).normal(size=bucket["values"].shape)
    return buckets


def write(store: Path, name: str, buckets: dict[int, NDArray[np.void]], **changes: Any) -> None:
    write_snapshot(store / "snapshots" / name, description(**changes), chunked(buckets, 4))


def different(compared: Cli, *names: str) -> Any:
    """The document of a diff that finds one."""
    found = json.loads(compared.says("diff", *names, "--json", code=1))
    assert found["differs"]
    return found


def test_the_same_rows_do_not_differ(compared: Cli) -> None:
    write(compared.store, "after", rows())
    found = compared.json("diff", "before", "after")
    assert (found["differs"], found["same"], found["fields"], found["rows"]) == (False, 30, {}, [])
    assert compared.says("diff", "before", "after") == "the same: 30 rows\n"


def test_added_changed_and_gone_rows_are_counted_by_table_and_shown(compared: Cli) -> None:
    buckets = rows()
    gone, changed = buckets[0][3].copy(), buckets[0][7].copy()
    buckets[0]["values"][7, 1] += 2.5
    buckets[0]["values"][7, 4] -= 0.5  # of the state
    buckets[0] = np.delete(buckets[0], 3)
    buckets[9] = make_buckets(6, {9: 1})[9]
    added = buckets[9][0]
    buckets[63]["step"][2] += 1
    write(compared.store, "after", dict(sorted(buckets.items())), step=13)
    found = different(compared, "before", "after")
    assert (found["added"], found["changed"], found["gone"], found["same"]) == (1, 2, 1, 27)
    assert found["by_table"]["added"] == {str(added["table"]): 1}
    assert found["by_table"]["gone"] == {str(gone["table"]): 1}
    assert found["largest"]["embedding"] == pytest.approx(2.5)
    assert found["largest"]["sum"] == pytest.approx(0.5)
    assert found["fields"] == {"step": [12, 13]}
    shown = {(row["sort"], row["table"], row["key"] % 2**64): row["largest"] for row in found["rows"]}
    assert shown.keys() >= {("gone", gone["table"], gone["key"]), ("added", added["table"], added["key"])}
    assert shown["changed", changed["table"], changed["key"]] == pytest.approx(2.5)
    out = compared.says("diff", "before", "after", "--rows", "1", code=1)
    assert all(part in out for part in ("27 rows are the same", "step  12 -> 13", "and 3 more"))


def test_nan_is_the_same_as_itself_and_infinitely_far_from_numbers(compared: Cli) -> None:
    buckets = rows()
    buckets[63]["values"][1, 0] = np.nan
    write(compared.store, "nan", buckets)
    buckets[63]["values"][2, 4] += 1
    write(compared.store, "later", buckets)
    found = different(compared, "before", "nan")
    assert (found["changed"], found["largest"]["embedding"], found["rows"][0]["largest"]) == (1, "inf", "inf")
    found = different(compared, "nan", "later")
    assert (found["changed"], found["largest"]["embedding"]) == (1, 0.0)
    assert found["largest"]["sum"] == pytest.approx(1)


def test_rows_of_another_optimizer_are_compared_by_their_embeddings(compared: Cli) -> None:
    buckets = {}
    for bucket, wide in rows().items():
        buckets[bucket] = make_buckets(3, {bucket: len(wide)})[bucket]
        for field in ("table", "key", "updates", "step"):
            buckets[bucket][field] = wide[field]
        buckets[bucket]["values"] = wide["values"][:, :3]
    changes = {"optimizer": "sgd", "hyper": [0.1, 0.0, 0.0, 0.0, 0.0, 0.0]}
    write_snapshot(compared.store / "snapshots" / "bare", description(3, **changes), chunked(buckets))
    found = different(compared, "before", "bare")
    assert (found["changed"], found["same"], found["largest"]) == (30, 0, {"embedding": 0.0})
    assert {"optimizer", "states", "width"} <= found["fields"].keys()


def test_settings_of_an_optimizer_differ_by_their_names_or_as_numbers(compared: Cli) -> None:
    write(compared.store, "after", rows(), hyper=[0.05, 0.0, 0.0, 1e-10, 0.0, 1.0, 0.0])
    fields = different(compared, "before", "after")["fields"]
    assert fields == {"hyper": [{"lr": 0.1, "clip_grad_row_norm": 0.0}, {"lr": 0.05, "clip_grad_row_norm": 1.0}]}
    assert '{"lr": 0.1, "clip_grad_row_norm": 0.0} -> {"lr": 0.05' in compared.says("diff", "before", "after", code=1)
    for name, lr in (("other", 0.1), ("another", 0.2)):
        write(compared.store, name, rows(), optimizer="shampoo", hyper=[lr, 3.0])
    assert different(compared, "other", "another")["fields"] == {"hyper": [[0.1, 3.0], [0.2, 3.0]]}
    assert compared.json("inspect", "other")["description"]["hyper"] == [0.1, 3.0]


def test_what_cannot_be_compared_exits_with_2(compared: Cli) -> None:
    save(compared.store / "snapshots" / "other", width=8)
    write(compared.store, "damaged", rows())
    (compared.store / "snapshots" / "damaged" / "bucket-05.npy").unlink()
    assert "their columns is [3] and [4]" in compared.fails("diff", "before", "other", code=2)
    assert "bucket-05.npy" in compared.fails("diff", "before", "damaged", code=2)
    assert "there is no snapshot 'missing'" in compared.json("diff", "missing", "before", code=2)["error"]
