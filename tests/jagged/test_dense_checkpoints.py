"""Dense checkpoints of tables with other sizes, or in another order, than a collection's are not taken in silence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tierbed import (
    InputError,
    MultiTableEmbedding,
    StoreError,
    import_snapshot,
    make_constant_initializer,
    make_host_mem_store_options,
    make_table_options,
)
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig

ZEROS = make_constant_initializer(0.0)
NAMES = {name: f"model.embedding_bags.{name}.weight" for name in ("user", "item")}


def checkpoint(path: Path, sizes: Mapping[str, int]) -> str:
    torch.save({NAMES[name]: torch.full((rows, 4), float(rows)) for name, rows in sizes.items()}, path / "dense.pt")
    return str(path / "dense.pt")


def collection(path: Path) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(10, 4, "user"), EmbeddingBagConfig(20, 4, "item")]
    return EmbeddingBagCollection(tables, make_host_mem_store_options(persistent_path=str(path)))


@pytest.mark.parametrize(
    ("users", "said"),
    [
        (13, "snapshot 'd' has 3 rows of table user with ids from 10 on, which no lookup takes: give .* of 13"),
        (7, "snapshot 'd' has ids 0 to 6 of table user, which takes 10, so the others begin as new rows: .* of 7"),
        (10, ""),
    ],
)
@pytest.mark.parametrize("opens", [False, True])
def test_other_sizes_are_reported_and_logged(tmp_path: Path, caplog: Any, users: int, said: str, opens: bool) -> None:
    source = checkpoint(tmp_path, {"user": users, "item": 20})
    import_snapshot(tmp_path / "ebc-d4", "d", source, tensor=[*NAMES.values()])
    if opens:
        with collection(tmp_path) as bags:
            assert bags.embedding_of("user").size() == users + 20
    with collection(tmp_path) as bags:
        logged = [one.message for one in caplog.records if "table user" in one.message]
        report = bags.embedding_of("user").load_snapshot("d")
        logged = logged or [one.message for one in caplog.records if "table user" in one.message]
        assert len(report.remarks) == len(logged) == bool(said)
        assert all(map(re.compile(f"(embedding 'ebc-d4': )?{said}").match, [*report.remarks, *logged]))
        assert bags.embedding_of("user").get([6], "user").eq(users).all()


def test_tensors_in_another_order_than_tables_are_refused(tmp_path: Path) -> None:
    source, swapped = checkpoint(tmp_path, {"user": 10, "item": 20}), [NAMES["item"], NAMES["user"]]
    import_snapshot(tmp_path / "ebc-d4", "d", source, tensor=swapped)
    said = r"tables \['item', 'user'\], and the embedding has \['user', 'item'\]"
    with collection(tmp_path) as bags, pytest.raises(StoreError, match=said):
        bags.embedding_of("user").load_snapshot("d")
    shutil.rmtree(tmp_path / "ebc-d4" / "snapshots" / "d")
    with collection(tmp_path) as bags:
        bags.embedding_of("user").put([1], torch.ones(1, 4), "user")
    with pytest.raises(InputError, match="tensor 0 is of table 'item', but table 0 is 'user'; list the tensors in the"):
        import_snapshot(tmp_path / "ebc-d4", "e", source, tensor=swapped)
    import_snapshot(tmp_path / "ebc-d4", "e", source, tensor=[*NAMES.values()])
    with collection(tmp_path) as bags:
        bags.embedding_of("user").load_snapshot("e")
        assert bags.embedding_of("item").get([1], "item").eq(20).all()


def test_tensors_of_named_tables_are_rows_of_tables_without_names(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, {"user": 10, "item": 20})
    import_snapshot(tmp_path / "rows", "d", source, tensor=[*NAMES.values()])
    stored, tables = make_host_mem_store_options(persistent_path=str(tmp_path)), [make_table_options(ZEROS)] * 2
    with MultiTableEmbedding("rows", 4, torch.float32, torch.int64, tables, stored) as rows:
        assert rows.get([1], 0).eq(10).all()
        assert rows.load_snapshot("d", strict=False).remarks == []
        assert rows.get([19], 1).eq(20).all()


@pytest.mark.parametrize(("rows", "padding"), [(10, 9), (10, 0), (9, 9), (7, 6), (7, 0), (7, 7), (7, 8)])
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.rotated("has_padding")
def test_the_row_of_padding_is_one_of_a_dense_table(tmp_path: Path, rows: int, padding: int, has_padding: bool) -> None:
    source = torch.nn.Embedding(rows, 4, padding_idx=padding if has_padding and padding < rows else None)
    import_snapshot(tmp_path / "rows", "d", source)
    stored, tables = make_host_mem_store_options(persistent_path=str(tmp_path)), [make_table_options(ZEROS, ids=10)]
    with MultiTableEmbedding("rows", 4, torch.float32, torch.int64, tables, stored, padding_idx=padding) as embedding:
        remarks = embedding.load_snapshot("d").remarks
        said = [remark for remark in remarks if "has ids" in remark]
        assert len(said) == (rows < 10)
        assert all(
            f"has ids 0 to {rows - 1} of table 0" in remark and remark.endswith(f" of {rows}") for remark in said
        )
