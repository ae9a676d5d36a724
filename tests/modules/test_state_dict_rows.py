"""A state_dict says which rows belong to it, and loading it warns where the embedding has others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.checkpoints import IDS, rating, steps
from support.embeddings import attach, make, train
from support.stores import options
from tierbed.engine import MultiTableEmbedding


class Model(nn.Module):
    """Rows and a dense part, without a graph."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows = rows
        self.mlp = nn.Linear(rows.dim, 1)


def model(path: Path | None, **more: Any) -> Model:
    embedding = make(options("host", path, **more), tables=1)
    attach(embedding, "adagrad")
    return Model(embedding)


def named(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(state["rows._extra_state"].tolist()))
    assert (found.pop("digest") is None) == (found["snapshot"] is None)
    return found


def test_the_best_epoch_s_state_with_the_last_rows_warns_and_its_remedy_mends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = model(tmp_path / "store")
    assert named(first.state_dict()) == {"step": None, "snapshot": None}
    train(first.rows, range(5))
    assert named(first.state_dict()) == {"step": 1, "snapshot": None}
    first.rows.save_snapshot("best")
    torch.save(first.state_dict(), tmp_path / "best.pt")
    assert named(first.state_dict()) == {"step": 1, "snapshot": "best"}
    first.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    assert not caplog.records
    train(first.rows, range(5))
    assert named(first.state_dict()) == {"step": 2, "snapshot": None}
    first.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    (record,) = caplog.records
    assert record.getMessage() == (
        "embedding 'rows' has rows of step 2, and the state is of step 1, snapshot 'best'; a state_dict holds no rows: "
        "load_snapshot('best') brings back its rows"
    )
    caplog.clear()
    first.rows.load_snapshot("best")
    first.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    first.rows.close()
    assert named(first.state_dict()) == {"step": 1, "snapshot": "best"}
    assert not caplog.records


def test_a_new_process_is_warned_when_it_uses_other_rows_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    first.rows.save_snapshot("best")
    held = copy.deepcopy(first.state_dict())
    train(first.rows, range(5))
    first.rows.close()
    for remedy in (False, True):
        again = model(tmp_path)
        again.load_state_dict(held)
        if remedy:
            again.rows.load_snapshot("best")
        assert not caplog.records
        again.rows.get([1], 0)
        again.rows.get([1], 0)
        assert [record.getMessage()[:40] for record in caplog.records] == (
            [] if remedy else ["embedding 'rows' has rows of step 2, and"]
        )
        caplog.clear()
        again.rows.close()


def test_a_snapshot_that_was_overwritten_since_is_no_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    first.rows.save_snapshot("best")
    held = first.state_dict()
    train(first.rows, range(5))
    first.rows.save_snapshot("best", overwrite=True)
    first.load_state_dict(held)
    assert "rows of step 2, snapshot 'best', and the state is of step 1, snapshot 'best'" in caplog.text
    assert "use graph.save and graph.load" in caplog.text
    assert "load_snapshot(" not in caplog.text


def test_a_snapshot_that_was_overwritten_at_the_same_step_is_told_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    first.rows.save_snapshot("best")
    held = first.state_dict()
    first.rows.save_snapshot("best", overwrite=True)
    first.load_state_dict(held)
    assert not caplog.records  # the same rows
    first.rows.put([1], torch.ones(1, first.rows.dim), 0)
    first.rows.save_snapshot("best", overwrite=True)
    first.load_state_dict(held)
    assert "rows of step 1, snapshot 'best', and the state is of step 1, snapshot 'best'" in caplog.text
    assert "load_snapshot(" not in caplog.text
    caplog.clear()
    by_name = {"step": 1, "snapshot": "best"}  # all that the first state dicts said
    held["rows._extra_state"] = torch.frombuffer(bytearray(json.dumps(by_name).encode()), dtype=torch.uint8)
    first.load_state_dict(held)
    assert not caplog.records


def test_other_rows_of_the_same_step_are_told_and_equal_ones_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    first.rows.save_snapshot("best")
    held = first.state_dict()
    first.rows.save_snapshot("epoch-1")
    first.load_state_dict(held)
    assert not caplog.records
    first.rows.put([1], torch.ones(1, first.rows.dim), 0)
    first.rows.save_snapshot("put")
    first.load_state_dict(held)
    assert "rows of step 1, snapshot 'put', and the state is of step 1, snapshot 'best'" in caplog.text


def test_a_state_dict_of_before_loads_strictly_and_one_that_says_nothing_readable_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    older = {name: value for name, value in first.state_dict().items() if not name.endswith("_extra_state")}
    first.load_state_dict(older)
    assert not caplog.records
    with pytest.raises(RuntimeError, match=r"Missing key.*rows\.shadow"):
        first.load_state_dict({name: value for name, value in older.items() if name != "rows.shadow"})
    first.load_state_dict({**older, "rows._extra_state": torch.zeros(3, dtype=torch.uint8)})
    assert "does not say which rows it belongs to" in caplog.text


def test_all_of_a_state_dict_is_tensors(tmp_path: Path) -> None:
    first = model(tmp_path)
    kept = {name: value.detach().cpu().clone() for name, value in first.state_dict().items()}
    first.load_state_dict(kept)


def test_a_graph_warns_once_and_one_that_loads_a_checkpoint_never(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:2])
    graph.rows.save_snapshot("two")
    held = copy.deepcopy(graph.state_dict())
    assert named(held) == {"step": 2, "snapshot": "two"}
    graph.save(tmp_path / "best")
    steps(graph, IDS[2:3])
    graph.load_state_dict(held)
    assert len(caplog.records) == 1
    caplog.clear()
    graph.load(tmp_path / "best")
    graph.rows.get([1], 0)
    graph.load(tmp_path / "best", optimizers=False)
    graph.rows.get([1], 0)
    assert not caplog.records


def test_a_graph_s_state_of_before_warns_as_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:2])
    held = copy.deepcopy(graph.state_dict())
    del held["rows._extra_state"]
    held["_extra_state"]["embeddings"] = {"rows": {"step": 2, "snapshot": "one"}}
    graph.load_state_dict(held)
    assert not caplog.records
    steps(graph, IDS[2:3])
    graph.load_state_dict(held)
    assert len(caplog.records) == 1
    assert "rows of step 3, and the state is of step 2, snapshot 'one'" in caplog.text
