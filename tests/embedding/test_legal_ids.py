"""An id that its table does not have reaches no row, and stored ones beyond its last cause a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed
from support.cuda_tables import on_devices, tables_on
from support.embeddings import DIM, attach, contents, train
from support.graphs import graph_of
from support.stores import options
from support.together import keep_open, killed
from tierbed.engine.errors import InputError, OptionError
from tierbed.engine.options.lookup import Lookup

START = tierbed.make_constant_initializer(1.0)


def limited(bad_ids: str = "raise", key_type: torch.dtype = torch.int64, **more: Any) -> tierbed.MultiTableEmbedding:
    """Two tables: `users` of 5 ids, and a table of any ids."""
    tables = [tierbed.make_table_options(START, name="users", ids=5, bad_ids=bad_ids), START]
    embedding = tierbed.MultiTableEmbedding("rows", DIM, torch.float32, key_type, tables, options("device"), **more)
    attach(embedding, "sgd", lr=1.0, weight_decay=0.0)
    return embedding


@pytest.mark.parametrize(("key_type", "bad"), [(torch.int64, -1), (torch.int32, -7), (torch.uint64, 2**64 - 1)])
def test_a_bad_id_is_told_with_its_table_before_anything_changes(key_type, bad) -> None:
    with limited(key_type=key_type) as embedding:
        train(embedding, [0, 4], grad=1.0)
        before = contents(embedding).tobytes()
        for wrong in (5, bad):
            with pytest.raises(InputError, match=rf"of embedding 'rows': {wrong} is no id of table users, .*0 to 4"):
                train(embedding, [1, wrong, 99], [0, 0, 0], 1.0)
        assert contents(embedding).tobytes() == before
        train(embedding, [4, 5], [0, 1], 1.0)  # the other table has any id
        assert embedding.size() == 3


def test_every_way_to_a_row_checks_ids() -> None:
    bad, tables = torch.tensor([1, 7]), torch.zeros(2, dtype=torch.int64)
    with limited() as embedding:
        embedding.prefetch(bad, tables)  # which the step tells
        for ask in (
            lambda: embedding(bad, 0),
            lambda: embedding.get([7], 0),
            lambda: embedding.put([7], torch.zeros(1, DIM), 0),
            lambda: embedding.delete([7], 0),
            lambda: embedding.explain(7, 0),
            lambda: embedding.pin([Lookup(bad, tables)]),
        ):
            with pytest.raises(InputError, match="7 is no id of table users"):
                ask()
        assert embedding.size() == 0
        assert train(embedding, [1], grad=1.0)[0, 0] == 1


def test_dropped_ids_are_padding_and_counted_once() -> None:
    with limited("drop") as embedding:
        rows = train(embedding, [3, 5, -1, 5], [0, 0, 0, 1], 1.0)
        assert rows[:, 0].tolist() == [1, 0, 0, 1]
        assert embedding.size() == 2
        assert embedding.metrics()["table"]["dropped"] == 2
        assert [table["dropped"] for table in embedding.metrics()["tables"].values()] == [2, 0]
        ids = torch.tensor([[3, 8], [9, 9]])
        pooled = embedding(ids, torch.tensor(0).expand(2), pooling="mean")
        assert pooled[:, 0].tolist() == [0.0, 0.0]  # the row of 3 is 1 - 1; a bag of none is zeros
        assert embedding.metrics()["table"]["dropped"] == 5
        with pytest.raises(InputError, match="7 is no id of table users"):
            embedding.put([7], torch.zeros(1, DIM), 0)
        ids, owners = torch.tensor([1, 7, 8]), torch.zeros(3, dtype=torch.int64)
        for _ in range(2):
            embedding.prefetch(ids, owners)
        train(embedding, ids, owners, 1.0)  # in which those of an announced batch count
        metrics = embedding.metrics()["table"]
        assert (metrics["prefetch_hits"], metrics["dropped"]) == (1, 7)
        embedding.forget_announced()
        assert embedding.metrics()["table"]["dropped"] == 7


@on_devices
@pytest.mark.parametrize("bad_ids", ["raise", "drop"])
def test_a_gpu_finds_bad_ids_late_and_drops_them_alike(device, bad_ids) -> None:
    with tables_on(device) as place:
        embedding = limited(bad_ids).to(place)
        rows = train(embedding, [3, 5, -1, 5], [0, 0, 0, 1], 1.0)
        if bad_ids == "raise":
            with pytest.raises(InputError, match="one is no id of its table"):
                embedding.size()
            assert embedding.size() == 0
        else:
            assert rows[:, 0].tolist() == [1, 0, 0, 1]
            assert embedding.size() == 2
            assert embedding.metrics()["table"]["dropped"] == 2
        train(embedding, [4], grad=1.0)
        assert embedding.size() == (1 if bad_ids == "raise" else 3)
        embedding.close()


def test_table_options_print_and_take_ids() -> None:
    made = tierbed.make_table_options(START, name="users", ids=5, bad_ids="drop")
    assert made == {"name": "users", "ids": 5, "bad_ids": "drop", "initializer": {"type": "constant", "value": 1.0}}
    assert tierbed.make_table_options(dict(made)) == made
    assert tierbed.make_table_options(made, ids=6)["ids"] == 6
    assert "ids" not in tierbed.make_table_options(START)
    for wrong in (0, -1, 2**64 + 1, 1.5, "5", True):
        with pytest.raises(OptionError, match=rf"ids={wrong!r}: give the number of ids"):
            tierbed.make_table_options(START, ids=wrong)  # type: ignore[arg-type]
    for arguments, named in (({"ids": 5, "bad_ids": "skip"}, "'raise' or 'drop'"), ({"bad_ids": "drop"}, "`ids`")):
        with pytest.raises(OptionError, match=rf"bad_ids='{arguments['bad_ids']}': .*{named}"):
            tierbed.make_table_options(START, **arguments)


def rows(path: Path | None, ids: int | None, store: str = "host", bad_ids: str = "raise", **more: Any) -> Any:
    """One table of these ids, of any if None."""
    facts = {} if ids is None else {"ids": ids, "bad_ids": bad_ids}
    tables, place = [tierbed.make_table_options(START, name="users", **facts)], options(store, path, **more)
    return tierbed.MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, place)


def test_ids_are_no_part_of_what_is_stored(tmp_path) -> None:
    with rows(tmp_path, None) as embedding:
        embedding.put([4, 7], torch.zeros(2, DIM))
        embedding.save_snapshot("all")
    with rows(tmp_path, 5, bad_ids="drop") as embedding:
        embedding.load_snapshot("all")
        assert embedding(torch.tensor([4, 7]))[:, 0].tolist() == [0, 0]
        assert embedding.metrics()["table"]["dropped"] == 1


def eager(embedding: tierbed.MultiTableEmbedding) -> tierbed.EagerOptimizer:
    return tierbed.EagerOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding)


def written(embedding: tierbed.MultiTableEmbedding) -> tierbed.Graph:
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    graph = graph_of(lambda graph, ids: graph.rows(ids).sum().backward(), optimizer, rows=embedding)
    graph(torch.tensor([3, 5, 8, 9]))
    return graph


def by_checkpoint(path: Path) -> Callable[[], object]:
    written(rows(path / "first", 10)).save(path / "saved")
    other = rows(path / "second", 7)
    return lambda: graph_of(lambda graph, ids: graph.rows(ids), eager(other).optimizer, rows=other).load(path / "saved")


def by_loop(path: Path) -> Callable[[], object]:
    first, second = rows(path / "first", 10), rows(path / "second", 7)
    optimizer = eager(first)
    first(torch.tensor([3, 5, 8, 9])).sum().backward()
    optimizer.step()
    tierbed.save_checkpoint(path / "saved", first, optimizer)
    return lambda: tierbed.load_checkpoint(path / "saved", second, eager(second))


def by_value(path: Path) -> Callable[[], object]:
    state = written(rows(None, 10)).rows.state_dict()
    return lambda: rows(None, 7).load_state_dict(state)


def by_reference(path: Path) -> Callable[[], object]:
    first = rows(path, 10, state_dict_snapshots=True)
    graph = written(first)
    state = first.state_dict()
    graph(torch.tensor([1]))
    first.close()

    def load() -> None:
        with rows(path, 7, open="fresh", state_dict_snapshots=True) as second:
            second.size()
            second.load_state_dict(state)

    return load


def left_open(path: Path) -> None:
    graph = written(rows(path, 10))
    graph.rows.save_snapshot("one")
    graph(torch.tensor([1]))
    keep_open(graph)


def by_recovery(path: Path) -> Callable[[], object]:
    killed(left_open, path)
    return lambda: rows(path, 7).size()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [line for line in found if "has 2 rows of table users with ids from 7 on" in line]


@pytest.mark.parametrize("before", [10, None])
@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.rotated("store")
def test_a_reopened_store_tells_at_each_open_and_not_once_it_fits(tmp_path, caplog, store, before) -> None:
    with rows(tmp_path, before, store) as embedding:
        written(embedding)
    for ids, tells in ((7, 1), (7, 1), (10, 0), (7, 1), (10, 0)):
        with rows(tmp_path, ids, store) as embedding:
            assert embedding.size() == 4
        assert len(warnings_in(caplog)) == tells


@pytest.mark.parametrize("way", [by_checkpoint, by_loop, by_value, by_reference, by_recovery])
def test_each_way_of_a_load_tells_once(tmp_path, caplog, way) -> None:
    load = way(tmp_path)
    caplog.clear()
    load()
    assert len(warnings_in(caplog)) == 1
