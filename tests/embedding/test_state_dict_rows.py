"""A state_dict holds the rows of an embedding, or names a snapshot of them; loading it brings them back, or raises."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.checkpoints import IDS, rating, steps
from support.embeddings import attach, contents, make, reloaded, train
from support.stores import STORES, options
from support.two_towers import IDS as BATCHES
from support.two_towers import TwoTowers, losses, optimizer_of, stores
from tierbed import MultiTableEmbedding
from tierbed.engine.errors import ClosedError, InputError, OptionError, SnapshotError, StoreError
from tierbed.snapshots import list_snapshots
from tierbed.snapshots.control.client import request_save


def test_a_user_can_replace_what_comes_before_a_state(tmp_path) -> None:
    first = model(tmp_path, trained=50, state_dict_snapshots=True)
    for _ in range(2):
        first.rows.save_snapshot("latest", overwrite=True)
        train(first.rows, range(2))
        first.state_dict()
    saving = first.rows.save_snapshot("aside", background=True)
    train(first.rows, range(3))
    kept = first.kept()
    assert saving is not None
    saving.wait()
    train(first.rows, range(3))
    first.loads(kept)


class Model(nn.Module):
    """Rows and a dense part, without a graph."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows = rows
        self.mlp = nn.Linear(rows.dim, 1)

    def kept(self) -> tuple[dict[str, Any], bytes]:
        """The state as a file brings it back, and all rows."""
        return reloaded(self.state_dict()), contents(self.rows).tobytes()

    def loads(self, kept: tuple[dict[str, Any], bytes]) -> None:
        """The state brings back its rows."""
        state, rows = kept
        self.load_state_dict(state)
        assert contents(self.rows).tobytes() == rows


def model(path: Path | None, store: str = "host", optimizer: str = "adagrad", trained: int = 0, **more: Any) -> Model:
    """trained: the ids of a first step, from 0."""
    arguments = {"dtype": more.pop("dtype")} if "dtype" in more else {}
    made = Model(make(options(store, path, **more), optimizer, tables=1, **arguments))
    if trained:
        train(made.rows, range(trained))
    return made


def named(state: dict[str, Any]) -> dict[str, Any]:
    assert state["rows._extra_state"].shape == (1024,)
    found: dict[str, Any] = json.loads(bytes(state["rows._extra_state"].tolist()))
    assert (found.pop("digest") is None) == (found["snapshot"] is None)
    del found["version"]
    return found


def of_states(path: Path) -> list[str]:
    names = (one.name for one in list_snapshots(path / "rows" / "snapshots").snapshots)
    return [name for name in names if name.startswith("state_dict-")]


OF_RULES = [
    ("adagrad", torch.bfloat16),
    ("rowwise", torch.float16),
    ("sgd", torch.float32),
    ("catch-up", torch.float32),
]


@pytest.mark.parametrize(("optimizer", "dtype"), OF_RULES)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("store")
def test_rows_without_a_folder_are_in_the_state_and_load_into_any_store(tmp_path, optimizer, dtype, store) -> None:
    first = model(None, "device", optimizer, 20, dtype=dtype)
    train(first.rows, range(5, 9))
    stored = reloaded(first.state_dict())
    assert stored["rows.rows.embedding"].shape == (20, first.rows.dim)
    assert stored["rows.rows.embedding"].dtype == dtype
    train(first.rows, range(4, 12))
    expected = contents(first.rows).tobytes()
    again = Model(make(options(store, tmp_path), tables=1, dtype=dtype))
    for used in (False, True):
        again.load_state_dict(stored)
        if not used:
            attach(again.rows, optimizer)  # for which the rows wait
        train(again.rows, range(4, 12))
        assert contents(again.rows).tobytes() == expected
    again.rows.close()
    resumed = model(tmp_path, store, optimizer, dtype=dtype, open="error")
    assert contents(resumed.rows).tobytes() == expected


def test_rows_of_a_state_that_do_not_fit_are_told_and_nothing_goes_on_with_others(caplog) -> None:
    first, other = model(None, trained=5), model(None, trained=5, dtype=torch.float16)
    stored = reloaded(first.state_dict())
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
    for field, broken, said in (
        ("step", stored["rows.rows.step"][:2], r"rows.step is torch.int64 \[2\]"),
        ("step", stored["rows.rows.step"] + 1, r"rows\.step has 2, but the table's step is 1"),
        ("updates", torch.zeros(5, dtype=torch.int64), "updates=0"),
        ("description", torch.zeros(3, dtype=torch.uint8), "description cannot be read"),
        ("embedding", stored["rows.rows.embedding"].half(), "is torch.float16"),
        ("key", torch.tensor([1, 2, 3, 4, 2]), "the state contains one row twice"),
        ("updates", torch.tensor([1, 1, 1, 1, -1]), r"rows\.updates has values from -1 to 1"),
        ("table", torch.tensor([0, 0, 0, 0, 2**32]), r"rows\.table has values from 0 to 4294967296"),
    ):
        with pytest.raises(RuntimeError, match=said):
            first.load_state_dict({**stored, f"rows.rows.{field}": broken})
    first.load_state_dict(stored)
    assert first.rows.size() == 5


@pytest.mark.parametrize("store", ["host", "cached_host", "ssd"])
def test_an_embedding_with_a_folder_names_a_snapshot_that_loads(tmp_path, store) -> None:
    first = model(tmp_path, store, state_dict_snapshots=True)
    assert named(first.state_dict()) == {"step": 0, "snapshot": None}
    kept = []
    for step in (1, 2, 3):
        train(first.rows, range(step, step + 5))
        kept.append(first.kept())
        assert named(first.state_dict()) == named(kept[-1][0])  # one snapshot from the same step
    assert of_states(tmp_path) == [named(state)["snapshot"] for state, _ in kept]
    assert first.rows.last_snapshot is None
    for number in (0, 2, 1):
        first.loads(kept[number])
    first.rows.prune_snapshots(1)
    first.rows.close()
    again = model(tmp_path, store)
    again.loads(kept[0])
    for _ in range(2):  # and the next run knows that it has these rows
        again.rows.close()
        again = model(tmp_path, store, state_dict_snapshots=True)
        assert named(again.state_dict()) == named(kept[0][0])
    assert len(of_states(tmp_path)) == 3


def test_rows_of_another_timeline_at_the_same_step_are_not_those_of_a_state(tmp_path) -> None:
    first = model(tmp_path / "a", trained=5, state_dict_snapshots=1)
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


@pytest.mark.parametrize(
    "write",
    [
        lambda rows: rows.put([1], torch.ones(1, rows.dim), 0),
        lambda rows: rows.delete([1], 0),
        lambda rows: rows.load_snapshot("mine", where=lambda tables, keys: keys < 2),
        lambda rows: rows.load_state_dict(model(None, trained=7).rows.state_dict()),
    ],
    ids=["put", "delete", "selection", "tensors"],
)
@pytest.mark.parametrize("on", [True, False])
def test_rows_that_were_written_at_the_step_of_a_state_are_replaced(tmp_path, write, on) -> None:
    first = model(tmp_path, trained=5, state_dict_snapshots=on)
    first.rows.save_snapshot("mine")
    kept = first.kept()
    write(first.rows)
    written = first.kept()
    assert written[1] != kept[1]
    first.loads(kept)
    if on:
        first.loads(written)
    else:  # no snapshot has them
        assert named(written[0]) == {"step": 1, "snapshot": None}
        with pytest.raises(SnapshotError, match="other rows of step 1, which names no snapshot"):
            first.load_state_dict(written[0])


def test_rows_that_were_closed_are_known_to_be_those_of_a_state(tmp_path) -> None:
    first = model(tmp_path, trained=5)
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
        for _ in range(2):
            with pytest.raises(
                SnapshotError, match=r"rows of step 2.*(which names no snapshot|was made before the embedding was used)"
            ):
                last.rows.size()
        last.rows.keep_rows()
        assert last.rows.size() == 5
        last.rows.close()


def test_a_state_of_no_rows_deletes_them_or_raises(tmp_path) -> None:
    first = model(tmp_path / "on", state_dict_snapshots=True)
    empty = reloaded(first.state_dict())
    train(first.rows, range(5))
    kept = first.kept()
    first.load_state_dict(empty)
    assert first.rows.size() == 0
    first.loads(kept)
    first.rows.close()
    with pytest.raises(ClosedError):
        first.load_state_dict(kept[0])
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


def test_the_state_that_a_framework_asks_for_before_it_loads_leaves_what_it_loads(tmp_path) -> None:
    first = model(tmp_path, trained=5, state_dict_snapshots=1)
    first.rows.save_snapshot("best")
    train(first.rows, range(5))
    kept = first.kept()
    train(first.rows, range(5))
    first.rows.close()
    first = model(tmp_path, state_dict_snapshots=1)
    first.state_dict()
    first.loads(kept)
    first.rows.load_snapshot("best")
    best = first.kept()  # a link, of an old snapshot
    for name in of_states(tmp_path):
        os.utime(tmp_path / "rows/snapshots" / name, (0, int(name == named(best[0])["snapshot"])))
    train(first.rows, range(5))
    first.state_dict()
    names = of_states(tmp_path)
    first.state_dict()
    assert of_states(tmp_path) == names
    first.rows.save_snapshot("best", overwrite=True)
    first.loads(best)


def test_a_number_of_snapshots_of_states_is_kept_and_the_log_says_what_cannot_load(tmp_path, caplog) -> None:
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
    for path, value, said in (
        (tmp_path, 0, "=0"),
        (tmp_path, "all", "='all'"),
        (None, True, "=True.*the rows themselves"),
    ):
        with pytest.raises(OptionError, match=f"state_dict_snapshots{said}"):
            options("host", path, state_dict_snapshots=value)


def test_without_the_option_the_first_state_warns_and_one_of_other_rows_raises_until_it_is_settled(
    tmp_path, caplog
) -> None:
    first = model(tmp_path / "store", trained=5)
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
    state = {name[5:]: value for name, value in stored.items() if name.startswith("rows.")}
    first.rows.load_state_dict(state, strict=False)
    assert "its rows stay" in caplog.text
    train(first.rows, [1])
    first.rows.save_snapshot("mine")
    with pytest.raises(SnapshotError):
        first.load_state_dict(stored)
    first.rows.load_snapshot("mine")
    train(first.rows, [1])


@pytest.mark.parametrize("name", ["best", '"' * 200])
def test_a_user_s_snapshot_that_a_state_names_is_loaded_while_it_has_those_rows(tmp_path, name) -> None:
    first = model(tmp_path, trained=5)
    first.rows.save_snapshot(name)
    kept = first.kept()
    assert named(kept[0]) == {"step": 1, "snapshot": name}
    first.rows.put([1], torch.ones(1, first.rows.dim), 0)
    first.rows.save_snapshot("put")
    first.loads(kept)  # the step is the same, the rows are not
    train(first.rows, range(5))
    first.rows.save_snapshot(name, overwrite=True)
    with pytest.raises(SnapshotError, match=f"'{name}', which is missing, or has other rows"):
        first.load_state_dict(kept[0])


def test_a_state_without_our_entry_or_with_one_that_says_nothing_raises(tmp_path) -> None:
    first = model(tmp_path, trained=5)
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


def test_where_a_load_stops_no_embedding_of_the_model_goes_on(tmp_path) -> None:
    towers = TwoTowers(stores("host folder", tmp_path))
    optimizer, batches = optimizer_of(towers), iter(BATCHES)

    def trained(count: int) -> dict[str, Any]:
        list(losses(towers, optimizer, torch.stack([next(batches) for _ in range(count)])))
        return reloaded(towers.state_dict())

    towers.users.save_snapshot("mine")  # of no rows
    whole, stored, _ = trained(2), trained(2), trained(2)
    name = json.loads(bytes(stored["users._extra_state"].tolist()))["snapshot"]
    shutil.rmtree(tmp_path / "users/snapshots" / name)
    with pytest.raises(SnapshotError, match=r"rows of step 6.*of step 4"):
        towers.load_state_dict(stored)  # that of items comes after it
    for use in (lambda: towers.items.get([1], 0), lambda: trained(1)):
        with pytest.raises(SnapshotError, match=r"a load stopped at embedding 'users'|rows of step 6"):
            use()
    folders = [tmp_path / "users", tmp_path / "items"]
    for several in [], folders:  # and no other process saves them
        with pytest.raises(StoreError, match=r"embedding 'users' was not saved.*keep_rows\(\)"):
            request_save(folders[0], "x", stores=several)
    towers.load_state_dict(whole)
    trained(1)
    with pytest.raises(SnapshotError):
        towers.load_state_dict(stored)
    for one in towers.users, towers.items:
        one.keep_rows()
    trained(1)


@pytest.mark.parametrize("path", ["store", None])
def test_a_graph_goes_on_from_its_state_and_not_without_its_rows(tmp_path, path) -> None:
    graph = rating("host", path and tmp_path / path)
    steps(graph, IDS[:2])
    if path:
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
    lacking = graph.state_dict()
    del lacking["rows._extra_state"]
    if path is None:  # the rows themselves are in the state
        return
    with pytest.raises(RuntimeError, match="Missing key"):
        graph.load_state_dict(lacking)
    with pytest.raises(SnapshotError, match="names none"):
        steps(graph, IDS[3:4])
    graph.load_state_dict(lacking, strict=False)  # the rows that are awaited no longer are
    graph.keep_rows()
    graph.load_state_dict(lacking, strict=False)  # the rows stay
    steps(graph, IDS[3:4])


def test_states_are_filled_and_loaded_without_a_second_copy_of_all_rows(tmp_path) -> None:
    first, again = model(None, trained=300_000), model(None)
    tracemalloc.start()  # of NumPy, and not of torch
    stored = first.state_dict()
    again.load_state_dict(stored)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(tensor.nbytes for tensor in stored.values()) / 2
    said = r"because its rows are in a store.*graph.save or save_checkpoint"
    for copies in (copy.deepcopy, lambda one: torch.save(one, io.BytesIO()), torch.optim.swa_utils.AveragedModel):
        with pytest.raises(StoreError, match=said):  # a copy of the module
            copies(model(tmp_path))


def test_a_state_into_which_the_rows_of_another_are_copied_is_loaded_if_it_is_the_users_copy() -> None:
    """TorchRec's state_dict_gather copies one state into another, whose tensors it takes for the model's."""
    first, second = model(None, trained=9), model(None, trained=9)
    train(first.rows, range(5))
    own = copy.deepcopy(second.state_dict())
    with pytest.raises(InputError, match=r"copy_ of the rows of a state_dict\(\).* load_state_dict"):
        model(None).state_dict()["rows.rows.embedding"].copy_(first.state_dict()["rows.rows.embedding"])
    for name, tensor in first.state_dict().items():
        own[name].copy_(tensor)
    second.load_state_dict(own)
    assert contents(second.rows).tobytes() == contents(first.rows).tobytes()
