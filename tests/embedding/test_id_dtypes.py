"""Ids of a narrower integer dtype are the ids of the key type, as torch takes them; other dtypes raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierbed
from support.graphs import graph_of
from tierbed import EagerOptimizer, InputError, MultiTableEmbedding

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
CASES = [(key_type, dtype) for key_type, dtypes in WIDENED.items() for dtype in dtypes]


def embedding(key_type: torch.dtype = torch.int64) -> MultiTableEmbedding:
    return MultiTableEmbedding("rows", 4, torch.float32, key_type, None, tierbed.make_host_mem_store_options())


@pytest.mark.parametrize(("key_type", "dtype"), CASES)
def test_narrow_ids_are_those_of_the_key_type(key_type: torch.dtype, dtype: torch.dtype) -> None:
    rows, same = embedding(key_type), embedding(key_type)
    ids, narrow = torch.tensor(VALUES).to(key_type), torch.tensor(VALUES).to(dtype)
    rows.put(narrow, torch.ones(3, rows.dim))
    same.put(ids, torch.ones(3, rows.dim))
    for module, given in ((rows, narrow), (same, ids)):
        optimizer = EagerOptimizer(torch.optim.Adagrad(module.parameters(), lr=0.1), module)
        module.prefetch(given)
        module(given).square().sum().backward()
        optimizer.step()
    assert torch.equal(rows.get(narrow), same.get(ids))
    assert torch.equal(rows(narrow), same(ids))
    bags = torch.tensor([0, 2, 3])
    assert torch.equal(rows(narrow, offsets=bags, pooling="sum"), same(ids, offsets=bags, pooling="sum"))
    assert rows.delete(narrow) == 2


@pytest.mark.parametrize(("key_type", "dtype"), [(key, dtype) for key, dtypes in REFUSED.items() for dtype in dtypes])
def test_ids_that_the_key_type_cannot_hold_raise(key_type: torch.dtype, dtype: torch.dtype) -> None:
    rows = embedding(key_type)
    ids = torch.ones(3).to(dtype)
    for use in (rows, rows.get, rows.delete, rows.prefetch):
        with pytest.raises(InputError, match=rf"dtype {dtype}, but key_type is {key_type}; \w+"):
            use(ids)


@pytest.mark.parametrize("ids", [VALUES, tuple(VALUES), 3, None, "3", [0.5], [True]], ids=repr)
def test_a_lookup_of_no_tensor_says_how_to_make_one(ids: Any) -> None:
    rows = embedding()
    for use in (rows, rows.prefetch):
        with pytest.raises(InputError, match=r"give a torch\.Tensor of torch\.int64.*torch\.tensor\(ids, dtype="):
            use(ids)
    if ids in (None, "3", [0.5], [True]):
        for of_keys in (rows.get, rows.delete):
            with pytest.raises(InputError, match="whole numbers"):
                of_keys(ids)


def test_arrays_are_no_tensors_either() -> None:
    with pytest.raises(InputError, match=r"got ndarray.*torch\.tensor\(ids"):
        embedding()(torch.tensor(VALUES).numpy())


def test_a_graph_widens_them_as_a_loop_does() -> None:
    def build(graph: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = graph.rows(ids).square().sum()
        loss.backward()
        return loss

    trained = []
    for dtype in (torch.int64, torch.int32):
        rows = embedding()
        graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
        for _ in range(3):
            graph(torch.tensor(VALUES, dtype=dtype))
        trained.append(rows.get(VALUES))
    assert torch.equal(*trained)
