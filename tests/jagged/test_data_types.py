"""Tables whose `data_type` changes: their rows are another embedding's, and the way to them is named and works."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from tierbed import SnapshotError, StoreError, make_cached_ssd_store_options, make_host_mem_store_options
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, TableBatchedEmbeddingBags

ROWS = torch.linspace(-3, 3, 80).reshape(10, 8)
MAKERS = {
    "host": make_host_mem_store_options,
    "ssd": lambda **more: make_cached_ssd_store_options(cache_budget_mb=1, **more),
}


def collection(path: Path, data_type: str, store: str = "host", **more: str) -> EmbeddingBagCollection:
    stored = MAKERS[store](persistent_path=str(path), **more)
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", data_type=data_type)], stored)


def put_rows(path: Path, data_type: str = "FP32", store: str = "host") -> None:
    with collection(path, data_type, store) as bags:
        bags.embedding_of("t").put(torch.arange(10), ROWS, "t")
        bags.embedding_of("t").save_snapshot("a")


@pytest.mark.parametrize("store", MAKERS)
def test_a_snapshot_that_was_copied_before_the_open_is_converted(tmp_path: Path, store: str) -> None:
    put_rows(tmp_path, store=store)
    shutil.copytree(tmp_path / "ebc-d8" / "snapshots", tmp_path / "ebc-d8-bfloat16" / "snapshots")
    bags = collection(tmp_path, "BF16", store)
    said = r"snapshot 'a', with which store folder .*ebc-d8-bfloat16' opens, holds rows of dtype float32, not bfloat16"
    with pytest.raises(StoreError, match=rf"{said}.*; or load it by load_snapshot\(name, convert=True\)"):
        bags.embedding_of("t").size()
    with pytest.raises(SnapshotError, match=r"load it by load_snapshot\(name, convert=True\)"):
        bags.embedding_of("t").load_snapshot("a")
    bags.embedding_of("t").load_snapshot("a", convert=True)
    assert torch.equal(bags.embedding_of("t").get(torch.arange(10)), ROWS.bfloat16().float())
    bags.close()
    with collection(tmp_path, "BF16", store) as again:
        assert torch.equal(again.embedding_of("t").get(torch.arange(10)), ROWS.bfloat16().float())


def test_rows_of_another_data_type_are_named_before_they_are_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_rows(tmp_path, "FP16")
    assert not caplog.records
    said = "embedding 'ebc-d8' begins empty, and .*ebc-d8-float16 has rows of another dtype: .*convert=True"
    with caplog.at_level(logging.WARNING), collection(tmp_path, "FP32", open="fresh"):
        assert not caplog.records  # as the user asked
    with caplog.at_level(logging.WARNING), collection(tmp_path, "FP32") as bags:
        assert [bool(re.match(said, one.message)) for one in caplog.records] == [True]
        assert bags.embedding_of("t").size() == 0
    caplog.clear()
    with caplog.at_level(logging.WARNING), collection(tmp_path, "FP32"):
        assert not caplog.records  # it has a folder, and rows of its own


def test_a_table_batched_embedding_names_rows_of_another_precision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = make_host_mem_store_options(persistent_path=str(tmp_path))
    with TableBatchedEmbeddingBags([(10, 8, 3, 0)], store_options=stored) as tbe:
        tbe.embedding_of(0).put(torch.arange(10), ROWS)
    with TableBatchedEmbeddingBags([(10, 8, 3, 0)], store_options=stored, weights_precision=torch.float16):
        [said] = [one.message for one in caplog.records if one.levelno == logging.WARNING]
        assert said.startswith("embedding 'tbe-d8-float16' begins empty")
