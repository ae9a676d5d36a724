"""The command line, snapshots, exports and imports take the names of tables and show them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from support.embeddings import DIM, contents
from support.refusals import check_refusal
from support.shell import Cli
from support.table_names import filled, firsts, opened
from tierbed import InputError, SnapshotError, TierbedError, make_normal_initializer, make_table_options
from tierbed.engine.durable import seal, unseal
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.exchange import description_for, export_snapshot, import_snapshot, make_persistent_table_writer

NAMES = ("user", None, "item")
MANIFEST = "manifest.msgpack"


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Of a store that was closed with the snapshots "bare", whose tables have no names, and "named"."""
    with filled(tmp_path, None, None, None) as embedding:
        embedding.save_snapshot("bare")
    with opened(tmp_path, *NAMES) as embedding:
        embedding.put([7, 8], torch.full((2, DIM), 5.0), "item")
        embedding.save_snapshot("named", "incremental")
    return Cli(tmp_path / "rows", capsys)


def snapshot(path: Path, name: str) -> Snapshot:
    return Snapshot.open(path / "rows" / "snapshots" / name)


def test_the_shell_takes_names(cli: Cli, tmp_path: Path) -> None:
    assert cli.json("store get", "8", "--table", "item") == cli.json("store get", "8", "--table", "2")
    assert cli.json("store get", "8", "--table", "item", "--snapshot", "named")["embedding"] == [5.0] * DIM
    assert cli.json("load", "named", "--table", "item", "--table", "1")["rows"] == 3
    with opened(tmp_path, *NAMES) as embedding:
        assert firsts(embedding) == {1: 2.0, 2: 5.0}
    assert cli.json("export", "named", str(tmp_path / "item.npz"), "--table", "item")["rows"] == 2
    dense = str(tmp_path / "dense.npy")
    np.save(dense, np.ones((4, DIM), np.float32))
    cli.json("import", "dense", dense, "--table-ids", "user")
    assert [row["table"] for _, rows in snapshot(tmp_path, "dense").chunks() for row in rows] == [0] * 4
    there = "0 to 2, or by name 'user', 'item'"
    for command in (["store get", "8"], ["load", "named"], ["export", "named", str(tmp_path / "x.npz")]):
        for wrong in ("users", "3", "-1", "9" * 5000, "") if command[0] == "load" else ("users",):
            code, _, error = cli.run(*command, "--table", wrong)
            assert (code, there in " ".join(error.replace("│", " ").split())) == (2, True)
    assert f"holds users; give table ids from {there}" in cli.fails("import", "x", dense, "--table-ids", "users")
    assert "no row of table item, key 3" in cli.json("store get", "3", "--table", "item", code=4)["error"]
    for unknown in (["users"], ["0"], [3], "user", [None]):
        call = partial(export_snapshot, snapshot(tmp_path, "named"), tmp_path / "x.npz", "npz", tables=unknown)
        check_refusal((call, InputError, "tables=", there))


def test_the_shell_shows_names_and_keeps_ids_in_its_documents(cli: Cli) -> None:
    row = cli.json("store get", "8", "--table", "item")
    assert (row["table"], row["table_name"]) == (2, "item")
    assert "table_name" not in cli.json("store get", "7", "--table", "1")
    assert "table_name  item" in cli.says("store get", "8", "--table", "item")
    printed = cli.json("inspect", "named", "--rows", "9")
    assert printed["rows_by_table"] == {"0": 1, "1": 1, "2": 2}
    assert printed["description"]["table_names"] == list(NAMES)
    assert {(row["table"], row.get("table_name")) for row in printed["first_rows"]} == set(enumerate(NAMES))
    assert "user: 1, 1: 1, item: 2" in cli.says("inspect", "named")
    assert "table_names" not in cli.json("inspect", "bare")["description"]


def test_a_difference_names_tables_and_keeps_ids(cli: Cli) -> None:
    found = json.loads(cli.run("diff", "bare", "named", "--json")[1])
    assert found["by_table"] == {"added": {"2": 1}, "changed": {"2": 1}, "gone": {}}
    assert found["table_names"] == list(NAMES)
    assert {(row["table"], row["table_name"]) for row in found["rows"]} == {(2, "item")}
    assert found["fields"]["table_names"] == [None, list(NAMES)]
    lines = cli.run("diff", "bare", "named")[1].splitlines()
    assert lines[1].split() == ["item", "1", "1", "0"]
    assert [line.split()[1] for line in lines if line.startswith(("added ", "changed "))] == ["item"] * 2


def test_snapshots_of_other_tables_are_not_compared(cli: Cli, tmp_path: Path) -> None:
    for number, names in enumerate((("item", None, "user"), ("users", None, "item"), (None, "user", "item"))):
        other = {**snapshot(tmp_path, "named").description, "table_names": list(names)}
        import_snapshot(tmp_path / "rows", f"other-{number}", snapshot(tmp_path, "named").folder, description=other)
        error = cli.json("diff", "named", f"other-{number}", code=2)["error"]
        assert "['user', '1', 'item']" in error
        code, found, _ = cli.run("diff", "bare", f"other-{number}", "--json")
        assert (code, json.loads(found)["table_names"]) == (1, list(names))


def test_merged_and_exported_snapshots_keep_the_names(cli: Cli, tmp_path: Path) -> None:
    named = snapshot(tmp_path, "named")
    cli.json("merge", "named", "merged")
    assert snapshot(tmp_path, "merged").description == named.description
    for format in ("parquet", "npz", "safetensors", "snapshot"):
        path = tmp_path / f"x.{format}"
        export_snapshot(named, path, format, tables=["item", 0])
        import_snapshot(tmp_path / "rows", format, path)
        assert snapshot(tmp_path, format).description == named.description
        rows = np.concatenate([rows for _, rows in snapshot(tmp_path, format).chunks()])
        assert sorted(rows["table"].tolist()) == [0, 2, 2]
    for name, names in (("named", {0: "user", 2: "item"}), ("bare", {})):
        export_snapshot(snapshot(tmp_path, name), tmp_path / f"{name}.parquet", "parquet", tables=[0, 2])
        table = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet").to_pydict()
        assert dict(zip(table["table"], table.get("table_name", []), strict=bool(names))) == names
    cli.json("load", "bare")
    cli.json("save", "shell")  # what the rows were loaded from had no names
    assert "table_names" not in snapshot(tmp_path, "shell").description
    cli.json("load", "named")
    cli.json("save", "again")
    assert snapshot(tmp_path, "again").description["table_names"] == list(NAMES)
    with opened(tmp_path, *NAMES) as embedding:
        before = contents(embedding).tobytes()
    renamed = ["member", "place", "item"]
    about = {**named.description, "table_names": renamed}
    import_snapshot(tmp_path / "rows", "renamed", named.folder, description=about)
    cli.json("load", "renamed")
    with opened(tmp_path, *renamed) as embedding:
        assert contents(embedding).tobytes() == before


def test_rows_are_written_and_imported_to_a_table_by_name(tmp_path: Path) -> None:
    normal = make_normal_initializer()
    about = description_for("rows", DIM, tables=[make_table_options(normal, name) for name in NAMES])
    values = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
    keys = np.array([7, 8])
    kinds = torch.int64, torch.float32
    with make_persistent_table_writer(tmp_path / "rows", "written", *kinds, DIM, description=about) as writer:
        writer.write(keys, values, "item")
        writer.write(keys, -values, 0)
        check_refusal((lambda: writer.write(keys, values, "users"), InputError, "table holds users", "by name"))
    import_snapshot(tmp_path / "rows", "imported", values, keys=keys, table_ids="item", description=about)
    with opened(tmp_path, *NAMES) as embedding:
        for name in ("written", "imported"):
            embedding.load_snapshot(name)
            assert np.array_equal(embedding.get(keys, "item"), values)
        assert embedding.size() == 2


WRONG: list[Any] = ["abc", {"a": 1}, None, ["user", None], ["user", None, "item", "x"]]
WRONG += [["user", None, last] for last in ("user", 3, b"item", "", "0", "\x1b[2J", "x" * 201)]


def test_forged_names_are_damage(cli: Cli, tmp_path: Path) -> None:
    folder, marker = snapshot(tmp_path, "bare").folder, tmp_path / "rows" / "MARK"
    content, mark = unseal((folder / MANIFEST).read_bytes()), unseal(marker.read_bytes())
    for names in WRONG:
        content["description"]["table_names"] = names
        (folder / MANIFEST).write_bytes(seal(content))
        with pytest.raises(SnapshotError, match=r"table_names.*a unique name or None for each of its tables"):
            Snapshot.open(folder)
        assert list(list_snapshots(folder.parent).damaged) == ["bare"]
        marker.write_bytes(seal({**mark, "table_names": names}))
        with opened(tmp_path, *NAMES) as embedding, pytest.raises(TierbedError, match="table_names"):
            embedding.size()
    assert "bare" in cli.json("verify", code=1)["damaged"]
