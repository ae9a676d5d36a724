"""Incremental snapshots over restarts, kills and loads hold all rows, and read only the rows that changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.changed_rows import Row, by_name, call, check_saved, read_snapshot, some_rows
from support.embeddings import contents, make, train
from support.examples import examples
from support.killed import copy_as_killed
from support.stores import STORES, options
from tierbed.snapshots.files import writer
from tierbed.snapshots.store import save

stores = pytest.mark.parametrize("store", STORES)
events = st.lists(
    st.tuples(
        st.sampled_from(
            ["train", "put", "delete", "load", "reopen", "kill", "checkpoint"]
            + [kind + place for kind in ("full", "incremental") for place in ("", " in background")]
        ),
        some_rows,
    ),
    max_size=14,
)


@contextmanager
def counted_comparisons() -> Iterator[list[int]]:
    """Counts the incremental saves that compare all rows with their parent."""
    count, compare = [0], save.find_changes

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return compare(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "find_changes", counted)
        yield count


@stores
@pytest.mark.parametrize("limit_mb", [256, 0.01, 0])
@pytest.mark.rotated("store")
@examples(0.3)
@given(events=events)
def test_every_incremental_snapshot_holds_all_rows(
    tmp_path_factory: pytest.TempPathFactory, store: str, limit_mb: float, events: list[tuple[str, list[Row]]]
) -> None:
    path, saved = tmp_path_factory.mktemp("store"), list[str]()

    def open_store() -> Any:
        return make(options(store, path, changed_keys_mb=limit_mb), "adagrad")

    embedding = open_store()
    with counted_comparisons() as comparisons:
        for number, (kind, rows) in enumerate([("train", [(0, 1)]), ("full", []), *events, ("incremental", [])]):
            name = f"s{number}"
            if kind in ("full", "incremental", "checkpoint"):
                on_disk = store.startswith("ssd")
                embedding.save_snapshot(name, kind=kind if on_disk or kind != "checkpoint" else "full")
            elif kind.endswith("in background"):
                before = by_name(contents(embedding))
                saving = embedding.save_snapshot(name, kind=kind.split()[0], background=True)
                for change in ("put", "delete", "train"):
                    call(embedding, change, rows)
                saving.wait()
                assert read_snapshot(embedding, name) == before
            elif kind == "load":
                embedding.load_snapshot(saved[-1 - len(rows) % len(saved)])
            elif kind == "kill":
                path = copy_as_killed(path, tmp_path_factory.mktemp("copy") / "store")
                embedding.close()
                embedding = open_store()
            elif kind == "reopen":
                embedding.close()
                embedding = open_store()
            else:
                call(embedding, kind, rows)
            if kind.split()[0] in ("full", "checkpoint", "incremental"):
                saved.append(name)
            if kind in ("full", "checkpoint", "incremental"):
                check_saved(embedding, name)
    embedding.close()
    assert not comparisons[0] or limit_mb != 256


def test_a_snapshot_of_a_state_dict_leaves_the_keys_to_the_snapshots_of_the_user(tmp_path: Path) -> None:
    with counted_comparisons() as comparisons:
        for name in ("first", "second"):
            with make(options("host", tmp_path, state_dict_snapshots=True), "sgd") as embedding:
                embedding.save_snapshot(name, kind="full" if name == "first" else "incremental")
                check_saved(embedding, name)
                train(embedding, range(9))
                embedding.state_dict()
    assert not comparisons[0]


@stores
def test_keys_of_another_close_are_not_used(tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture) -> None:
    for name, ids in (("first", [1, 2]), ("other", [3])):
        with make(options(store, tmp_path / name), "sgd") as embedding:
            train(embedding, range(9))
            embedding.save_snapshot("base")
            train(embedding, ids)
    shutil.copy(tmp_path / "other" / "rows" / "CHANGED", tmp_path / "first" / "rows")
    with make(options(store, tmp_path / "first"), "sgd") as embedding, counted_comparisons() as comparisons:
        embedding.save_snapshot("next", kind="incremental")
        check_saved(embedding, "next")
    assert comparisons == [1]
    assert "does not belong to these live rows" in caplog.text


def test_a_check_of_a_snapshot_while_a_save_ends_loses_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = writer.NewSnapshots.publish
    with make(options("host", tmp_path), "adagrad") as embedding:
        manager = embedding.table_handle().snapshot_manager

        def change_check_and_publish(new: writer.NewSnapshots) -> None:
            train(embedding, range(5, 15))
            manager.check_snapshot(manager.open_by_name("base"))
            publish(new)

        train(embedding, range(9))
        embedding.save_snapshot("base")
        with monkeypatch.context() as patch:
            patch.setattr(writer.NewSnapshots, "publish", change_check_and_publish)
            embedding.save_snapshot("first", kind="incremental")
        embedding.save_snapshot("second", kind="incremental")
        check_saved(embedding, "second")
