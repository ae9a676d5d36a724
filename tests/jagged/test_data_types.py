"""Tables whose `data_type` changes: their rows are another embedding's, and the way to them is named and works."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import make
from tierbed import (
    EagerOptimizer,
    MultiTableEmbedding,
    SnapshotError,
    StoreError,
    make_cached_ssd_store_options,
    make_host_mem_store_options,
)
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    OptimType,
    TableBatchedEmbeddingBags,
)

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


def load_a_state_of_float32(rows: MultiTableEmbedding) -> None:
    tables = [EmbeddingBagConfig(10, 8, "t", data_type="FP32")]
    state = EmbeddingBagCollection(tables, make_host_mem_store_options()).embedding_of("t").state_dict()
    rows.load_state_dict(state, strict=False)


@pytest.mark.parametrize("store", MAKERS)
@pytest.mark.parametrize(
    "load",
    [
        lambda rows: rows.load_snapshot("a"),
        lambda rows: rows.load_snapshot("aa", convert=True),
        load_a_state_of_float32,
    ],
)
def test_loads_that_fail_leave_a_copied_snapshot_to_be_converted(tmp_path: Path, store: str, load: Any) -> None:
    put_rows(tmp_path, store=store)
    shutil.copytree(tmp_path / "ebc-d8" / "snapshots", tmp_path / "ebc-d8-bfloat16" / "snapshots")
    said = r"snapshot 'a', with which store folder .*ebc-d8-bfloat16' opens, holds rows of dtype float32, not bfloat16"
    bags = collection(tmp_path, "BF16", store)
    rows = bags.embedding_of("t")
    with pytest.raises((SnapshotError, RuntimeError), match=r"aa|of dtype float32"):
        load(rows)
    for use in (rows.size, lambda: rows(torch.tensor([1]), 0), lambda: rows.save_snapshot("b"), rows.keep_rows):
        with pytest.raises(StoreError, match=rf"{said}.*load_snapshot\(name, convert=True\)"):
            use()
    if store == "ssd":  # the next process finds it so, too
        bags.close()
        bags = collection(tmp_path, "BF16", store)
        with pytest.raises(StoreError, match=said):
            bags.embedding_of("t").size()
    bags.embedding_of("t").load_snapshot("a", convert=True)
    assert torch.equal(bags.embedding_of("t").get(torch.arange(10)), ROWS.bfloat16().float())
    bags.close()
    with collection(tmp_path, "BF16", store) as again:
        assert torch.equal(again.embedding_of("t").get(torch.arange(10)), ROWS.bfloat16().float())


def test_a_copied_snapshot_that_no_load_can_convert_is_refused_at_once(tmp_path: Path) -> None:
    stored = make_host_mem_store_options(persistent_path=str(tmp_path))
    with make(stored, None, "old", torch.int32, tables=1) as rows:
        rows.put([1], torch.ones(1, rows.dim), 0)
        rows.save_snapshot("a")
    shutil.copytree(tmp_path / "old" / "snapshots", tmp_path / "new" / "snapshots")
    new = make(stored, None, "new", torch.int64, tables=1, dtype=torch.bfloat16)
    with pytest.raises(StoreError, match=r"snapshot 'a', with which .* of key_type int32, not int64"):
        new.load_snapshot("a", convert=True)
    with pytest.raises(StoreError, match="of key_type int32, not int64"):
        new.size()


def test_rows_of_another_data_type_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_rows(tmp_path, "FP16")
    assert not caplog.records
    said = "embedding 'ebc-d8' starts empty, but .*ebc-d8-float16 has rows of another dtype: .*convert=True"
    with caplog.at_level(logging.WARNING), collection(tmp_path, "FP32", open="fresh"):
        assert not caplog.records  # as the user asked
    with caplog.at_level(logging.WARNING), collection(tmp_path, "FP32") as bags:
        assert [bool(re.match(said, one.message)) for one in caplog.records] == [True]
        assert bags.embedding_of("t").size() == 0
    caplog.clear()
    with caplog.at_level(logging.WARNING), collection(tmp_path, "FP32"):
        assert not caplog.records  # it has a folder, and rows of its own


def test_rows_of_other_tables_are_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def collection_of(*types: tuple[str, str]) -> EmbeddingBagCollection:
        tables = [EmbeddingBagConfig(10, 8, name, data_type=data_type) for name, data_type in types]
        return EmbeddingBagCollection(tables, make_host_mem_store_options(persistent_path=str(tmp_path)))

    with collection_of(("user", "FP32")) as bags:
        bags.embedding_of("user").put(torch.arange(10), ROWS, "user")
    with caplog.at_level(logging.WARNING):
        collection_of(("user", "FP32"), ("item", "BF16")).close()
        collection_of(("item", "FP16")).close()
        assert not caplog.records
        collection_of(("user", "FP16"), ("item", "FP16")).close()
        assert "ebc-d8 has rows of another dtype" in caplog.text


def test_rows_of_another_precision_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = make_host_mem_store_options(persistent_path=str(tmp_path))
    with TableBatchedEmbeddingBags([(10, 8, 3, 0)], store_options=stored) as tbe:
        tbe.embedding_of(0).put(torch.arange(10), ROWS)
    with TableBatchedEmbeddingBags([(10, 8, 3, 0)], store_options=stored, weights_precision=torch.float16):
        [said] = [one.message for one in caplog.records if one.levelno == logging.WARNING]
        assert said.startswith("embedding 'tbe-d8-float16' starts empty")


@pytest.mark.parametrize(
    ("kind", "config"), [(EmbeddingBagCollection, EmbeddingBagConfig), (EmbeddingCollection, EmbeddingConfig)]
)
def test_the_state_of_a_collections_optimizer_has_the_dtype_that_it_is_made_with(kind: Any, config: Any) -> None:
    tables = [config(10, 8, "t"), config(10, 4, "u")]
    made = kind(tables, make_host_mem_store_options(), "made", state_dtype=torch.bfloat16)
    optimizer = EagerOptimizer(torch.optim.Adagrad(made.parameters(), lr=0.1), made)
    for table in "tu":
        made.embedding_of(table)(torch.tensor([1]), 0).square().sum().backward()
    optimizer.step()
    for table in "tu":
        assert made.embedding_of(table).table_handle().local_table.state.types == ("bfloat16",)
    kind(tables, name="other", share=made, state_dtype=torch.bfloat16)


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("optimizer", "given", "types"),
    [
        (OptimType.ADAM, {"momentum1": BF16, "momentum2": "bf16"}, ("bfloat16", "bfloat16")),
        (OptimType.ADAM, {"momentum1": torch.float32}, ()),
        (OptimType.PARTIAL_ROWWISE_ADAM, {"momentum1": BF16, "momentum2": torch.float32}, ("bfloat16", "float32")),
        (OptimType.EXACT_ADAGRAD, {"momentum1": BF16}, ("bfloat16",)),
        (OptimType.EXACT_SGD, {}, ()),
    ],
)
@pytest.mark.parametrize("dim", [1, 8])
@pytest.mark.rotated("dim")
def test_state_has_the_dtypes_of_fbgemms_argument(optimizer: OptimType, given: Any, types: Any, dim: int) -> None:
    tbe = TableBatchedEmbeddingBags([(10, dim, 3, 0)], optimizer=optimizer, optimizer_state_dtypes=given)
    tbe(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).backward(torch.full((2, dim), 0.3))
    assert tbe.embedding_of(0).table_handle().local_table.state.types == types
    states = tbe.split_optimizer_states()[0] if types else []
    for state, type in zip(states, types, strict=True):
        assert state.any()
        assert bool(state.eq(state.bfloat16().float()).all()) == (type == "bfloat16")
