"""A lookup of few ids makes no batch. It has the bits, the errors and the metrics of one that does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tierbed as tb
from tierbed.engine.processors.cpu import FEW

KINDS = {
    "any ids": {"tables": [tb.make_table_options(tb.make_normal_initializer(0.0, 1.0))]},
    "40 ids": {"tables": [tb.make_table_options(tb.make_normal_initializer(0.0, 1.0), ids=40)]},
    "drops": {"tables": [tb.make_table_options(tb.make_normal_initializer(0.0, 1.0), ids=20, bad_ids="drop")]},
    "padding": {"tables": None, "padding_idx": 3},
    "bfloat16": {"tables": None, "dtype": torch.bfloat16},
    "result": {"tables": None, "output_dtype": torch.float16},
    "int32": {"tables": None, "key_type": torch.int32},
    "two tables": {"tables": [tb.make_normal_initializer(0.0, 1.0)] * 2},
}
ids = st.lists(st.integers(0, 39), min_size=1, max_size=12)


def metrics(embedding: tb.MultiTableEmbedding) -> dict[str, float]:
    return {name: value for name, value in embedding.metrics().items() if name.startswith(("evaluate_", "train_"))}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(drawn=st.lists(ids, min_size=1, max_size=4), stored=ids)
def test_few_ids_are_looked_up_as_many(kind: str, drawn: list[list[int]], stored: list[int]) -> None:
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
            repeats = FEW // len(part) + 1
            all_tables = None if table_ids is None else table_ids.repeat(repeats)
            assert torch.equal(few(one, table_ids), many(one.repeat(repeats), all_tables)[: len(part)])
        assert metrics(few) == metrics(many)


@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
def test_an_id_beyond_the_last_raises_for_few_and_many(count: int) -> None:
    with tb.Embedding(10, 2, _weight=torch.ones(10, 2)) as embedding:
        assert embedding(torch.zeros(count, dtype=torch.int64)).sum() == 2 * count
        for bad in (10, -1):
            with pytest.raises(tb.InputError, match=f"{bad} is no id of table"):
                embedding(torch.tensor([*[0] * (count - 1), bad]))


@pytest.mark.parametrize("count", [3, FEW + 1])
@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
def test_torchs_defaults_are_not_those_of_a_lookup(default: str, count: int) -> None:
    weight = torch.rand(9, 4)
    embedding, ids = tb.Embedding(9, 4, _weight=weight), torch.arange(count) % 9
    try:
        torch.set_default_device("meta" if default == "meta" else None)
        torch.set_default_dtype(torch.float32 if default == "meta" else getattr(torch, default))
        rows = embedding(ids)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rows, weight[ids])
