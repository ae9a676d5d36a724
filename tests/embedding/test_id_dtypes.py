"""Ids of a narrower dtype are those of the key type, others raise, and few are looked up as many, without a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tierbed as tb
from support.graphs import graph_of
from tierbed import EagerOptimizer, InputError, MultiTableEmbedding
from tierbed.engine.processors.cpu import GATHER_LIMIT

VALUES = [3, 4, 3]
WIDENED = {
    torch.int64: (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    torch.int32: (torch.uint8, torch.int8, torch.int16, torch.uint16),
    torch.uint64: (torch.uint8, torch.uint16, torch.uint32),
}
REFUSED = {
    torch.int64: (torch.uint64, torch.float32, torch.float16, torch.bool, torch.complex64),
    torch.int32: (torch.int64, torch.uint32, torch.uint64, torch.float32, torch.bool),
    torch.uint64: (torch.int8, torch.int32, torch.int64, torch.float64, torch.bool),
}
REMEDIES = {  # which keep the values
    (torch.int64, torch.uint64): r"ids\.view\(torch\.int64\)",
    (torch.uint64, torch.int64): r"ids\.view\(torch\.uint64\)",
    (torch.int32, torch.int64): r"key_type=torch\.int64; ids\.to\(torch\.int32\) would drop the high bits",
}


def embedding(key_type: torch.dtype = torch.int64) -> MultiTableEmbedding:
    return MultiTableEmbedding("rows", 4, torch.float32, key_type, None, tb.make_host_mem_store_options())


@pytest.mark.parametrize(("key_type", "dtype"), [(key, dtype) for key, dtypes in WIDENED.items() for dtype in dtypes])
def test_narrow_ids_are_those_of_the_key_type(key_type, dtype) -> None:
    rows, same = embedding(key_type), embedding(key_type)
    ids, narrow = torch.tensor(VALUES).to(key_type), torch.tensor(VALUES).to(dtype)
    for module, of_module in ((rows, narrow), (same, ids)):
        module.put(of_module, torch.ones(3, rows.dim))
        optimizer = EagerOptimizer(torch.optim.Adagrad(module.parameters(), lr=0.1), module)
        module.prefetch(of_module)
        module(of_module).square().sum().backward()
        optimizer.step()
    assert torch.equal(rows.get(narrow), same.get(ids))
    assert torch.equal(rows(narrow), same(ids))
    bags = torch.tensor([0, 2, 3])
    assert torch.equal(rows(narrow, offsets=bags, pooling="sum"), same(ids, offsets=bags, pooling="sum"))
    assert rows.delete(narrow) == 2


@pytest.mark.parametrize(("key_type", "dtype"), [(key, dtype) for key, dtypes in REFUSED.items() for dtype in dtypes])
def test_ids_that_the_key_type_cannot_hold_raise(key_type, dtype) -> None:
    rows, ids = embedding(key_type), torch.ones(3).to(dtype)
    remedy = REMEDIES.get((key_type, dtype), r"\w+")
    said = rf"of embedding 'rows'.*dtype {dtype}, but key_type is {key_type}; .*{remedy}"
    for use in (rows, rows.get, rows.delete, rows.prefetch):
        with pytest.raises(InputError, match=said):
            use(ids)


@pytest.mark.parametrize("ids", [VALUES, tuple(VALUES), 3, None, "3", torch.tensor(VALUES).numpy()], ids=repr)
def test_a_lookup_of_no_tensor_says_how_to_make_one(ids) -> None:
    rows = embedding()
    for use in (rows, rows.prefetch):
        said = rf"got {type(ids).__name__}.*give a torch\.Tensor of torch\.int64.*torch\.tensor\(ids, dtype="
        with pytest.raises(InputError, match=said):
            use(ids)


def test_a_graph_widens_them_as_a_loop_does() -> None:
    def build(graph: Any, ids: torch.Tensor) -> None:
        graph.rows(ids).square().sum().backward()

    trained = []
    for dtype in (torch.int64, torch.int32):
        rows = embedding()
        graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
        for _ in range(3):
            graph(torch.tensor(VALUES, dtype=dtype))
        trained.append(rows.get(VALUES))
    assert torch.equal(*trained)


KINDS = {
    "any few_ids": {"tables": [tb.make_table_options(tb.make_normal_initializer(0.0, 1.0))]},
    "40 few_ids": {"tables": [tb.make_table_options(tb.make_normal_initializer(0.0, 1.0), ids=40)]},
    "drops": {"tables": [tb.make_table_options(tb.make_normal_initializer(0.0, 1.0), ids=20, bad_ids="drop")]},
    "padding": {"tables": None, "padding_idx": 3},
    "bfloat16": {"tables": None, "dtype": torch.bfloat16},
    "result": {"tables": None, "output_dtype": torch.float16},
    "int32": {"tables": None, "key_type": torch.int32},
    "two tables": {"tables": [tb.make_normal_initializer(0.0, 1.0)] * 2},
}
few_ids = st.lists(st.integers(0, 39), min_size=1, max_size=12)


def counts_of(embedding: tb.MultiTableEmbedding) -> dict[str, float]:
    return {name: value for name, value in embedding.metrics().items() if name.startswith(("evaluate_", "train_"))}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(drawn=st.lists(few_ids, min_size=1, max_size=4), stored=few_ids)
def test_few_ids_are_looked_up_as_many(kind, drawn, stored) -> None:
    options = {"key_type": torch.int64, "dtype": torch.float32, "seed": 5} | KINDS[kind]
    few, many = (
        tb.MultiTableEmbedding(name, 3, store_options=tb.make_host_mem_store_options(), **options)
        for name in ("few", "many")
    )
    keys, key_type = torch.tensor(sorted(set(stored))), options["key_type"]
    tables = range(len(options["tables"] or [None]))
    keys = keys[keys < 20] if kind == "drops" else keys[keys != options.get("padding_idx", -1)]
    with few, many:
        for embedding in (few, many):
            for table in tables:
                embedding.put(keys.to(key_type), torch.randn(len(keys), 3, generator=torch.manual_seed(7)), table)
        for part in drawn:
            one = torch.tensor(part, dtype=key_type)
            table_ids = None if len(tables) == 1 else torch.arange(len(part)) % 2
            repeats = GATHER_LIMIT // len(part) + 1
            all_tables = None if table_ids is None else table_ids.repeat(repeats)
            assert torch.equal(few(one, table_ids), many(one.repeat(repeats), all_tables)[: len(part)])
        assert counts_of(few) == counts_of(many)


@pytest.mark.parametrize("count", [1, GATHER_LIMIT, GATHER_LIMIT + 1])
def test_an_id_beyond_the_last_raises_for_few_and_many(count) -> None:
    with tb.Embedding(10, 2, _weight=torch.ones(10, 2)) as embedding:
        assert embedding(torch.zeros(count, dtype=torch.int64)).sum() == 2 * count
        for bad in (10, -1):
            with pytest.raises(tb.InputError, match=f"{bad} is no id of table"):
                embedding(torch.tensor([*[0] * (count - 1), bad]))


@pytest.mark.parametrize("count", [3, GATHER_LIMIT + 1])
@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
def test_torchs_defaults_are_not_those_of_a_lookup(default, count) -> None:
    weight = torch.rand(9, 4)
    embedding, few_ids = tb.Embedding(9, 4, _weight=weight), torch.arange(count) % 9
    try:
        torch.set_default_device("meta" if default == "meta" else None)
        torch.set_default_dtype(torch.float32 if default == "meta" else getattr(torch, default))
        rows = embedding(few_ids)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rows, weight[few_ids])
