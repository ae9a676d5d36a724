"""The embedding module outside a graph: initial rows, lookups, rows read and written, handles, optimizers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierbed
from support import naive
from support.embeddings import DIM, TABLES, attach, contents, make, rows_by_key, train
from support.optimizers import few_optimizers
from support.rows import INITIALIZERS, SPECIAL_KEYS, same_bits
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, MultiTableMultiColumnEmbedding
from tierbed.embedding.tables.row_tensors import TENSOR_NAMES
from tierbed.engine.errors import ClosedError, GraphError, InputError, OptimizerError
from tierbed.engine.options.initializers import as_arrays, make_column_options, make_table_options
from tierbed.engine.options.lookup import Lookup


def test_without_tables_there_is_one_with_the_default_initializer_and_several_dims_are_columns() -> None:
    usual = {"dtype": torch.float32, "key_type": torch.int64, "tables": None, "store_options": options("device")}
    seven = {"type": "constant", "value": 7}
    assert MultiTableEmbedding("e", 4, **usual, default_initializer=seven).get([1, 2]).tolist() == [[7.0] * 4] * 2
    assert 0.045 < MultiTableEmbedding("e", 4, **usual).get(torch.arange(5000)).std().item() < 0.055
    with pytest.raises(tierbed.OptionError, match=r"embedding_dim=\[2, 3\].*MultiTableMultiColumnEmbedding"):
        MultiTableEmbedding("e", [2, 3], **usual)  # type: ignore[arg-type]
    constants = [make_column_options(tierbed.make_constant_initializer(value)) for value in (1.0, 2.0)]
    columns = MultiTableMultiColumnEmbedding("e", (2, 3), **{**usual, "tables": [make_table_options(constants)]})
    assert columns.dim == 5
    assert columns.get([4]).tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0]]


def test_lookups_take_ids_of_any_shape_and_add_the_width(tmp_path) -> None:
    with make(options("device"), tables=1) as embedding, torch.no_grad():
        for shape in [(), (0,), (4,), (2, 3), (2, 0, 3), (2, 1, 2, 3)]:
            ids = torch.arange(int(np.prod(shape))).reshape(shape)
            rows = embedding(ids)
            assert (rows.shape, rows.dtype) == ((*shape, DIM), torch.float32)
            assert torch.equal(rows.reshape(-1, DIM), embedding.get(ids.reshape(-1)))
    with make(options("device")) as embedding, torch.no_grad():
        ids = torch.arange(60).reshape(5, 12)
        for view in (ids.T, ids[:, ::5], ids[1:, 3:6].T, ids[0].expand(4, 12)):  # which are not contiguous
            whole, tables = view.contiguous(), torch.arange(view.shape[-1]) % 3
            assert torch.equal(embedding(view, tables), embedding(whole, tables.expand_as(whole).contiguous()))


def test_keys_may_be_tensors_arrays_lists_or_one_number_and_rows_are_copies() -> None:
    with make(options("device"), tables=1) as embedding:
        embedding.put([1], torch.ones(1, DIM))
        expected = embedding.get(torch.tensor([1, -2]))
        for keys in ([1, -2], (1, -2), np.array([1, -2], np.int8), np.array([1, -2])):
            assert torch.equal(embedding.get(keys), expected)
        assert torch.equal(embedding.get(-2), expected[1])
        assert embedding.get([]).shape == (0, DIM)
        assert embedding.get([[1], [-2]]).shape == (2, 1, DIM)
        got, (_, _, iterated) = embedding.get([1]), next(iter(embedding))
        got += 5
        iterated += 5
        assert embedding.get([1]).tolist() == [[1.0] * DIM]


@pytest.mark.parametrize("columns", [[3], [1, 4, 2], [5, 5]])
@pytest.mark.parametrize("store", STORES)
def test_unknown_rows_are_the_specified_function_of_seed_table_key_and_column(tmp_path, store, columns) -> None:
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
        for without in (torch.no_grad(), torch.inference_mode()):
            with without:
                read = embedding(torch.tensor([1, 2]))
            assert not read.requires_grad
            assert torch.equal(read, rows)
        assert embedding.size() == 0


@pytest.mark.parametrize("store", ["device", "cached_host"])
@given(
    puts=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 12), st.integers(0, 99)), max_size=40), max_size=6
    )
)
def test_put_get_size_and_iteration_agree_with_a_dict(store, puts) -> None:
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
def test_chunks_are_typed_and_in_the_order_of_iteration(key_type) -> None:
    with make(options("device"), key_type=key_type) as embedding:
        embedding.put(torch.arange(300).to(key_type), torch.rand(300, DIM), torch.arange(300) % 3)
        flat = []
        for tables, keys, rows in embedding.chunks():
            assert (tables.dtype, keys.dtype, rows.dtype) == (torch.int64, key_type, torch.float32)
            assert rows.shape == (len(tables), DIM)
            flat += zip(tables.tolist(), keys.tolist(), strict=True)
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


@pytest.mark.parametrize("store", STORES)
def test_a_closed_embedding_says_so_and_closing_twice_is_allowed(tmp_path, store) -> None:
    unused = make(options(store, tmp_path / "unused"))
    unused.close()
    with make(options(store, tmp_path), "sgd", tables=1) as embedding:
        train(embedding, [1])
    embedding.close()
    for use in (
        unused.size,
        embedding.size,
        embedding.metrics,
        lambda: embedding(torch.tensor([1])),
        lambda: embedding.get([1]),
        lambda: embedding.put([1], torch.ones(1, DIM)),
        lambda: list(embedding),
        lambda: embedding.save_snapshot("s"),
        lambda: embedding.load_snapshot("s"),
        lambda: train(embedding, [1]),
    ):
        with pytest.raises(ClosedError, match=r"'rows' was closed.*create it again"):
            use()
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("store", STORES)
def test_a_second_embedding_of_an_open_folder_raises_until_the_first_is_closed(tmp_path, store) -> None:
    old = make(options(store, tmp_path), "adam")
    train(old, range(50))
    before = contents(old)
    new = make(options(store, tmp_path), "adam")
    remedies = r"Use the open embedding in both places, or call its close\(\)\. .* give one embedding"
    with pytest.raises(tierbed.StoreError, match=remedies):
        new.size()
    assert contents(old).tobytes() == before.tobytes()
    old.close()
    assert contents(new).tobytes() == before.tobytes()
    old.close()  # ends nothing of the new one's
    train(new, range(60))
    assert new.size() == 60
    new.close()


def test_options_are_read_not_kept_and_not_changed(tmp_path) -> None:
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
    rows = [f"users.rows.{field}" for field in sorted(TENSOR_NAMES)]
    assert sorted(model.state_dict()) == ["net.bias", "net.weight", "users._extra_state", *rows, "users.shadow"]
    assert len(list(model["users"].parameters())) == 1
    assert model.train().to("cpu")["users"].get([1], 0).shape == (1, DIM)


@pytest.mark.parametrize("store", STORES)
@few_optimizers
@pytest.mark.rotated("store")
def test_an_optimizer_may_come_after_reading(tmp_path, optimizer, store) -> None:
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


def test_another_optimizer_takes_over_unless_state_would_begin_elsewhere_or_is_of_another_rule() -> None:
    with make(options("device"), "adagrad", tables=1) as embedding:
        train(embedding, [1], grad=0.0)
        attach(embedding, "adagrad", lr=1.0)
        before = embedding.get([2])
        train(embedding, [2], grad=1.0)
        torch.testing.assert_close(embedding.get([2]), before - 1 / 1.1**0.5)
        with pytest.raises(OptimizerError, match=r"0\.1.*4\.0.*train with the rows' optimizer"):
            attach(embedding, "adagrad", initial_accumulator_value=4.0)
        for other in ("sgd", "adam", "adamw"):
            with pytest.raises(OptimizerError, match=r"'rows' has rows of optimizer adagrad\b.*train with the rows'"):
                attach(embedding, other)
        train(embedding, [3], grad=1.0)
        assert contents(embedding)["values"][:, DIM:].max() == np.float32(1.1)


@pytest.mark.parametrize("store", STORES)
def test_rows_that_were_put_without_an_optimizer_are_trained_from_its_initial_state(store, tmp_path) -> None:
    path, rows, keys = tmp_path / "a", torch.randn(300, DIM), list(range(0, 400, 7))
    with make(options("device"), "adagrad", tables=1) as put_last:
        put_last.put(torch.arange(300), rows)
        train(put_last, keys)
        expected = contents(put_last)
    put_first = make(options(store, path), tables=1)
    put_first.put(torch.arange(300), rows)
    put_first.save_snapshot("pretrained")
    attach(put_first, "adagrad")
    train(put_first, keys)
    assert contents(put_first).tobytes() == expected.tobytes()
    put_first.load_snapshot("pretrained")
    put_first.close()
    with make(options(store, path), "adagrad", tables=1) as again:
        for _ in range(2):
            assert torch.equal(again.get([299]), rows[299:])
            train(again, keys)
            assert contents(again)["values"].tobytes() == expected["values"].tobytes()
            again.load_snapshot("pretrained")


def test_training_without_an_optimizer_and_one_that_rows_cannot_follow_are_refused() -> None:
    with make(options("device"), tables=1, padding_idx=3) as embedding:
        with pytest.raises(OptimizerError, match=r"'rows' has no optimizer.*add_optimizer"):
            embedding.pin([Lookup(torch.tensor([1]))])
        optimizer = torch.optim.Adadelta(embedding.parameters())
        with pytest.raises(OptimizerError, match=r"Adadelta cannot update rows; use one of torch\.optim\.Adagrad"):
            embedding.attach(optimizer, optimizer.param_groups[0])
        with pytest.raises(InputError, match=r"padding_idx"):  # or the row would be lost
            embedding.put([2, 3], torch.ones(2, DIM))
        assert embedding.size() == 0
        attach(embedding, "sgd")
        train(embedding, [1])
        assert embedding.size() == 1
