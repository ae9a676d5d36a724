"""The embedding module outside a graph: initial rows, lookups, rows read and written, handles, optimizers."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tierbed
from support import naive
from support.embeddings import DIM, TABLES, attach, contents, make, rows_by_key, train
from support.optimizers import OPTIMIZERS
from support.rows import INITIALIZERS, SPECIAL_KEYS, same_bits
from support.stores import STORES, options
from tierbed import (
    ClosedError,
    GraphError,
    InputError,
    MultiTableEmbedding,
    MultiTableMultiColumnEmbedding,
    OptimizerError,
)
from tierbed.embedding.tables.rows_in_tensors import FIELDS
from tierbed.engine.options.initializers import as_arrays, make_column_options, make_table_options
from tierbed.engine.options.lookup import Lookup


@pytest.mark.parametrize("columns", [[3], [1, 4, 2], [5, 5]])
@pytest.mark.parametrize("store", STORES)
def test_unknown_rows_are_the_specified_function_of_seed_table_key_and_column(
    tmp_path: Path, store: str, columns: list[int]
) -> None:
    tables = [
        make_table_options([make_column_options(INITIALIZERS[(table + i) % 5]) for i in range(len(columns))])
        for table in range(5)
    ]
    embedding = MultiTableMultiColumnEmbedding(
        "rows", columns, torch.float32, torch.uint64, tables, options(store, tmp_path), seed=-9
    )
    keys = np.array(SPECIAL_KEYS, np.uint64).repeat(5)
    numbers = np.arange(len(keys), dtype=np.uint32) % 5
    with embedding:
        rows = embedding.get(keys, numbers.astype(np.int64))
        assert embedding.size() == 0
    same_bits(rows.numpy(), naive.initial_rows(numbers, keys, -9 % 2**64, columns, *as_arrays(tables, columns)))


def test_without_tables_there_is_one_with_the_default_initializer() -> None:
    make_embedding = {"embedding_dim": 4, "dtype": torch.float32, "key_type": torch.int64, "tables": None}
    given = MultiTableEmbedding(
        "given", **make_embedding, store_options=options("device"), default_initializer={"type": "constant", "value": 7}
    )
    assert given.get([1, 2]).tolist() == [[7.0] * 4] * 2
    usual = MultiTableEmbedding("usual", **make_embedding, store_options=options("device"))
    assert 0.045 < usual.get(torch.arange(5000)).std().item() < 0.055


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3), (2, 0, 3), (2, 1, 2, 3)])
def test_lookup_adds_the_width_to_the_shape_of_ids(shape: tuple[int, ...]) -> None:
    with make(options("device"), tables=1) as embedding, torch.no_grad():
        ids = torch.arange(int(np.prod(shape))).reshape(shape)
        rows = embedding(ids)
        assert rows.shape == (*shape, DIM)
        assert rows.dtype == torch.float32
        assert torch.equal(rows.reshape(-1, DIM), embedding.get(ids.reshape(-1)))


def test_non_contiguous_ids_are_looked_up_where_they_are() -> None:
    with make(options("device")) as embedding, torch.no_grad():
        ids = torch.arange(60).reshape(5, 12)
        for view in (ids.T, ids[:, ::5], ids[1:, 3:6].T, ids[0].expand(4, 12)):
            whole, tables = view.contiguous(), torch.arange(view.shape[-1]) % 3
            assert torch.equal(embedding(view, tables), embedding(whole, tables.expand_as(whole).contiguous()))


def test_table_ids_broadcast_and_default_to_columns() -> None:
    with make(options("device")) as embedding, torch.no_grad():
        ids = torch.arange(12).reshape(4, 3)
        columns = torch.stack([embedding.get(ids[:, table], table) for table in range(3)], 1)
        assert torch.equal(embedding(ids), columns)
        for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
            assert torch.equal(embedding(ids, torch.arange(3, dtype=dtype)), columns)
            assert torch.equal(embedding(ids.T, torch.arange(3, dtype=dtype)[:, None]), columns.transpose(0, 1))
        assert torch.equal(embedding(ids, torch.tensor(2)), embedding.get(ids, 2))
        assert torch.equal(embedding(ids, torch.full((4, 3), 1)), embedding.get(ids, [[1]]))
        assert embedding(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, DIM)


def test_backward_outside_a_graph_is_refused_and_names_the_remedy() -> None:
    with make(options("device"), "sgd", tables=1) as embedding:
        rows = embedding(torch.tensor([1, 2]))
        assert rows.requires_grad
        with pytest.raises(GraphError, match=r"embedding 'rows': backward\(\) outside a graph.*Graph.*no_grad"):
            rows.sum().backward()
        with torch.no_grad():
            assert not embedding(torch.tensor([1, 2])).requires_grad
        with torch.inference_mode():
            assert torch.equal(embedding(torch.tensor([1, 2])), rows)
        assert embedding.size() == 0


@pytest.mark.parametrize("store", ["device", "cached_host"])
@given(
    puts=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 12), st.integers(0, 99)), max_size=40), max_size=6
    )
)
@settings(max_examples=25)
def test_put_get_size_and_iteration_agree_with_a_dict(store: str, puts: list[list[tuple[int, int, int]]]) -> None:
    model: dict[tuple[int, int], list[float]] = {}
    every = [(table, key) for table in range(3) for key in range(-3, 14)]
    tables, keys = (list(column) for column in zip(*every, strict=True))
    with make(options(store), tables=3) as embedding:
        initial = dict(zip(every, embedding.get(keys, tables).tolist(), strict=True))
        for put in puts:
            rows = torch.tensor([[float(value + i) for i in range(DIM)] for *_, value in put]).reshape(-1, DIM)
            embedding.put([key for _, key, _ in put], rows, np.array([table for table, *_ in put], np.int64))
            model |= {(table, key): row for (table, key, _), row in zip(put, rows.tolist(), strict=True)}
            assert embedding.size() == len(model)
            assert rows_by_key(embedding) == model
        assert embedding.get(keys, tables).tolist() == [(initial | model)[row] for row in every]


@pytest.mark.parametrize("key_type", [torch.int32, torch.int64, torch.uint64])
def test_chunks_are_typed_and_in_the_order_of_iteration(key_type: torch.dtype) -> None:
    with make(options("device"), key_type=key_type) as embedding:
        ids = torch.arange(300).to(key_type)
        embedding.put(ids, torch.rand(300, DIM), torch.arange(300) % 3)
        chunks = list(embedding.chunks())
        for tables, keys, rows in chunks:
            assert (tables.dtype, keys.dtype, rows.dtype) == (torch.int64, key_type, torch.float32)
            assert len(tables) == len(keys) == len(rows)
            assert rows.shape[1] == DIM
        flat = [(t, k) for tables, keys, _ in chunks for t, k in zip(tables.tolist(), keys.tolist(), strict=True)]
        assert flat == [(table, key) for table, key, _ in embedding]
        numbers = [(naive.bucket(table, key), table, key) for table, key in flat]
        assert numbers == sorted(numbers)
        assert len(set(flat)) == 300


def test_put_keeps_optimizer_state_and_counts_a_write() -> None:
    with make(options("device"), "adagrad") as embedding:
        train(embedding, [1, 2], grad=1.0)
        embedding.put([1, 9], torch.full((2, DIM), 3.0), 0)
        rows = {int(row["key"]): row for row in contents(embedding)}
        assert [rows[key]["values"].tolist()[:DIM] for key in (1, 9)] == [[3.0] * DIM] * 2
        assert [rows[key]["values"].tolist()[DIM:] for key in (1, 2)] == [[np.float32(1.1)] * DIM] * 2
        assert rows[9]["values"].tolist()[DIM:] == [np.float32(0.1)] * DIM
        assert {key: (row["updates"], row["step"]) for key, row in rows.items()} == {1: (2, 1), 2: (1, 1), 9: (1, 1)}


def test_rows_returned_are_copies() -> None:
    with make(options("device"), tables=1) as embedding:
        embedding.put([1], torch.ones(1, DIM))
        got, (_, _, iterated) = embedding.get([1]), next(iter(embedding))
        got += 5
        iterated += 5
        assert embedding.get([1]).tolist() == [[1.0] * DIM]


def test_keys_may_be_tensors_arrays_lists_or_one_number() -> None:
    with make(options("device"), tables=1) as embedding:
        expected = embedding.get(torch.tensor([1, -2]))
        for keys in ([1, -2], (1, -2), np.array([1, -2], np.int8), np.array([1, -2])):
            assert torch.equal(embedding.get(keys), expected)
        assert torch.equal(embedding.get(-2), expected[1])
        assert embedding.get([]).shape == (0, DIM)
        assert embedding.get([[1], [-2]]).shape == (2, 1, DIM)


@pytest.mark.parametrize("store", STORES)
def test_a_closed_embedding_says_so_and_closing_twice_is_allowed(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "sgd", tables=1) as embedding:
        train(embedding, [1])
    embedding.close()
    uses: list[Any] = [
        embedding.size,
        embedding.metrics,
        lambda: embedding(torch.tensor([1])),
        lambda: embedding.get([1]),
        lambda: embedding.put([1], torch.ones(1, DIM)),
        lambda: list(embedding),
        lambda: embedding.save_snapshot("s"),
        lambda: embedding.load_snapshot("s"),
        lambda: train(embedding, [1]),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match=r"'rows' was closed.*create it again"):
            use()


def test_an_embedding_closed_before_its_first_use_stays_closed(tmp_path: Path) -> None:
    embedding = make(options("device", tmp_path))
    embedding.close()
    with pytest.raises(ClosedError):
        embedding.size()
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("store", STORES)
def test_a_second_embedding_of_an_open_folder_raises_until_the_first_is_closed(tmp_path: Path, store: str) -> None:
    old = make(options(store, tmp_path), "adam")
    train(old, range(50))
    before = contents(old)
    new = make(options(store, tmp_path), "adam")
    with pytest.raises(
        tierbed.StoreError, match=r"use that one in both places, or call its close\(\), or give one of them"
    ):
        new.size()
    assert contents(old).tobytes() == before.tobytes()
    old.close()
    assert contents(new).tobytes() == before.tobytes()
    old.close()  # ends nothing of the new one's
    train(new, range(60))
    assert new.size() == 60
    new.close()


def test_an_embedding_that_is_dropped_keeps_its_rows(tmp_path: Path) -> None:
    embedding = make(options("ssd", tmp_path), "adam")
    train(embedding, range(50))
    before = contents(embedding)
    del embedding
    gc.collect()
    with make(options("ssd", tmp_path, open="error"), "adam") as again:
        assert contents(again).tobytes() == before.tobytes()


@pytest.mark.parametrize("store", STORES)
def test_two_embeddings_share_a_path_each_in_a_folder_of_its_name(tmp_path: Path, store: str) -> None:
    where = options(store, tmp_path)
    with make(where, "adam", "users") as users, make(where, "sgd", "items") as items:
        train(users, range(30))
        train(items, range(20, 60))
        saved = [contents(users), contents(items)]
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["items", "users"]
    with make(where, "adam", "users") as users, make(where, "sgd", "items") as items:
        assert [contents(users).tobytes(), contents(items).tobytes()] == [rows.tobytes() for rows in saved]


def test_embeddings_without_a_path_and_of_one_name_do_not_disturb_each_other() -> None:
    with make(options("device"), "sgd") as first, make(options("device"), "sgd") as second:
        train(first, [1, 2])
        assert (first.size(), second.size()) == (2, 0)


def test_options_are_read_not_kept_and_not_changed(tmp_path: Path) -> None:
    plain = dict(options("ssd", tmp_path))
    tables = [dict(table) for table in TABLES]
    before = copy.deepcopy((plain, tables))
    for name in ("a", "b"):
        with MultiTableEmbedding(name, DIM, torch.float32, torch.int64, tables, plain) as embedding:
            embedding.put([1], torch.ones(1, DIM), 0)
    assert (plain, tables) == before


def test_a_module_around_it_prints_it_and_has_a_state_dict() -> None:
    model = torch.nn.ModuleDict({"users": make(options("cached_host")), "net": torch.nn.Linear(DIM, 1)})
    assert "MultiTableEmbedding('rows', columns=[5], tables=3, store=cached_host_mem)" in repr(model)
    state = model.state_dict()
    rows = [f"users.rows.{field}" for field in sorted(FIELDS)]
    assert sorted(state) == ["net.bias", "net.weight", "users._extra_state", *rows, "users.shadow"]
    model.load_state_dict(state)
    assert len(list(model["users"].parameters())) == 1
    assert model.train().to("cpu")["users"].get([1], 0).shape == (1, DIM)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.rotated("store")
def test_an_optimizer_may_come_after_reading(tmp_path: Path, optimizer: str, store: str) -> None:
    """State of rows begins as the optimizer says, whenever it was added."""
    with make(options("device"), optimizer) as early:
        train(early, range(5))
        expected = contents(early)
    with make(options(store, tmp_path, open="error")) as late:
        assert late.get(range(5), 0).shape == (5, DIM)
        assert late.size() == 0
        attach(late, optimizer)
        train(late, range(5))
        assert contents(late).tobytes() == expected.tobytes()


def test_another_optimizer_of_the_same_rule_takes_over_unless_state_would_begin_elsewhere() -> None:
    with make(options("device"), "adagrad", tables=1) as embedding:
        train(embedding, [1], grad=0.0)
        attach(embedding, "adagrad", lr=1.0)
        before = embedding.get([2])
        train(embedding, [2], grad=1.0)
        torch.testing.assert_close(embedding.get([2]), before - 1 / 1.1**0.5)
        with pytest.raises(OptimizerError, match=r"0\.1.*4\.0.*train with that"):
            attach(embedding, "adagrad", initial_accumulator_value=4.0)
        train(embedding, [3], grad=1.0)
        assert contents(embedding)["values"][:, DIM:].max() == np.float32(1.1)


def test_the_optimizer_of_rows_cannot_be_exchanged_for_one_whose_state_they_lack() -> None:
    with make(options("device"), "adam") as embedding:
        train(embedding, [1, 2])
        before = contents(embedding)
        for other in ("sgd", "adagrad", "adamw"):
            with pytest.raises(OptimizerError, match=r"'rows' has rows of optimizer adam\b.*train with that"):
                attach(embedding, other)
        train(embedding, [])
        assert contents(embedding).tobytes() == before.tobytes()


def test_rows_put_without_an_optimizer_are_trained_from_its_initial_state() -> None:
    with make(options("device"), tables=1) as embedding:
        embedding.put([1, 2], torch.ones(2, DIM))
        attach(embedding, "sgd", weight_decay=0.0)  # it needs no state
        train(embedding, [1], grad=1.0)
        assert rows_by_key(embedding) == {(0, 1): [np.float32(0.9)] * DIM, (0, 2): [1.0] * DIM}


@pytest.mark.parametrize("store", STORES)
def test_pretrained_rows_are_trained_on_every_store(store: str, tmp_path: Path) -> None:
    put_first, put_last = make(options(store, tmp_path / "a"), tables=1), make(options("device"), "adagrad", tables=1)
    rows = torch.randn(300, DIM)
    for embedding in (put_first, put_last):
        embedding.put(torch.arange(300), rows)
    attach(put_first, "adagrad")
    for embedding in (put_first, put_last):
        train(embedding, list(range(0, 400, 7)))
    assert contents(put_first).tobytes() == contents(put_last).tobytes()
    put_first.close()


@pytest.mark.parametrize("store", STORES)
def test_pretrained_rows_of_a_closed_store_are_trained(store: str, tmp_path: Path) -> None:
    with make(options(store, tmp_path), tables=1) as embedding:
        embedding.put(torch.arange(300), torch.ones(300, DIM))
        embedding.save_snapshot("pretrained")
    with make(options(store, tmp_path), "adam", tables=1) as embedding:
        assert torch.equal(embedding.get([299]), torch.ones(1, DIM))
        train(embedding, list(range(300)))
        trained = contents(embedding)
        embedding.load_snapshot("pretrained")
        train(embedding, list(range(300)))
        assert contents(embedding)["values"].tobytes() == trained["values"].tobytes()


def test_training_without_an_optimizer_and_one_that_rows_cannot_follow_are_refused() -> None:
    with make(options("device"), tables=1) as embedding:
        with pytest.raises(OptimizerError, match=r"'rows' has no optimizer.*add_optimizer"):
            embedding.pin([Lookup(torch.tensor([1]))])
        optimizer = torch.optim.Adadelta(embedding.parameters())
        with pytest.raises(OptimizerError, match=r"Adadelta cannot update rows; use one of torch\.optim\.Adagrad"):
            embedding.attach(optimizer, optimizer.param_groups[0])
        assert embedding.size() == 0
        attach(embedding, "sgd")
        train(embedding, [1])
        assert embedding.size() == 1


def test_a_learning_rate_is_read_at_every_step() -> None:
    with make(options("device"), tables=1) as embedding:
        optimizer = attach(embedding, "sgd", weight_decay=0.0)
        embedding.put([1], torch.zeros(1, DIM))
        for rate in (0.5, 0.25):
            optimizer.param_groups[0]["lr"] = rate
            train(embedding, [1], grad=1.0)
        assert embedding.get([1]).tolist() == [[-0.75] * DIM]


def test_one_embedding_dim_is_a_number_and_several_are_columns() -> None:
    with pytest.raises(tierbed.OptionError, match=r"embedding_dim=\[2, 3\].*MultiTableMultiColumnEmbedding"):
        MultiTableEmbedding("rows", [2, 3], torch.float32, torch.int64, None, options("device"))  # type: ignore[arg-type]
    constants = [make_column_options(tierbed.make_constant_initializer(value)) for value in (1.0, 2.0)]
    columns = MultiTableMultiColumnEmbedding(
        "rows", (2, 3), torch.float32, torch.int64, [make_table_options(constants)], options("device")
    )
    assert columns.dim == 5
    assert columns.get([4]).tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0]]


def test_a_put_on_the_padding_id_is_not_lost_in_silence() -> None:
    with make(options("device"), tables=1, padding_idx=3) as embedding:
        with pytest.raises(InputError, match=r"padding_idx"):
            embedding.put([2, 3], torch.ones(2, DIM))
        assert embedding.size() == 0
