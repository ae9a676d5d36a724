"""Tables are found again by their names, and rows never become those of another table."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.embeddings import DIM, rows_by_key, train
from support.graphs import graph_of
from support.killed import copy_as_killed
from support.table_names import filled, firsts, opened
from tierbed import Graph, MultiTableEmbedding, make_normal_initializer, make_table_options
from tierbed.engine.errors import InputError, OptionError, StoreError
from tierbed.engine.options.table_names import find_mismatched_tables, merge_names
from tierbed.snapshots import Snapshot

on_memory_and_disk = pytest.mark.parametrize("store", ["host", "ssd"])


REFUSED = [("b", "a"), ("a", "x"), ("a", "new", "b"), ("a",), (None, None)]
TAKEN = [("a", "b"), ("a", "b", "new"), ("a", "b", None)]


def test_a_selection_by_name_needs_its_own_tables_alone(tmp_path) -> None:
    with filled(tmp_path / "one", "a", "b", "c") as embedding:
        embedding.save_snapshot("s")
        for chosen, found in ((["b"], {1}), (["c", 0], {0, 2}), ({"a"}, {0})):
            embedding.load_snapshot("s", tables=chosen)
            assert set(firsts(embedding)) == found
        for wrong in (["d"], ["1"], [3], [True], "a", ["a", ""]):
            with pytest.raises(InputError, match=r"tables=.*(names|'a', 'b', 'c')"):
                embedding.load_snapshot("s", tables=wrong)
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


@on_memory_and_disk
@pytest.mark.parametrize("names", REFUSED)
@pytest.mark.rotated("store")
def test_tables_in_another_order_do_not_swap_their_rows(tmp_path, names, store) -> None:
    clean, unclean, other = tmp_path / "clean", tmp_path / "unclean", tmp_path / "other"
    with filled(clean, "a", "b", store=store) as embedding:
        embedding.save_snapshot("s")
        copy_as_killed(clean, unclean)
    labels = [str(i) if name is None else name for i, name in enumerate(names)]
    both = rf"tables \['a', 'b'\].*{str(labels)[1:-1]}.*matched by position"
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
        embedding.delete([7, 7], [0, 1])
    with opened(clean, "b", "a", store=store) as embedding:  # a store without rows takes any names
        embedding.put([7], torch.ones(1, DIM), "a")
        assert firsts(embedding) == {1: 1.0}


@on_memory_and_disk
@pytest.mark.parametrize("names", TAKEN)
@pytest.mark.rotated("store")
def test_tables_come_back_by_name_and_new_ones_stand_at_the_end(tmp_path, names, store) -> None:
    with filled(tmp_path, "a", "b", store=store) as embedding:
        embedding.save_snapshot("s")
    with opened(tmp_path, *names, store=store) as embedding:
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        train(embedding, [7], len(names) - 1)
        embedding.save_snapshot("later", "incremental")
        embedding.load_snapshot("s")
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        embedding.load_snapshot("later")
    assert names_of(tmp_path, "later") == list(names)


@on_memory_and_disk
def test_rows_without_names_take_them_at_the_next_save(tmp_path, store) -> None:
    with filled(tmp_path, None, None, store=store) as embedding:
        embedding.save_snapshot("bare")
    assert names_of(tmp_path, "bare") is None
    with opened(tmp_path, "a", None, store=store) as embedding:
        train(embedding, [9])
        embedding.save_snapshot("half", "incremental")  # over a parent without names
        embedding.load_snapshot("bare", tables=["a"])
        assert firsts(embedding) == {0: 1.0}
        embedding.load_snapshot("bare")
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        embedding.put([9], torch.ones(1, DIM), 0)
    assert names_of(tmp_path, "half") == ["a", None]
    with opened(tmp_path, "b", "a", store=store) as embedding, pytest.raises(StoreError, match=r"\['a', '1'\]"):
        embedding.size()  # the close before gave the live rows their names
    with opened(tmp_path, "a", "b", store=store) as embedding:
        assert firsts(embedding) == {0: 1.0, 1: 2.0}
        save = embedding.save_snapshot("whole", background=True)
        assert save is not None
        save.wait()
    assert names_of(tmp_path, "whole") == ["a", "b"]


def names_of(path: Path, snapshot: str) -> list[str | None] | None:
    return Snapshot.open(path / "rows" / "snapshots" / snapshot).description.get("table_names")


def test_a_checkpoint_of_other_names_is_refused(tmp_path) -> None:
    def graph(embedding: MultiTableEmbedding) -> Graph:
        return graph_of(lambda graph, ids: graph.embedding(ids), embedding=embedding)

    with filled(None, "a", "b") as embedding:
        graph(embedding).save(tmp_path / "checkpoint")
    for names in (("b", "a"), ("a",)):
        with filled(None, *names) as embedding:
            with pytest.raises(StoreError, match=r"tables \['a', 'b'\]"):
                graph(embedding).load(tmp_path / "checkpoint")
            assert firsts(embedding) == {table: table + 1.0 for table in range(len(names))}
    with opened(None, "a", "b", "c") as embedding:
        graph(embedding).load(tmp_path / "checkpoint")
        assert firsts(embedding) == {0: 1.0, 1: 2.0}


def test_names_and_labels_of_options(tmp_path) -> None:
    normal = make_normal_initializer()
    for name in ("", "7", "00", " a", "a\n", "\ud800", "x" * 201, 7, b"a", True):
        for arguments in ((normal, name), ({"initializer": normal, "name": name},)):
            with pytest.raises(OptionError, match=r"table name="):
                make_table_options(*arguments)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"tables\[0\] and tables\[2\] both have name='a'"):
        opened(None, "a", "b", "a")
    for param in (normal, [normal, normal]):
        options = make_table_options(param, "user")
        assert make_table_options(dict(options)) == options == make_table_options(options)
        assert make_table_options(options, "item")["name"] == "item"
        assert len(make_table_options(param)) == 1
    ids = torch.arange(20).reshape(10, 2)
    with opened(None, "a", "b") as named, opened(None, None, None) as bare, opened(None, "a", None, "c") as some:
        assert torch.equal(named(ids), bare(ids))  # rows begin by the place of their table
        assert (bare.spec.labels, some.spec.labels) == (("0", "1"), ("a", "1", "c"))
        assert "tables=2" in repr(bare)
        assert "tables=['a', '1', 'c']" in repr(some)


LISTS = st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=4).filter(
    lambda names: len({*names} - {None}) == sum(name is not None for name in names)
)


@given(LISTS, LISTS)
def test_rows_stay_those_of_their_table_wherever_it_is_listed(stored, mine) -> None:
    moved = [place for place, name in enumerate(stored) if name and (name not in mine or mine.index(name) != place)]
    assert find_mismatched_tables(stored, mine) == moved
    both = merge_names(stored, mine)
    assert both == merge_names(mine, stored)
    if both is None:
        assert {*stored, *mine} - {None}
        assert moved or find_mismatched_tables(mine, stored)
    else:
        assert find_mismatched_tables(stored, both) == find_mismatched_tables(mine, both) == []
        assert len(both) == max(len(stored), len(mine))
    assert not moved or both is None or len(mine) < len(stored) or None in mine


@pytest.mark.parametrize(
    "table", ["b", ["b", "b"], [1, "b"], ("b", 1)], ids=["name", "names", "name and number", "tuple"]
)
def test_rows_are_reached_by_the_name_of_their_table(table) -> None:
    with opened(None, "a", "b") as embedding:
        rows, ids = torch.rand(2, DIM), torch.tensor([3, 4])
        embedding.put([3, 4], rows, table)
        for found in (
            embedding.get([3, 4], 1),
            embedding.get([3, 4], table),
            embedding(ids, table),
            embedding(ids[:, None], table, pooling="sum"),
            graph_of(lambda graph, ids: graph.embedding(ids, table), embedding=embedding)(ids),
        ):
            assert torch.equal(found, rows)
        embedding.prefetch(ids, table)
        assert embedding.explain(3, "b") == embedding.explain(3, 1)
        assert (embedding.explain(3, "b")["table"], embedding.explain(3, "b")["table_name"]) == (1, "b")
        assert embedding.delete([3, 4], table) == 2
        assert embedding.size() == 0


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with opened(None, "a", None, "c") as embedding:
        ids = torch.tensor([1])
        for unknown in ("b", ["c", "b"], "1", ["A"]):
            for call in (embedding.get, embedding.delete, embedding, partial(embedding.put, rows=torch.ones(1, DIM))):
                with pytest.raises(InputError, match=r"table_ids of embedding 'rows'.*0 to 2, or by name 'a', 'c'"):
                    call(ids, table_ids=unknown)
        with pytest.raises(InputError, match=r"got 'b'; give the key's table, from 0 to 2, or by name 'a', 'c'"):
            embedding.explain(1, "b")
        assert embedding.size() == 0
