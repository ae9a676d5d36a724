"""A state_dict of an embedding that has several names holds its rows several times, or loads them several times."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.embeddings import attach, contents, make, train
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.embedding.tables.local_table import LocalTable
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from tierbed.snapshots import list_snapshots


class Tower(nn.Module):
    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows, self.mlp = rows, nn.Linear(rows.dim, 1)


def towers(path: Path | None = None, store: str = "host", **more: Any) -> nn.ModuleDict:
    """One embedding under three names."""
    rows = make(options(store, path, **more), tables=1)
    attach(rows, "adagrad")
    return nn.ModuleDict({"a": Tower(rows), "b": Tower(rows), "c": rows})


def shared() -> nn.ModuleDict:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(100, 4, "item"), EmbeddingBagConfig(None, 4, "any")])
    sequences = EmbeddingCollection([EmbeddingConfig(100, 4, "item")], name="ec", share=bags)
    return nn.ModuleDict({"a": bags, "b": sequences})


def write(model: nn.ModuleDict, ids: range, value: float = 1.0) -> None:
    rows = embedding_of(model)
    rows.put(torch.tensor(ids), torch.full((len(ids), rows.dim), value), 0)


def embedding_of(model: nn.ModuleDict) -> MultiTableEmbedding:
    return next(one for one in model.modules() if isinstance(one, MultiTableEmbedding))


def rows_of(state: dict[str, Any], field: str = "embedding") -> list[torch.Tensor]:
    return [value for name, value in state.items() if name.endswith(f".rows.{field}")]


def of_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the handle copied all rows, and how often it replaced them; it does both as before."""
    counted = {"tensors": 0, "load_tensors": 0}
    for name in counted:
        real = getattr(LocalTable, name)

        def count(self: Any, *given: Any, name: str = name, real: Any = real) -> Any:
            counted[name] += 1
            return real(self, *given)

        monkeypatch.setattr(LocalTable, name, count)
    return counted


@pytest.mark.parametrize("build", [towers, shared])
def test_all_names_have_one_copy_which_loads_once(build: Callable[[], nn.ModuleDict], calls: dict[str, int]) -> None:
    model = build()
    write(model, range(100))
    expected = contents(embedding_of(model)).tobytes()
    state = model.state_dict()
    copies = rows_of(state)
    assert len(copies) > 1
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == calls["tensors"] == 1
    for given in (state, of_file(state), {name: copy.deepcopy(value) for name, value in state.items()}):
        calls["load_tensors"] = 0
        again = build()
        assert again.load_state_dict(given, strict=True) == ([], [])
        assert calls["load_tensors"] == 1
        assert contents(embedding_of(again)).tobytes() == expected
        write(again, range(9), 3.0)
        again.load_state_dict(given)  # is another load, though of the same tensors
        assert contents(embedding_of(again)).tobytes() == expected


def test_a_state_has_the_rows_of_its_own_call() -> None:
    model = towers()
    write(model, range(5))
    one, two = model.state_dict(), model.state_dict()
    assert rows_of(one)[0] is not rows_of(two)[0]
    merged = model.state_dict()
    for change in (lambda: train(embedding_of(model), range(3)), lambda: write(model, range(7), 9.0)):
        change()
        model.state_dict(destination=merged, prefix="later.")  # into a state that has earlier rows
        last = [value for name, value in merged.items() if name.startswith("later.") and name.endswith("embedding")]
        assert torch.equal(last[-1], rows_of(model.state_dict())[0])
        model.state_dict(destination=merged)
        assert torch.equal(rows_of(merged)[0], last[-1])


@pytest.mark.parametrize("strict", [True, False])
def test_rows_that_differ_between_names_load_in_the_order_of_the_names(strict: bool) -> None:
    """As torch loads a shared parameter: the last name wins."""
    model, other = towers(), towers()
    write(model, range(5))
    write(other, range(8), 2.0)
    state = model.state_dict() | {name: value for name, value in other.state_dict().items() if name.startswith("c")}
    again = towers()
    again.load_state_dict(state, strict=strict)
    assert contents(embedding_of(again)).tobytes() == contents(embedding_of(other)).tobytes()


def test_a_state_that_lacks_a_name_loads_by_the_others() -> None:
    model = towers()
    write(model, range(5))
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("b.")}
    again = towers()
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict(state)
    embedding_of(again).keep_rows()
    assert contents(embedding_of(again)).tobytes() == contents(embedding_of(model)).tobytes()


def test_all_names_name_one_snapshot(tmp_path: Path, calls: dict[str, int]) -> None:
    model = towers(tmp_path, "ssd", state_dict_snapshots=True)
    train(embedding_of(model), range(20))
    expected = contents(embedding_of(model)).tobytes()
    state = of_file(model.state_dict())
    assert len(list_snapshots(tmp_path / "rows" / "snapshots").snapshots) == 1
    assert rows_of(state) == []
    train(embedding_of(model), range(3))
    model.load_state_dict(state)
    assert contents(embedding_of(model)).tobytes() == expected
    assert calls["tensors"] == 0


def test_states_add_no_attribute_for_which_a_graph_is_traced_again() -> None:
    rows = make(options("host"), tables=1)
    rows.put([1], torch.ones(1, rows.dim), 0)
    names = set(vars(rows))
    rows.load_state_dict(rows.state_dict())
    rows.delete([1], 0)
    assert set(vars(rows)) == names
