"""What a table-batched embedding gives of its rows is a copy: writes into it are refused, reads are any tensor's."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tierbed.engine.errors import InputError
from tierbed.jagged import OptimType, TableBatchedEmbeddingBags

IDS, OFFSETS = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 3, 4])


def trained():
    tbe = TableBatchedEmbeddingBags([(4, 3, 3, 0)], optimizer=OptimType.ADAM)
    tbe(IDS, OFFSETS).sum().backward()
    return tbe


WRITES = {
    "fill_": lambda rows: rows.fill_(7.0),
    "copy_": lambda rows: rows.copy_(torch.ones_like(rows)),
    "data": lambda rows: rows.data.copy_(torch.ones_like(rows)),
    "detach": lambda rows: rows.detach().zero_(),
    "a row": lambda rows: rows[1].fill_(7.0),
    "an item": lambda rows: rows.__setitem__(1, 7.0),
    "a part": lambda rows: rows.split(2)[1].add_(1),
    "in place": lambda rows: rows.__iadd__(1),
    "init": nn.init.ones_,
    "out": lambda rows: torch.add(rows, 1, out=rows),
    "foreach": lambda rows: torch._foreach_add_([rows], 1.0),
    "a parameter": lambda rows: torch.optim.SGD([with_grad(nn.Parameter(rows))]).step(),
}


def with_grad(parameter):
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_what_is_split_is_not_lost_without_an_error(write):
    tbe = trained()
    before = tbe.split_embedding_weights(), tbe.split_optimizer_states()
    with pytest.raises(
        InputError,
        match=r"call embedding_of\('table-0'\)\.put\(torch\.arange\(4\), rows, 'table-0'\) or load_dense, or clone",
    ):
        WRITES[write](tbe.split_embedding_weights()[0])
    for state in tbe.split_optimizer_states()[0]:
        with pytest.raises(InputError, match=r"split_optimizer_states of 'tbe' .*'table-0' changes no row"):
            WRITES[write](state)
    torch.testing.assert_close((tbe.split_embedding_weights(), tbe.split_optimizer_states()), before)


def test_what_is_split_is_read_as_any_tensor(tmp_path):
    tbe = trained()
    [rows], [[momentum, _]] = tbe.split_embedding_weights(), tbe.split_optimizer_states()
    own = rows.clone()
    for made in (own, rows + 1, rows[rows > 0], copy.deepcopy(rows), pickle.loads(pickle.dumps(rows)), rows.sum(0)):
        assert type(made) is torch.Tensor
        made.zero_()
    own.copy_(rows)
    torch.save({"rows": rows, "momentum": momentum}, tmp_path / "rows.pt")
    assert torch.equal(torch.load(tmp_path / "rows.pt", weights_only=True)["rows"], own)
    assert rows.tolist() == own.tolist() == np.asarray(rows).tolist()
    assert repr(rows).startswith("ReadOnlyCopy([[-0.0100,")
    with pytest.raises(ValueError, match="read-only"):
        rows.numpy()[0] = 0
    assert f"{rows[0, 0]:.3f} {rows.sum():.1e}" == f"{own[0, 0]:.3f} {own.sum():.1e}"
    with torch.inference_mode():
        [also], [[state, _]] = tbe.split_embedding_weights(), tbe.split_optimizer_states()
        for one, other in ((also, rows), (state, momentum)):
            assert (repr(one), one.tolist(), float(one.sum())) == (repr(other), other.tolist(), float(other.sum()))
            assert torch.equal(one.clone()[1], other[1])
            with pytest.raises(InputError, match="clone"):
                one.zero_()
    tbe.embedding_of("table-0").put(torch.arange(4), rows * 2, "table-0")  # the remedy
    assert torch.equal(tbe.split_embedding_weights()[0], own * 2)


def test_what_is_split_is_read_by_compiled_code_and_not_written():
    rows = trained().split_embedding_weights()[0]
    linear, before = nn.Linear(3, 2), rows.clone()
    torch._dynamo.reset()
    made = torch.compile(linear, backend="eager", fullgraph=True)(rows)
    assert type(made) is torch.Tensor
    torch.testing.assert_close(made, linear(before))
    assert torch.equal(torch.compile(lambda given: given[1] * 2, backend="eager")(rows), before[1] * 2)
    for write in ("fill_", "an item", "in place"):
        with pytest.raises(InputError, match="clone"):
            torch.compile(WRITES[write], backend="eager")(rows)
