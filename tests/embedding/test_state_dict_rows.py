"""A state_dict holds the rows of an embedding, or names a snapshot of them; loading it brings them back, or raises."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.checkpoints import IDS, rating, steps
from support.embeddings import attach, contents, make, train
from support.stores import STORES, options
from support.two_towers import IDS as BATCHES
from support.two_towers import TwoTowers, losses, optimizer_of, stores
from tierbed import MultiTableEmbedding
from tierbed.engine.errors import ClosedError, InputError, OptionError, SnapshotError, StoreError
from tierbed.snapshots import list_snapshots
from tierbed.snapshots.control.client import request_save
from tierbed.snapshots.store.folder_state import FolderState


class Model(nn.Module):
    """Rows and a dense part, without a graph."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows = rows
        self.mlp = nn.Linear(rows.dim, 1)


def model(path: Path | None, store: str = "host", optimizer: str = "adagrad", **more: Any) -> Model:
    arguments = {"dtype": more.pop("dtype")} if "dtype" in more else {}
    embedding = make(options(store, path, **more), tables=1, **arguments)
    attach(embedding, optimizer)
    return Model(embedding)


def named(state: dict[str, Any]) -> dict[str, Any]:
    assert state["rows._extra_state"].shape == (1024,)
    found: dict[str, Any] = json.loads(bytes(state["rows._extra_state"].tolist()))
    assert (found.pop("digest") is None) == (found["snapshot"] is None)
    del found["version"]
    return found


def reloaded(state: dict[str, Any]) -> Any:
    """A state as a file of torch brings it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def of_states(path: Path) -> list[str]:
    names = (one.name for one in list_snapshots(path / "rows" / "snapshots").snapshots)
    return [name for name in names if name.startswith("state_dict-")]


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adagrad", torch.bfloat16),
        ("rowwise", torch.float16),
        ("sgd", torch.float32),
        ("catch-up", torch.float32),  # whose rule takes no others
    ],
)
def test_rows_without_a_folder_are_in_the_state_and_load_into_any_store(
    tmp_path: Path, optimizer: str, dtype: torch.dtype
) -> None:
    first = model(None, "device", optimizer, dtype=dtype)
    train(first.rows, range(20))
    train(first.rows, range(5, 9))
    stored = reloaded(first.state_dict())
    assert stored["rows.rows.embedding"].shape == (20, first.rows.dim)
    assert stored["rows.rows.embedding"].dtype == dtype
    train(first.rows, range(4, 12))
    expected = contents(first.rows).tobytes()
    for store in STORES:
        again = model(tmp_path / store, store, optimizer, dtype=dtype)
        again.load_state_dict(stored)
        train(again.rows, range(4, 12))
        assert contents(again.rows).tobytes() == expected
        train(again.rows, range(30))
        again.load_state_dict(stored)  # into one that was used
        train(again.rows, range(4, 12))
        assert contents(again.rows).tobytes() == expected
        again.rows.close()
        resumed = model(tmp_path / store, store, optimizer, dtype=dtype, open="error")
        assert contents(resumed.rows).tobytes() == expected


def test_a_state_of_an_embedding_before_its_optimizer_waits_for_it() -> None:
    first = model(None)
    train(first.rows, range(5))
    stored = reloaded(first.state_dict())
    train(first.rows, range(3))
    again = Model(make(options("host"), tables=1))
    again.load_state_dict(stored)
    attach(again.rows, "adagrad")
    train(again.rows, range(3))
    assert contents(again.rows).tobytes() == contents(first.rows).tobytes()


def test_rows_of_a_state_that_do_not_fit_are_told_and_nothing_goes_on_with_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = model(None)
    train(first.rows, range(5))
    stored = reloaded(first.state_dict())
    other = model(None, dtype=torch.float16)
    train(other.rows, range(5))
    with pytest.raises(RuntimeError, match="rows of embedding 'rows' cannot be loaded: the state holds rows of dtype"):
        other.load_state_dict(stored)
    for use in (lambda: other.rows.get([1], 0), lambda: train(other.rows, [1]), other.rows.size):
        with pytest.raises(SnapshotError, match="cannot be loaded"):
            use()
    state = {name[5:]: value for name, value in stored.items() if name.startswith("rows.")}
    with caplog.at_level("WARNING", "tierbed"):
        other.rows.load_state_dict(state, strict=False)
    assert "cannot be loaded" in caplog.text
    assert "its rows stay" in caplog.text
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        other.rows.load_state_dict(state)
    other.rows.keep_rows()
    assert other.rows.size() == 5
    for broken, said in (
        ({"rows.rows.step": stored["rows.rows.step"][:2]}, r"rows.step is torch.int64 \[2\]"),
        ({"rows.rows.updates": torch.zeros(5, dtype=torch.int64)}, "updates=0"),
        ({"rows.rows.description": torch.zeros(3, dtype=torch.uint8)}, "description cannot be read"),
        ({"rows.rows.embedding": stored["rows.rows.embedding"].half()}, "is torch.float16"),
        ({"rows.rows.key": torch.tensor([1, 2, 3, 4, 2])}, "a row is in them twice"),
        ({"rows.rows.updates": torch.tensor([1, 1, 1, 1, -1])}, r"rows\.updates has numbers from -1 to 1"),
        ({"rows.rows.table": torch.tensor([0, 0, 0, 0, 2**32])}, r"rows\.table has numbers from 0 to 4294967296"),
    ):
        with pytest.raises(RuntimeError, match=said):
            first.load_state_dict({**stored, **broken})
    first.load_state_dict(stored)
    assert first.rows.size() == 5


@pytest.mark.parametrize("store", ["host", "cached_host", "ssd"])
def test_an_embedding_with_a_folder_names_a_snapshot_that_loads(tmp_path: Path, store: str) -> None:
    first = model(tmp_path, store, state_dict_snapshots=True)
    assert named(first.state_dict()) == {"step": 0, "snapshot": None}
    states, rows = [], []
    for step in (1, 2, 3):
        train(first.rows, range(step, step + 5))
        states.append(reloaded(first.state_dict()))
        rows.append(contents(first.rows).tobytes())
        assert named(first.state_dict()) == named(states[-1])  # one snapshot from the same step
    assert of_states(tmp_path) == [named(state)["snapshot"] for state in states]
    assert first.rows.last_snapshot is None
    for number in (0, 2, 1):
        first.load_state_dict(states[number])
        assert contents(first.rows).tobytes() == rows[number]
    first.rows.prune_snapshots(1)
    first.rows.close()
    again = model(tmp_path, store)
    again.load_state_dict(states[0])
    assert contents(again.rows).tobytes() == rows[0]
    for _ in range(2):  # and the next run knows that it has these rows
        again.rows.close()
        again = model(tmp_path, store, state_dict_snapshots=True)
        assert named(again.state_dict()) == named(states[0])
    assert len(of_states(tmp_path)) == 3


def test_a_state_s_snapshot_leaves_the_user_s_chain_as_it_is(tmp_path: Path) -> None:
    first = model(tmp_path, state_dict_snapshots=True)
    train(first.rows, range(50))
    first.rows.save_snapshot("full")
    train(first.rows, range(3))
    first.rows.save_snapshot("first", kind="incremental")
    train(first.rows, range(4))
    stored = first.state_dict()
    train(first.rows, range(2))
    first.rows.save_snapshot("second", kind="incremental")
    found = list_snapshots(tmp_path / "rows/snapshots").snapshots
    chains = {one.name: [link.name for link in one.chain] for one in found}
    name = named(stored)["snapshot"]
    assert chains["second"] == ["full", "first", "second"]
    assert chains[name] == [name]
    assert first.rows.last_snapshot == "second"
    for _ in range(2):  # and the user can replace what comes before a state
        first.rows.save_snapshot("latest", overwrite=True)
        train(first.rows, range(2))
        first.state_dict()
    saving = first.rows.save_snapshot("aside", background=True)
    train(first.rows, range(3))
    stored, rows = first.state_dict(), contents(first.rows).tobytes()
    assert saving is not None
    saving.wait()
    train(first.rows, range(3))
    first.load_state_dict(stored)
    assert contents(first.rows).tobytes() == rows


def test_rows_of_another_timeline_at_the_same_step_are_not_those_of_a_state(tmp_path: Path) -> None:
    first = model(tmp_path / "a", state_dict_snapshots=1)
    train(first.rows, range(5))
    first.rows.save_snapshot("one")
    train(first.rows, range(5))
    stored = reloaded(first.state_dict())
    for _ in range(2):  # so that its snapshot is removed
        train(first.rows, range(5))
        first.state_dict()
    first.rows.load_snapshot("one")
    others = first, model(tmp_path / "b", state_dict_snapshots=True), model(None)
    for other in others:
        for _ in range(2 - (other is first)):
            train(other.rows, range(20, 40))
        with pytest.raises(SnapshotError, match=r"rows of step 2.*is of other rows of step 2, snapshot 'state_dict-"):
            other.load_state_dict(stored)


WRITES: dict[str, Callable[[MultiTableEmbedding], Any]] = {
    "put": lambda rows: rows.put([1], torch.ones(1, rows.dim), 0),
    "delete": lambda rows: rows.delete([1], 0),
    "selection": lambda rows: rows.load_snapshot("mine", where=lambda tables, keys: keys < 2),
    "tensors": lambda rows: rows.load_state_dict(state_of_ones()),
}


def state_of_ones() -> dict[str, Any]:
    other = make(options("host"), "adagrad", tables=1)
    train(other, range(50, 55))
    return other.state_dict()


@pytest.mark.parametrize("kind", [*WRITES])
@pytest.mark.parametrize("on", [True, False])
def test_rows_that_were_written_at_the_step_of_a_state_are_replaced(tmp_path: Path, kind: str, on: bool) -> None:
    first = model(tmp_path, state_dict_snapshots=on)
    train(first.rows, range(5))
    first.rows.save_snapshot("mine")
    stored, rows = reloaded(first.state_dict()), contents(first.rows).tobytes()
    WRITES[kind](first.rows)
    written, then = reloaded(first.state_dict()), contents(first.rows).tobytes()
    assert then != rows
    first.load_state_dict(stored)
    assert contents(first.rows).tobytes() == rows
    if on:
        first.load_state_dict(written)
        assert contents(first.rows).tobytes() == then
    else:  # no snapshot has them
        assert named(written) == {"step": 1, "snapshot": None}
        with pytest.raises(SnapshotError, match="other rows of step 1, which names no snapshot"):
            first.load_state_dict(written)


def test_rows_that_were_closed_are_known_to_be_those_of_a_state(tmp_path: Path) -> None:
    def marker() -> dict[str, Any]:
        found = FolderState(tmp_path / "rows").clean_marker
        assert found is not None
        return found

    first = model(tmp_path)
    train(first.rows, range(5))
    first.state_dict()
    train(first.rows, range(5))
    first.rows.close()
    again = model(tmp_path)
    again.rows.size()
    stored = reloaded(again.state_dict())
    again.rows.close()
    for _ in range(2):
        third = model(tmp_path)
        before = third.state_dict()
        third.load_state_dict(stored)
        third.rows.size()
        third.load_state_dict(stored)
        third.load_state_dict(before)
        third.rows.close()
    third = model(tmp_path)
    third.rows.put([1], torch.ones(1, third.rows.dim), 0)
    third.rows.close()
    for state in stored, before:
        last = model(tmp_path)
        last.load_state_dict(state)
        with pytest.raises(SnapshotError, match=r"which names no snapshot|was made before the embedding was used"):
            last.rows.size()


def test_a_state_of_no_rows_deletes_them_or_raises(tmp_path: Path) -> None:
    first = model(tmp_path / "on", state_dict_snapshots=True)
    empty = reloaded(first.state_dict())
    train(first.rows, range(5))
    stored, rows = reloaded(first.state_dict()), contents(first.rows).tobytes()
    first.load_state_dict(empty)
    assert first.rows.size() == 0
    first.load_state_dict(stored)
    assert contents(first.rows).tobytes() == rows
    first.rows.close()
    other = model(tmp_path / "off")
    before = reloaded(other.state_dict())  # of an embedding that was not used yet
    train(other.rows, range(5))
    old = {**before, "rows._extra_state": torch.tensor([*b'{"step":null,"snapshot":null}'], dtype=torch.uint8)}
    other.load_state_dict(old)  # says nothing about rows
    assert other.rows.size() == 5
    for state in empty, before:
        with pytest.raises(SnapshotError, match=r'is of no rows.*open="fresh"'):
            other.load_state_dict(state)
        other.load_state_dict(old)
        with pytest.raises(SnapshotError, match=r'is of no rows.*open="fresh"'):
            other.rows.size()


def test_the_state_that_a_framework_asks_for_before_it_loads_leaves_what_it_loads(tmp_path: Path) -> None:
    first = model(tmp_path, state_dict_snapshots=1)
    train(first.rows, range(5))
    first.rows.save_snapshot("best")
    train(first.rows, range(5))
    stored, rows = reloaded(first.state_dict()), contents(first.rows).tobytes()
    train(first.rows, range(5))
    first.rows.close()
    first = model(tmp_path, state_dict_snapshots=1)
    first.state_dict()
    first.load_state_dict(stored)
    assert contents(first.rows).tobytes() == rows
    first.rows.load_snapshot("best")
    best, rows = reloaded(first.state_dict()), contents(first.rows).tobytes()  # a link, of an old snapshot
    for name in of_states(tmp_path):
        os.utime(tmp_path / "rows/snapshots" / name, (0, int(name == named(best)["snapshot"])))
    train(first.rows, range(5))
    first.state_dict()
    names = of_states(tmp_path)
    first.state_dict()
    assert of_states(tmp_path) == names
    first.rows.save_snapshot("best", overwrite=True)
    first.load_state_dict(best)
    assert contents(first.rows).tobytes() == rows


def test_a_number_of_snapshots_of_states_is_kept_and_the_log_says_what_cannot_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tierbed")
    first = model(tmp_path, state_dict_snapshots=2)
    states = []
    for step in range(4):
        train(first.rows, range(step, step + 5))
        states.append(reloaded(first.state_dict()))
    assert of_states(tmp_path) == [named(state)["snapshot"] for state in states[1:]]
    assert [r.args[2] for r in caplog.records if "cannot be loaded" in r.getMessage()] == [1]  # type: ignore[index]
    with pytest.raises(SnapshotError, match=r"rows of step 4.*of step 1, snapshot 'state_dict-.*which is missing"):
        first.load_state_dict(states[0])
    first.load_state_dict(states[1])
    for value in (0, -1, 1.5, "all"):
        with pytest.raises(OptionError, match=f"state_dict_snapshots={value!r}"):
            options("host", tmp_path, state_dict_snapshots=value)
    with pytest.raises(OptionError, match="holds the rows themselves"):
        options("host", None, state_dict_snapshots=True)


def test_without_the_option_the_first_state_warns_and_one_of_other_rows_raises_until_it_is_settled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = model(tmp_path / "store")
    train(first.rows, range(5))
    stored = reloaded(first.state_dict())
    first.state_dict()
    assert ["state_dict_snapshots=True" in record.getMessage() for record in caplog.records] == [True]
    assert named(stored) == {"step": 1, "snapshot": None}
    first.load_state_dict(stored)  # the rows are of that step
    train(first.rows, range(5))
    with pytest.raises(
        SnapshotError, match=r"rows of step 2.*of step 1, which names no snapshot.*state_dict_snapshots"
    ):
        first.load_state_dict(stored)
    for use in (
        lambda: first.rows.get([1], 0),
        lambda: first.rows(torch.tensor([1])),
        lambda: train(first.rows, [1]),
        lambda: first.rows.save_snapshot("s"),
        lambda: first.rows.metrics(),
    ):
        with pytest.raises(SnapshotError, match="keep_rows"):
            use()
    assert named(first.state_dict()) == named(stored)  # and not the existing rows
    first.rows.keep_rows()
    train(first.rows, [1])
    first.rows.load_state_dict(
        {name[5:]: value for name, value in stored.items() if name.startswith("rows.")}, strict=False
    )
    assert "its rows stay" in caplog.text
    train(first.rows, [1])
    first.rows.save_snapshot("mine")
    with pytest.raises(SnapshotError):
        first.load_state_dict(stored)
    first.rows.load_snapshot("mine")
    train(first.rows, [1])


def test_a_new_process_raises_at_the_first_use_of_other_rows(tmp_path: Path) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    stored = reloaded(first.state_dict())
    train(first.rows, range(5))
    first.rows.close()
    again = model(tmp_path)
    again.load_state_dict(stored)
    for _ in range(2):
        with pytest.raises(SnapshotError, match="rows of step 2"):
            train(again.rows, [1])
    again.rows.keep_rows()
    train(again.rows, [1])


def test_a_user_s_snapshot_that_a_state_names_is_loaded_while_it_has_those_rows(tmp_path: Path) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    first.rows.save_snapshot("best")
    stored, rows = reloaded(first.state_dict()), contents(first.rows).tobytes()
    assert named(stored) == {"step": 1, "snapshot": "best"}
    first.rows.put([1], torch.ones(1, first.rows.dim), 0)
    first.rows.save_snapshot("put")
    first.load_state_dict(stored)  # the step is the same, the rows are not
    assert contents(first.rows).tobytes() == rows
    train(first.rows, range(5))
    first.rows.save_snapshot("best", overwrite=True)
    with pytest.raises(SnapshotError, match="'best', which is missing, or has other rows"):
        first.load_state_dict(stored)


def test_a_state_without_our_entry_or_with_one_that_says_nothing_raises(tmp_path: Path) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    stored = first.state_dict()
    lacking = {name: value for name, value in stored.items() if not name.endswith("_extra_state")}
    with pytest.raises(RuntimeError, match=r"Missing key.*rows\._extra_state"):
        first.load_state_dict(lacking)
    for load in (lambda: None, lambda: first.load_state_dict(lacking, strict=False)):  # which torch does not pass on
        load()
        with pytest.raises(SnapshotError, match="names none"):
            train(first.rows, [1])
        first.rows.keep_rows()
        train(first.rows, [1])
    first.rows.load_state_dict({"shadow": stored["rows.shadow"]}, strict=False)
    train(first.rows, [1])
    with pytest.raises(SnapshotError, match="names none"):
        first.load_state_dict({**stored, "rows._extra_state": torch.zeros(3, dtype=torch.uint8)})


def test_where_a_load_stops_no_embedding_of_the_model_goes_on(tmp_path: Path) -> None:
    towers = TwoTowers(stores("host folder", tmp_path))
    optimizer = optimizer_of(towers)
    towers.users.save_snapshot("mine")  # of no rows
    list(losses(towers, optimizer, BATCHES[:2]))
    whole = reloaded(towers.state_dict())
    list(losses(towers, optimizer, BATCHES[2:4]))
    stored = reloaded(towers.state_dict())
    list(losses(towers, optimizer, BATCHES[4:6]))
    name = json.loads(bytes(stored["users._extra_state"].tolist()))["snapshot"]
    shutil.rmtree(tmp_path / "users/snapshots" / name)
    with pytest.raises(SnapshotError, match=r"rows of step 6.*of step 4"):
        towers.load_state_dict(stored)  # that of items comes after it
    for use in (lambda: towers.items.get([1], 0), lambda: list(losses(towers, optimizer, BATCHES[:1]))):
        with pytest.raises(SnapshotError, match=r"a load stopped at embedding 'users'|rows of step 6"):
            use()
    folders = [tmp_path / "users", tmp_path / "items"]
    for several in [], folders:  # and no other process saves them
        with pytest.raises(StoreError, match=r"embedding 'users' has other rows.*keep_rows\(\)"):
            request_save(folders[0], "x", stores=several)
    towers.load_state_dict(whole)
    list(losses(towers, optimizer, BATCHES[2:3]))
    with pytest.raises(SnapshotError):
        towers.load_state_dict(stored)
    for one in towers.users, towers.items:
        one.keep_rows()
    list(losses(towers, optimizer, BATCHES[3:4]))


def test_rows_that_are_closed_load_no_state(tmp_path: Path) -> None:
    first = model(tmp_path, state_dict_snapshots=True)
    train(first.rows, range(5))
    stored = first.state_dict()
    train(first.rows, range(5))
    first.rows.close()
    with pytest.raises(ClosedError):
        first.load_state_dict(stored)


def test_a_state_of_a_long_name_has_the_size_of_others(tmp_path: Path) -> None:
    first = model(tmp_path)
    train(first.rows, range(5))
    first.rows.save_snapshot('"' * 200)
    assert named(first.state_dict())["snapshot"] == '"' * 200


def test_what_cannot_be_copied_says_what_can(tmp_path: Path) -> None:
    whole = model(tmp_path)
    said = r"graph.save, save_checkpoint or state_dict\(\).*state_dict_snapshots=True"
    for copies in (copy.deepcopy, lambda one: torch.save(one, io.BytesIO()), torch.optim.swa_utils.AveragedModel):
        with pytest.raises(StoreError, match=said):
            copies(whole)


def test_states_are_filled_and_loaded_without_a_second_copy_of_all_rows() -> None:
    first, again = model(None), model(None)
    train(first.rows, range(300_000))
    tracemalloc.start()  # of NumPy, and not of torch
    stored = first.state_dict()
    again.load_state_dict(stored)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(tensor.nbytes for tensor in stored.values()) / 2


@pytest.mark.parametrize("path", ["store", None])
def test_a_graph_goes_on_from_its_state(tmp_path: Path, path: str | None) -> None:
    place = None if path is None else tmp_path / path
    graph = rating("host", place)
    steps(graph, IDS[:2])
    if place is not None:
        graph.save_snapshot("two")
    stored = copy.deepcopy(graph.state_dict())
    losses = steps(graph, IDS[2:6])
    for _ in range(2):
        graph.load_state_dict(stored)
        assert steps(graph, IDS[2:6]) == losses
    graph.save(tmp_path / "best")
    steps(graph, IDS[6:7])
    graph.load(tmp_path / "best")
    graph.load(tmp_path / "best", optimizers=False)


def test_a_graph_s_state_without_rows_raises(tmp_path: Path) -> None:
    graph = rating("host", tmp_path / "store")
    steps(graph, IDS[:3])
    lacking = graph.state_dict()
    del lacking["rows._extra_state"]
    with pytest.raises(RuntimeError, match="Missing key"):
        graph.load_state_dict(lacking)
    with pytest.raises(SnapshotError, match="names none"):
        steps(graph, IDS[3:4])
    graph.load_state_dict(lacking, strict=False)  # the rows that are awaited no longer are
    graph.keep_rows()
    graph.load_state_dict(lacking, strict=False)  # the rows stay
    steps(graph, IDS[3:4])


def test_a_write_into_the_rows_of_a_state_is_not_lost_without_an_error() -> None:
    """TorchRec's state_dict_gather copies one state into another, whose tensors it takes for the model's."""
    first, second = model(None), model(None)
    train(first.rows, range(5))
    train(second.rows, range(5))
    state = second.state_dict()
    for given in (state, model(None).state_dict()):
        with pytest.raises(InputError, match=r"copy_ of the rows of a state_dict\(\).* load_state_dict"):
            given["rows.rows.embedding"].copy_(first.state_dict()["rows.rows.embedding"])
    own = copy.deepcopy(state)  # of the user
    for name, tensor in first.state_dict().items():
        own[name].copy_(tensor)
    second.load_state_dict(own)
    assert contents(second.rows).tobytes() == contents(first.rows).tobytes()
