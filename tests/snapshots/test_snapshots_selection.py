"""Parts of a snapshot: tables, rows, and weights without state; what is left out is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.embeddings import attach, contents, make, train
from support.kinds import KEYS, TYPES, grow, open_at
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.engine.errors import CapacityError, InputError, OptimizerError, SnapshotError
from tierbed.engine.row_format import narrowed, widened


def rows_by_key(embedding: MultiTableEmbedding) -> dict[tuple[int, int], bytes]:
    return {(int(row["table"]), int(row["key"])): row.tobytes() for row in contents(embedding)}


@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_a_part_of_a_snapshot_can_be_loaded(tmp_path: Path, store: str) -> None:
    with open_at(tmp_path, store) as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        all_rows = rows_by_key(embedding)
        report = embedding.load_snapshot("a", tables=[0, 2])
        assert rows_by_key(embedding) == {row: data for row, data in all_rows.items() if row[0] != 1}
        assert (report.rows, report.left_out) == (embedding.size(), len(all_rows) - embedding.size())
        assert report.remarks == []
        embedding.load_snapshot("a", tables=[1], where=lambda tables, keys: keys % 2 == 0)
        assert rows_by_key(embedding) == {r: data for r, data in all_rows.items() if r[0] == 1 and r[1] % 2 == 0}
        kept = rows_by_key(embedding)
        with pytest.raises(InputError, match=r"tables=\[3\]: snapshot 'a' has tables 0 to 2; 3 is none"):
            embedding.load_snapshot("a", tables=[3])
        with pytest.raises(InputError, match=r"where returned float64 of shape \(\): return bool of shape \(\d+,\)"):
            embedding.load_snapshot("a", where=lambda tables, keys: 0.5)
        assert rows_by_key(embedding) == kept
        grow(embedding, 1)
        kept = rows_by_key(embedding)
    with open_at(tmp_path, store) as embedding:
        assert rows_by_key(embedding) == kept


@pytest.mark.parametrize("used_before", [False, True])
def test_the_way_to_another_optimizer_that_the_error_names_is_one(tmp_path: Path, used_before: bool) -> None:
    remedy = r"save_snapshot, close, .* and load_snapshot\(name, weights_only=True\)"
    with open_at(tmp_path, "host", "adagrad") as embedding:
        train(embedding, [1, 2, 3])
        with pytest.raises(OptimizerError, match=remedy):
            attach(embedding, "adam")
        embedding.save_snapshot("a")
        rows = embedding.get([1, 2, 3], 0)
    with open_at(tmp_path, "host", "adam") as embedding:
        if used_before:
            with pytest.raises(OptimizerError, match="weights_only=True"):
                train(embedding, [1])
        embedding.load_snapshot("a", weights_only=True)
        assert torch.equal(embedding.get([1, 2, 3], 0), rows)
        train(embedding, [1])
        assert embedding.table_handle().local_table.state.names == ("exp_avg", "exp_avg_sq")


def test_rows_without_a_folder_have_no_way_by_a_snapshot() -> None:
    with make(options("host"), "adagrad") as embedding:
        train(embedding, [1])
        with pytest.raises(OptimizerError, match=r"; or to begin without state, keep rows = tierbed\.to_dense"):
            attach(embedding, "adam")


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("store", ["device", "ssd"])
@pytest.mark.parametrize("before", ["adam", "catch-up"])
@pytest.mark.rotated("store")
def test_weights_alone_go_on_with_another_optimizer(
    tmp_path: Path, store: str, before: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    with open_at(tmp_path, store, before, types) as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        looked_up = embedding.get(KEYS[0], 0)
        size = embedding.size()
    with open_at(tmp_path / "new", store, "adagrad", types) as embedding:
        train(embedding, [1, 2, 3])
        folder = tmp_path / "new" / "rows" / "snapshots"
        folder.mkdir()
        (folder / "a").symlink_to(tmp_path / "rows" / "snapshots" / "a")
        with pytest.raises(OptimizerError, match="weights_only=True"):
            embedding.load_snapshot("a")
        report = embedding.load_snapshot("a", weights_only=True)
        assert (report.rows, embedding.size()) == (size, size)
        assert torch.equal(embedding.get(KEYS[0], 0), looked_up)
        assert embedding.metrics()["table"]["step"] == 0
        first = contents(embedding).tobytes()
        report = embedding.load_snapshot("a", strict=False)
        assert "optimizer's state" in report.remarks[0]
        assert contents(embedding).tobytes() == first
        rows, initial = contents(embedding), np.float32(0.1)
        if types[1] == torch.bfloat16:
            initial = widened(narrowed(np.array([initial]), "bfloat16"), "bfloat16")[0]
        np.testing.assert_array_equal(embedding.table_handle().table.form.numbers(rows, "sum"), initial)
        assert (rows["step"] == 0).all()
        grow(embedding, 1)


def test_tables_that_the_embedding_lacks_are_left_out_and_told(tmp_path: Path) -> None:
    with open_at(tmp_path, "host") as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        all_rows = rows_by_key(embedding)
    with make(options("host", tmp_path / "new"), "adam", tables=2) as embedding:
        train(embedding, [1, 2, 3])
        folder = tmp_path / "new" / "rows" / "snapshots"
        folder.mkdir()
        (folder / "a").symlink_to(tmp_path / "rows" / "snapshots" / "a")
        with pytest.raises(SnapshotError, match="holds 3 tables, not 2"):
            embedding.load_snapshot("a")
        report = embedding.load_snapshot("a", strict=False)
        assert report.remarks == ["snapshot 'a' has 3 tables, and the embedding 2: the others are left out"]
        assert rows_by_key(embedding) == {row: data for row, data in all_rows.items() if row[0] < 2}


def test_rows_of_an_id_that_has_become_padding_are_left_out(tmp_path: Path) -> None:
    with open_at(tmp_path, "device") as embedding:
        train(embedding, range(9))
        embedding.save_snapshot("a")
    with make(options("device", tmp_path, open="fresh"), "adam", padding_idx=3) as embedding:
        report = embedding.load_snapshot("a")
        assert (report.rows, report.left_out) == (8, 1)
        assert report.remarks == ["padding_idx=3 was none when snapshot 'a' was saved: rows of that id are left out"]
        assert embedding.size() == 8
        embedding.save_snapshot("b")
        assert embedding.load_snapshot("b").remarks == []


def test_rows_go_back_to_a_whole_snapshot_and_not_to_a_part(tmp_path: Path) -> None:
    with open_at(tmp_path, "host") as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        grow(embedding, 1)
        embedding.save_snapshot("b")
        embedding.load_snapshot("a", tables=[0])
        assert embedding.last_snapshot == "b"
        embedding.load_snapshot("a")
        assert embedding.last_snapshot == "a"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tables": 0}, "tables=0: give a list of table ids"),
        ({"tables": []}, r"tables=\[\]: give a list of table ids"),
        ({"where": 3}, "where=3: give a function"),
    ],
)
def test_a_selection_that_cannot_be_is_named(tmp_path: Path, arguments: dict[str, Any], problem: str) -> None:
    with open_at(tmp_path, "host") as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        with pytest.raises(InputError, match=problem):
            embedding.load_snapshot("a", **arguments)


def test_a_part_that_fits_the_capacity_is_loaded_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_at(tmp_path, "host", capacity=500) as embedding:
        train(embedding, torch.arange(400))
        embedding.save_snapshot("a")
    with open_at(tmp_path / "new", "host", capacity=100) as embedding:
        assert embedding.size() == 0
        (tmp_path / "new" / "rows" / "snapshots").mkdir(parents=True)
        (tmp_path / "new" / "rows" / "snapshots" / "a").symlink_to(tmp_path / "rows" / "snapshots" / "a")
        caplog.clear()
        assert embedding.load_snapshot("a", where=lambda tables, keys: keys < 60).rows == 60
        assert caplog.messages == []
        train(embedding, torch.arange(60, 100))
        with pytest.raises(CapacityError):
            train(embedding, [1000])
