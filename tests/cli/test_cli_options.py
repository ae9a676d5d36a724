"""`tierbed store options`: a deployment's file is checked, and no store is opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import DIM, make
from support.shell import command
from tierbed import load_store_options
from tierbed.engine.store.full_tier import compute_full_table_bytes

FILE = """
[users]
store = "cached_host_mem"
persistent_path = "${NVME}/store"
cache_budget_mb = 2
overflow_mb = 1
capacity = 1000
storage_dim = 32
[items]
store = "host_mem"
[shops]
store = "cached_host_mem"
cache_budget_mb = "auto"
"""
ROW, LINE = 12 + 4 * 32 + 8, 144  # bytes of a row on disk, and of its line in memory


def checked(capsys: pytest.CaptureFixture[str], folder: Path, text: str, *names: str, code: int = 0) -> tuple[Any, str]:
    """The document for a file, and what stderr has."""
    file = folder / "deploy.toml"
    file.write_text(text)
    found = command("store", "options", file, *names, "--json")
    out, err = capsys.readouterr()
    assert found == code, err
    return json.loads(out), err


def test_options_are_shown_as_they_will_be_with_memory_and_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVME", str(tmp_path))
    found, err = checked(capsys, tmp_path, FILE)
    assert (err, found["wrong"]) == ("", {})
    assert found["free_memory_bytes"] > 0
    users, items, shops = (found["embeddings"][name] for name in ("users", "items", "shops"))
    assert users["options"] == load_store_options(tmp_path / "deploy.toml", "users").as_dict()
    assert users["options"]["persistent_path"] == f"{tmp_path}/store"
    full_table = compute_full_table_bytes(1000, LINE)
    assert users["memory_bytes"] == {"cache": 2 << 20, "overflow": 1 << 20, "table": full_table}
    assert (items["memory_bytes"], items["disk"]) == ({"table": None}, None)
    assert shops["memory_bytes"]["cache"] == "auto"
    assert found["memory_bytes"] == (3 << 20) + full_table
    disk = users["disk"]
    assert (disk["store"], disk["rows_bytes"]) == (f"{tmp_path}/store/users", 1000 * ROW)
    assert disk["snapshots"] == f"{tmp_path}/store/users/snapshots"
    assert disk["free_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["deploy.toml"]
    assert command("store", "options", tmp_path / "deploy.toml", "users") == 0
    out = capsys.readouterr().out
    assert f"\npersistent_path       {tmp_path}/store\n" in out
    assert "cache 2 MiB, overflow 1 MiB" in out


@pytest.mark.parametrize("capacity", [200, 4000])
def test_a_full_table_reports_this_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str], capacity: int) -> None:
    text = f'[rows]\nstore = "host_mem"\ncapacity = {capacity}\nstorage_dim = {DIM}\n'
    found, _ = checked(capsys, tmp_path, text)
    with make(load_store_options(tmp_path / "deploy.toml", "rows"), tables=1) as rows:
        for begin in range(0, capacity, 200):
            rows.put(torch.arange(begin, begin + 200), torch.zeros(200, DIM))
        assert rows.size() == capacity
        taken = rows.metrics()["host"]["bytes"]
    assert found["embeddings"]["rows"]["memory_bytes"]["table"] == pytest.approx(taken, rel=0.1)


def test_a_store_on_ssd_asks_for_its_caches_and_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f'[a]\nstore = "cached_ssd"\npersistent_path = "{tmp_path}"\ncache_budget_mb = 2\nhost_cache_budget_mb = 4'
    found, _ = checked(capsys, tmp_path, text)
    taken = found["embeddings"]["a"]["memory_bytes"]
    assert taken.pop("index_and_filters") is None
    caches = {"cache": 2, "overflow": 2, "host_cache": 4, "host_cache_overflow": 4}
    parts = {
        **caches,
        "write_buffers": 64,
        "data_blocks": 0,
        "look_ahead": 64,
        "changed_keys_at_most": 256,
        "threads": 6,
    }
    assert {part: bytes / (1 << 20) for part, bytes in taken.items()} == parts
    for given, mb in (("capacity = 1000000\nstorage_dim = 32", 2.07), ("index_mb = 5", 5)):
        found, _ = checked(capsys, tmp_path, f"{text}\n{given}")
        assert found["embeddings"]["a"]["memory_bytes"]["index_and_filters"] / (1 << 20) == pytest.approx(mb, abs=0.01)


WRONG = {
    "chapacity = 5": "host_mem has no option chapacity; did you mean capacity?",
    'persistent_path = "deploy.toml/x"': "'deploy.toml' is not a folder",
    'persistent_path = "."\ncapacity = 1000000000000000\nstorage_dim = 8': "rows of storage_dim=8 need",
}


def test_what_is_unknown_or_cannot_be_is_named_beside_what_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for lines, message in WRONG.items():
        text = f'[good]\nstore = "host_mem"\n[bad]\nstore = "host_mem"\n{lines}\n'
        found, err = checked(capsys, tmp_path, text, code=1)
        assert (list(found["embeddings"]), list(found["wrong"])) == (["good"], ["bad"])
        assert message in found["wrong"]["bad"].replace(f"{tmp_path}/", "")
        assert err.startswith("wrong: bad: ")
    assert list(checked(capsys, tmp_path, text, "good")[0]["embeddings"]) == ["good"]
    found, _ = checked(capsys, tmp_path, text, "typo", code=1)
    assert "has no table [typo]; it has good, bad" in found["wrong"]["typo"]


def test_rows_are_summed_by_disk_and_may_not_exceed_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = shutil.disk_usage(tmp_path).free

    def plan(share: float) -> str:
        rows = f'store = "host_mem"\nstorage_dim = 1000\ncapacity = {int(free * share) // 4020}\n'
        return f'[a]\n{rows}persistent_path = "{tmp_path}/x"\n[b]\n{rows}persistent_path = "{tmp_path}/y"\n'

    found, _ = checked(capsys, tmp_path, plan(0.7), code=1)
    assert list(found["wrong"]) == [f"{tmp_path}/x"]
    assert "the rows of a, b need " in found["wrong"][f"{tmp_path}/x"]
    found, _ = checked(capsys, tmp_path, plan(0.3))
    (disk,) = found["disks"]
    assert (disk["embeddings"], disk["rows_bytes"]) == (["a", "b"], 2 * (int(free * 0.3) // 4020) * 4020)
    assert disk["free_bytes"] > disk["rows_bytes"]
    assert command("store", "options", tmp_path / "deploy.toml") == 0
    assert f"rows on the disk of {tmp_path}/x: " in capsys.readouterr().out


def test_a_value_or_a_name_that_is_no_embedding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = checked(capsys, tmp_path, 'title = "x"\n["a/b"]\nstore = "host_mem"\n', code=1)
    assert found["wrong"].keys() == {"title", "a/b"}
    assert "a folder gets this name" in found["wrong"]["a/b"]
    assert "title is a value, not a TOML table" in found["wrong"]["title"]
    (tmp_path / "empty.toml").write_text("")
    for name in ("empty.toml", "missing.toml"):
        assert command("store", "options", tmp_path / name) == 1
        assert name in capsys.readouterr().err
