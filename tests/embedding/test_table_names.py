"""Tables are found again by their names, and rows never become those of another table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.embeddings import DIM, rows_by_key, train
from support.table_names import filled, firsts, opened
from tierbed import (
    InputError,
    MultiTableEmbedding,
    OptionError,
    StoreError,
    make_normal_initializer,
    make_table_options,
)
from tierbed.engine.options.table_names import merged_names, mismatched_tables
from tierbed.snapshots import Snapshot

on_memory_and_disk = pytest.mark.parametrize("store", ["host", "ssd"])


def description(folder: Path) -> dict[str, Any]:
    return Snapshot.open(folder).description


REFUSED = [
    ("b", "a"),
    ("a", "x"),
    ("a", "new", "b"),
    ("new", "a", "b"),
    ("a",),
    ("b",),
    (None, None),
    ("a", None),
    (None, "a", "b"),
]
TAKEN = [("a", "b"), ("a", "b", "new"), ("a", "b", None)]


@on_memory_and_disk
@pytest.mark.parametrize("names", REFUSED)
@pytest.mark.rotated("store")
def test_tables_in_another_order_do_not_swap_their_rows(tmp_path: Path, names: tuple[Any, ...], store: str) -> None:
    clean, unclean, other = tmp_path / "clean", tmp_path / "unclean", tmp_path / "other"
    with filled(clean, "a", "b", store=store) as embedding:
        embedding.save_snapshot("s")
        shutil.copytree(clean, unclean, ignore=shutil.ignore_patterns("SOCKET"))
    labels = [str(i) if name is None else name for i, name in enumerate(names)]
    both = rf"tables \['a', 'b'\].*{str(labels)[1:-1]}.*stored order"
    for place in (clean, unclean):  # by the clean marker, by the snapshot
        with opened(place, *names, store=store) as embedding, pytest.raises(StoreError, match=both):
            embedding.get([7], 0)
    with opened(other, *names, store=store) as embedding:
        embedding.put([1], torch.ones(1, DIM), 0)
        shutil.copytree(clean / "rows" / "snapshots", other / "rows" / "snapshots")
        with pytest.raises(StoreError, match=both):
            embedding.load_snapshot("s")
        assert list(rows_by_key(embedding)) == [(0, 1)]
    with opened(clean, "a", "b", store=store) as embedding:
        assert firsts(embedding) == {0: 1.0, 1: 2.0}


@on_memory_and_disk
@pytest.mark.parametrize("names", TAKEN)
def test_tables_come_back_by_name_and_new_ones_stand_at_the_end(
    tmp_path: Path, names: tuple[Any, ...], store: str
) -> None:
    with filled(tmp_path, "a", "b", store=store) as embedding:
        embedding.save_snapshot("s")
    with opened(tmp_path, *names, store=store) as embedding:
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        train(embedding, [7], len(names) - 1)
        embedding.save_snapshot("later", "incremental")
        embedding.load_snapshot("s")
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        embedding.load_snapshot("later")
    assert description(tmp_path / "rows" / "snapshots" / "later")["table_names"] == list(names)


@on_memory_and_disk
def test_rows_without_names_take_them_at_the_next_save(tmp_path: Path, store: str) -> None:
    with filled(tmp_path, None, None, store=store) as embedding:
        embedding.save_snapshot("bare")
    snapshots = tmp_path / "rows" / "snapshots"
    assert "table_names" not in description(snapshots / "bare")
    with opened(tmp_path, "a", None, store=store) as embedding:
        train(embedding, [9])
        embedding.save_snapshot("half", "incremental")  # over a parent without names
        embedding.load_snapshot("bare")
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        embedding.put([9], torch.ones(1, DIM), 0)
    assert description(snapshots / "half")["table_names"] == ["a", None]
    with opened(tmp_path, "b", "a", store=store) as embedding, pytest.raises(StoreError, match=r"\['a', '1'\]"):
        embedding.size()  # the close before gave the live rows their names
    with opened(tmp_path, "a", "b", store=store) as embedding:
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        save = embedding.save_snapshot("whole", background=True)
        assert save is not None
        save.wait()
    assert description(snapshots / "whole")["table_names"] == ["a", "b"]


def test_a_checkpoint_of_other_names_is_refused(tmp_path: Path) -> None:
    from tierbed import Graph

    class Trains(Graph):
        def __init__(self, embedding: MultiTableEmbedding) -> None:
            super().__init__()
            self.embedding = embedding

        def build(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids).sum()

    with filled(None, "a", "b") as embedding:
        Trains(embedding).save(tmp_path / "checkpoint")
    for names in (("b", "a"), ("a",)):
        with filled(None, *names) as embedding:
            with pytest.raises(StoreError, match=r"tables \['a', 'b'\]"):
                Trains(embedding).load(tmp_path / "checkpoint")
            assert firsts(embedding) == {table: table + 1.0 for table in range(len(names))}
    with opened(None, "a", "b", "c") as embedding:
        Trains(embedding).load(tmp_path / "checkpoint")
        assert firsts(embedding) == {0: 1.0, 1: 2.0}


def test_tables_are_loaded_by_name(tmp_path: Path) -> None:
    with filled(tmp_path, "a", "b", "c") as embedding:
        embedding.save_snapshot("s")
        for chosen, found in ((["b"], {1}), (["c", 0], {0, 2}), ({"a"}, {0})):
            embedding.load_snapshot("s", tables=chosen)
            assert set(firsts(embedding)) == found
        for wrong in (["d"], ["1"], [3], [True], "a", ["a", ""]):
            with pytest.raises(InputError, match=r"tables=.*(names|'a', 'b', 'c')"):
                embedding.load_snapshot("s", tables=wrong)


def test_a_selection_needs_its_own_tables_alone(tmp_path: Path) -> None:
    with filled(tmp_path / "one", "a", "b", "c") as embedding:
        embedding.save_snapshot("s")
    with opened(tmp_path / "other", "a", "x", "c", "b") as embedding:
        embedding.put([1], torch.ones(1, DIM), 0)
        shutil.copytree(tmp_path / "one/rows/snapshots", tmp_path / "other/rows/snapshots")
        embedding.load_snapshot("s", tables=["c", "a"])
        assert firsts(embedding) == {0: 1.0, 2: 3.0}
        for table in ("b", "x", 1):
            with pytest.raises(StoreError, match=r"\['a', 'b', 'c'\].*\['a', 'x', 'c', 'b'\]"):
                embedding.load_snapshot("s", tables=[table])
        report = embedding.load_snapshot("s", strict=False)
        assert (report.rows, report.left_out) == (2, 1)
        assert firsts(embedding) == {0: 1.0, 2: 3.0}
        assert "['b'] are left out" in report.remarks[0]


def test_a_name_given_later_selects_a_table_that_was_stored_without(tmp_path: Path) -> None:
    with filled(tmp_path, None, "b") as embedding:
        embedding.save_snapshot("s")
    with opened(tmp_path, "a", "b") as embedding:
        embedding.load_snapshot("s", tables=["a"])
        assert firsts(embedding) == {0: 1.0}


def test_a_store_without_rows_takes_any_names(tmp_path: Path) -> None:
    with filled(tmp_path, "a", "b") as embedding:
        embedding.delete([7, 7], [0, 1])
    with opened(tmp_path, "b", "a") as embedding:
        embedding.put([7], torch.ones(1, DIM), "a")
    with opened(tmp_path, "b", "a") as embedding:
        assert firsts(embedding) == {1: 1.0}


LISTS = st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=4).filter(
    lambda names: len({*names} - {None}) == sum(name is not None for name in names)
)


@given(LISTS, LISTS)
def test_rows_stay_those_of_their_table_wherever_it_is_listed(stored: list[str | None], mine: list[str | None]) -> None:
    moved = [place for place, name in enumerate(stored) if name and (name not in mine or mine.index(name) != place)]
    assert mismatched_tables(stored, mine) == moved
    both = merged_names(stored, mine)
    assert both == merged_names(mine, stored)
    if both is None:
        assert {*stored, *mine} - {None}
        assert moved or mismatched_tables(mine, stored)
    else:
        assert mismatched_tables(stored, both) == mismatched_tables(mine, both) == []
        assert len(both) == max(len(stored), len(mine))
    assert not moved or both is None or len(mine) < len(stored) or None in mine


def test_a_name_that_cannot_be_is_refused() -> None:
    normal = make_normal_initializer()
    for name in ("", "7", "00", " a", "a\n", "\ud800", "x" * 201, 7, b"a", True):
        with pytest.raises(OptionError, match=r"table name="):
            make_table_options(normal, name)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"table name="):
            make_table_options({"initializer": normal, "name": name})
    with pytest.raises(OptionError, match=r"tables\[0\] and tables\[2\] both have name='a'"):
        opened(None, "a", "b", "a")


def test_options_keep_the_name_that_they_print() -> None:
    normal = make_normal_initializer()
    for param in (normal, [normal, normal]):
        options = make_table_options(param, "user")
        assert make_table_options(dict(options)) == options == make_table_options(options)
        assert make_table_options(options, "item")["name"] == "item"
        assert "name" not in make_table_options(param)
        assert len(make_table_options(param)) == 1


def test_initial_rows_are_those_of_the_place_not_of_the_name() -> None:
    with opened(None, "a", "b") as named, opened(None, None, None) as bare:
        ids = torch.arange(20).reshape(10, 2)
        assert torch.equal(named(ids), bare(ids))


def test_labels_are_names_or_numbers() -> None:
    with opened(None, "a", None, "c") as embedding:
        assert embedding.spec.labels == ("a", "1", "c")
        assert "tables=['a', '1', 'c']" in repr(embedding)
    with opened(None, None, None) as embedding:
        assert embedding.spec.labels == ("0", "1")
        assert "tables=2" in repr(embedding)


@pytest.mark.parametrize(
    "table", ["b", ["b", "b"], [1, "b"], ("b", 1)], ids=["name", "names", "name and number", "tuple"]
)
def test_rows_are_reached_by_the_name_of_their_table(table: Any) -> None:
    with opened(None, "a", "b") as embedding:
        rows = torch.rand(2, DIM)
        embedding.put([3, 4], rows, table)
        assert torch.equal(embedding.get([3, 4], 1), rows)
        assert torch.equal(embedding.get([3, 4], table), rows)
        assert torch.equal(embedding(torch.tensor([3, 4]), table), rows)
        pooled = embedding(torch.tensor([[3], [4]]), table, pooling="sum")
        assert torch.equal(pooled, rows)
        embedding.prefetch(torch.tensor([3, 4]), table)
        assert embedding.explain(3, "b") == embedding.explain(3, 1)
        assert (embedding.explain(3, "b")["table"], embedding.explain(3, "b")["table_name"]) == (1, "b")
        assert embedding.delete([3, 4], table) == 2
        assert embedding.size() == 0


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with opened(None, "a", None, "c") as embedding:
        ids = torch.tensor([1])
        for unknown in ("b", ["c", "b"], "1", ["A"]):
            for call in (embedding.get, embedding.delete, embedding):
                with pytest.raises(InputError, match=r"table_ids of embedding 'rows'.*0 to 2, or by name 'a', 'c'"):
                    call(ids, unknown)
            with pytest.raises(InputError, match=r"table_ids of embedding 'rows'.*0 to 2, or by name 'a', 'c'"):
                embedding.put(ids, torch.ones(1, DIM), unknown)
        with pytest.raises(InputError, match=r"got 'b'; give the key's table, from 0 to 2, or by name 'a', 'c'"):
            embedding.explain(1, "b")
        assert embedding.size() == 0


def test_a_graph_looks_tables_up_by_name() -> None:
    from tierbed import Graph

    class Scores(Graph):
        def __init__(self, embedding: MultiTableEmbedding, tables: Any) -> None:
            super().__init__()
            self.embedding, self.tables = embedding, tables

        def build(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids, self.tables)

    with filled(None, "a", "b") as embedding:
        for tables, wanted in (("b", [2.0, 2.0]), (["b", "a"], [2.0, 1.0])):
            assert Scores(embedding, tables)(torch.tensor([7, 7]))[:, 0].tolist() == wanted
