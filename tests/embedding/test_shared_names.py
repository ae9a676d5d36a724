"""A state_dict of an embedding that has several names holds its rows several times, or loads them several times."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.embeddings import contents, make, reloaded, train
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.embedding.tables.local_table import LocalTable
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from tierbed.snapshots import list_snapshots


@pytest.mark.parametrize("strict", [True, False])
def test_rows_that_differ_between_names_load_in_the_order_of_the_names_and_one_may_lack_them(strict) -> None:
    """As torch loads a shared parameter: the last name wins."""
    model, other, again, late = towers(), towers(), towers(), towers()
    model.write(range(5))
    other.write(range(8), 2.0)
    state = model.state_dict()
    again.load_state_dict({name: (other.state_dict() if name[0] == "c" else state)[name] for name in state}, strict)
    assert again.contents() == other.contents()
    lacking = {name: value for name, value in state.items() if not name.startswith("b.")}
    with pytest.raises(RuntimeError, match="Missing key"):
        late.load_state_dict(lacking)
    late.embedding.keep_rows()
    assert late.contents() == model.contents()


class Shared(nn.ModuleDict):
    """One embedding under several names."""

    def write(self, ids: range, value: float = 1.0) -> None:
        self.embedding.put(torch.tensor(ids), torch.full((len(ids), self.embedding.dim), value), 0)

    @property
    def embedding(self) -> MultiTableEmbedding:
        return next(one for one in self.modules() if isinstance(one, MultiTableEmbedding))

    def contents(self) -> bytes:
        return contents(self.embedding).tobytes()


def towers(path: Path | None = None, store: str = "host", **more: Any) -> Shared:
    rows = make(options(store, path, **more), "adagrad", tables=1)
    tower = {name: nn.ModuleDict({"rows": rows, "mlp": nn.Linear(rows.dim, 1)}) for name in "ab"}
    return Shared({**tower, "c": rows})


def collections() -> Shared:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(100, 4, "item"), EmbeddingBagConfig(None, 4, "any")])
    return Shared({"a": bags, "b": EmbeddingCollection([EmbeddingConfig(100, 4, "item")], name="ec", share=bags)})


def rows_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for name, value in state.items() if name.endswith(".rows.embedding")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the handle copied all rows, and how often it replaced them; it does both as before."""
    counted = {"copy_rows": 0, "load_tensors": 0}
    for name in counted:
        real = getattr(LocalTable, name)

        def count(self: Any, *given: Any, name: str = name, real: Any = real) -> Any:
            counted[name] += 1
            return real(self, *given)

        monkeypatch.setattr(LocalTable, name, count)
    return counted


@pytest.mark.parametrize("build", [towers, collections])
def test_all_names_have_one_copy_which_loads_once(build, calls) -> None:
    model = build()
    model.write(range(100))
    expected, state = model.contents(), model.state_dict()
    copies = rows_of(state)
    assert len(copies) > 1
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == calls["copy_rows"] == 1
    for given in (state, reloaded(state), {name: copy.deepcopy(value) for name, value in state.items()}):
        calls["load_tensors"] = 0
        again = build()
        assert again.load_state_dict(given, strict=True) == ([], [])
        assert calls["load_tensors"] == 1
        assert again.contents() == expected
        again.write(range(9), 3.0)
        again.load_state_dict(given)  # is another load, though of the same tensors
        assert again.contents() == expected


def test_a_state_has_the_rows_of_its_own_call() -> None:
    model = towers()
    model.write(range(5))
    one, two = model.state_dict(), model.state_dict()
    assert rows_of(one)[0] is not rows_of(two)[0]
    merged = model.state_dict()
    for change in (lambda: train(model.embedding, range(3)), lambda: model.write(range(7), 9.0)):
        change()
        model.state_dict(destination=merged, prefix="later.")  # into a state that has earlier rows
        last = [value for name, value in merged.items() if name.startswith("later.") and name.endswith("embedding")]
        assert torch.equal(last[-1], rows_of(model.state_dict())[0])
        model.state_dict(destination=merged)
        assert torch.equal(rows_of(merged)[0], last[-1])


def test_all_names_name_one_snapshot(tmp_path, calls) -> None:
    model = towers(tmp_path, "ssd", state_dict_snapshots=True)
    train(model.embedding, range(20))
    expected, state = model.contents(), reloaded(model.state_dict())
    assert len(list_snapshots(tmp_path / "rows" / "snapshots").snapshots) == 1
    assert rows_of(state) == []
    train(model.embedding, range(3))
    model.load_state_dict(state)
    assert model.contents() == expected
    assert calls["copy_rows"] == 0


def test_states_add_no_attribute_for_which_a_graph_is_traced_again() -> None:
    rows = make(options("host"), tables=1)
    rows.put([1], torch.ones(1, rows.dim), 0)
    names = set(vars(rows))
    rows.load_state_dict(rows.state_dict())
    rows.delete([1], 0)
    assert set(vars(rows)) == names
