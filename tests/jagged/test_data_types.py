"""Tables of another `data_type` do not come to their rows, or dense checkpoints of others are taken in silence."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import make
from support.stores import options
from tierbed import (
    EagerOptimizer,
    InputError,
    MultiTableEmbedding,
    SnapshotError,
    StoreError,
    import_snapshot,
    make_constant_initializer,
    make_table_options,
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


def collection(path: Path, data_type: str, store: str = "host", **more: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", data_type=data_type)], options(store, path, **more))


def put_rows(path: Path, data_type: str = "FP32", store: str = "host") -> None:
    with collection(path, data_type, store) as bags:
        bags.embedding_of("t").put(torch.arange(10), ROWS, "t")
        bags.embedding_of("t").save_snapshot("a")


def load_a_state_of_float32(rows: MultiTableEmbedding) -> None:
    tables = [EmbeddingBagConfig(10, 8, "t", data_type="FP32")]
    state = EmbeddingBagCollection(tables, options("host")).embedding_of("t").state_dict()
    rows.load_state_dict(state, strict=False)


@pytest.mark.parametrize("store", ["host", "ssd"])
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
    said = r"snapshot 'a' of store folder .*ebc-d8-bfloat16' holds rows of dtype float32, not bfloat16"
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
    stored = options("host", tmp_path)
    with make(stored, None, "old", torch.int32, tables=1) as rows:
        rows.put([1], torch.ones(1, rows.dim), 0)
        rows.save_snapshot("a")
    shutil.copytree(tmp_path / "old" / "snapshots", tmp_path / "new" / "snapshots")
    new = make(stored, None, "new", torch.int64, tables=1, dtype=torch.bfloat16)
    with pytest.raises(StoreError, match=r"snapshot 'a' of store folder .* of key_type int32, not int64"):
        new.load_snapshot("a", convert=True)
    with pytest.raises(StoreError, match="of key_type int32, not int64"):
        new.size()


def test_rows_of_another_data_type_are_named_and_those_of_other_tables_are_not(tmp_path: Path, caplog: Any) -> None:
    def collection_of(*types: tuple[str, str]) -> EmbeddingBagCollection:
        tables = [EmbeddingBagConfig(10, 8, name, data_type=data_type) for name, data_type in types]
        return EmbeddingBagCollection(tables, options("host", tmp_path))

    put_rows(tmp_path, "FP16")
    with caplog.at_level(logging.WARNING):
        collection(tmp_path, "FP32", open="fresh").close()  # as the user asked
        collection_of(("t", "FP16"), ("item", "BF16")).close()
        collection_of(("item", "FP32")).close()
        assert not caplog.records
        said = "embedding 'ebc-d8' starts empty. .*ebc-d8-float16 has rows of the same tables in .*convert=True"
        with collection(tmp_path, "FP32") as bags:
            assert [bool(re.match(said, one.message)) for one in caplog.records] == [True]
            assert bags.embedding_of("t").size() == 0
        caplog.clear()
        collection(tmp_path, "FP32").close()
        assert not caplog.records  # it has a folder, and rows of its own


def test_rows_of_another_precision_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = options("host", tmp_path)
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
    made = kind(tables, options("host"), "made", state_dtype=torch.bfloat16)
    optimizer = EagerOptimizer(torch.optim.Adagrad(made.parameters(), lr=0.1), made)
    sum(embedding(torch.tensor([1]), 0).square().sum() for embedding in made.each()).backward()
    optimizer.step()
    assert [embedding.table_handle().open_table.state.types for embedding in made.each()] == [("bfloat16",)] * 2
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
    assert tbe.embedding_of(0).table_handle().open_table.state.types == types
    states = tbe.split_optimizer_states()[0] if types else []
    for state, type in zip(states, types, strict=True):
        assert state.any()
        assert bool(state.eq(state.bfloat16().float()).all()) == (type == "bfloat16")


ZEROS = make_constant_initializer(0.0)
NAMES = {name: f"model.embedding_bags.{name}.weight" for name in ("user", "item")}


def checkpoint(path: Path, sizes: Mapping[str, int]) -> str:
    torch.save({NAMES[name]: torch.full((rows, 4), float(rows)) for name, rows in sizes.items()}, path / "dense.pt")
    return str(path / "dense.pt")


def two_tables(path: Path) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(10, 4, "user"), EmbeddingBagConfig(20, 4, "item")]
    return EmbeddingBagCollection(tables, options("host", path))


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
        with two_tables(tmp_path) as bags:
            assert bags.embedding_of("user").size() == users + 20
    with two_tables(tmp_path) as bags:
        logged = [one.message for one in caplog.records if "table user" in one.message]
        report = bags.embedding_of("user").load_snapshot("d")
        logged = logged or [one.message for one in caplog.records if "table user" in one.message]
        assert len(report.remarks) == len(logged) == bool(said)
        assert all(map(re.compile(f"(embedding 'ebc-d4': )?{said}").match, [*report.remarks, *logged]))
        assert bags.embedding_of("user").get([6], "user").eq(users).all()


def test_tensors_in_another_order_than_tables_are_refused(tmp_path: Path) -> None:
    source, swapped = checkpoint(tmp_path, {"user": 10, "item": 20}), [NAMES["item"], NAMES["user"]]
    import_snapshot(tmp_path / "ebc-d4", "d", source, tensor=swapped)
    said = r"tables \['item', 'user'\], but the embedding has tables \['user', 'item'\]"
    with two_tables(tmp_path) as bags, pytest.raises(StoreError, match=said):
        bags.embedding_of("user").load_snapshot("d")
    shutil.rmtree(tmp_path / "ebc-d4" / "snapshots" / "d")
    with two_tables(tmp_path) as bags:
        bags.embedding_of("user").put([1], torch.ones(1, 4), "user")
    with pytest.raises(InputError, match=r"position 0 belongs to table 'item', but table 0 is 'user'\. List the"):
        import_snapshot(tmp_path / "ebc-d4", "e", source, tensor=swapped)
    import_snapshot(tmp_path / "ebc-d4", "e", source, tensor=[*NAMES.values()])
    with two_tables(tmp_path) as bags:
        bags.embedding_of("user").load_snapshot("e")
        assert bags.embedding_of("item").get([1], "item").eq(20).all()


def test_tensors_of_named_tables_are_rows_of_tables_without_names(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, {"user": 10, "item": 20})
    import_snapshot(tmp_path / "rows", "d", source, tensor=[*NAMES.values()])
    stored, tables = options("host", tmp_path), [make_table_options(ZEROS)] * 2
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
    stored, tables = options("host", tmp_path), [make_table_options(ZEROS, ids=10)]
    with MultiTableEmbedding("rows", 4, torch.float32, torch.int64, tables, stored, padding_idx=padding) as embedding:
        remarks = embedding.load_snapshot("d").remarks
        said = [remark for remark in remarks if "has ids" in remark]
        assert len(said) == (rows < 10)
        assert all(
            f"has ids 0 to {rows - 1} of table 0" in remark and remark.endswith(f" of {rows}") for remark in said
        )
