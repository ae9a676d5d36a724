"""Loading an incremental snapshot onto its parent's rows reads only the increment, and gives what any load gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.changed_rows import Calls, call, calls, check_saved
from support.embeddings import contents, make, train
from support.examples import examples
from support.killed import copy_as_killed
from support.small_snapshots import flip_bit
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.embedding.tables import increments
from tierbed.engine.durable import read_record_bytes, seal, unseal
from tierbed.engine.errors import SnapshotError, StoreError
from tierbed.engine.row_format import Change
from tierbed.snapshots.files.format import MANIFEST

LIFECYCLES: list[dict[str, Any]] = [{}, {"capacity": 60, "eviction": "lru"}, {"ttl_steps": 3}, {"admission": 0.7}]
SNAPSHOTS = Path("store", "rows", "snapshots")


def state_of(embedding: MultiTableEmbedding) -> list[Any]:
    table = embedding.table_handle().table
    counts = table.counts.read_table_counts(table.scan).tolist()
    return [
        contents(embedding).tobytes(),
        table.describe(),
        counts,
        embedding.size(),
        table.lifecycle.removed_counts.tolist(),
    ]


def change(embedding: MultiTableEmbedding, steps: Calls) -> None:
    for kind, rows in steps:
        call(embedding, kind, rows)


@pytest.mark.parametrize("store", ["host", "cached_host", "ssd", "ssd_host"])
@examples(0.2)
@given(
    parts=st.lists(calls, min_size=2, max_size=4),
    order=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    later=calls,
    lifecycle=st.sampled_from(LIFECYCLES),
)
def test_loads_in_any_order_give_the_saved_rows(
    tmp_path_factory: pytest.TempPathFactory,
    store: str, parts: list[Calls], order: list[int], later: Calls, lifecycle: dict[str, Any],
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    how = lambda name: options(store, folder / name, **lifecycle)  # noqa: E731
    with make(how("store"), "adagrad") as embedding:
        saved = []
        for i, steps in enumerate(parts):
            change(embedding, steps)
            embedding.save_snapshot(str(i), kind="incremental" if i else "full")
            saved.append(contents(embedding).tobytes())
        for i in order:
            embedding.load_snapshot(str(min(i, len(parts) - 1)))
            assert contents(embedding).tobytes() == saved[min(i, len(parts) - 1)]
        name = str(min(order[-1], len(parts) - 1))
        shutil.copytree(folder / SNAPSHOTS, folder / "other" / "rows" / "snapshots")
        with make(how("other"), "adagrad") as other:
            other.load_snapshot(name)
            for each in (embedding, other):
                change(each, [(kind, rows) for kind, rows in later if kind != "put"])
            assert state_of(embedding) == state_of(other)
        embedding.save_snapshot("last", kind="incremental")
        check_saved(embedding, "last")
        rows = contents(embedding).tobytes()
    with make(how("store"), "adagrad") as embedding:
        assert contents(embedding).tobytes() == rows


def at_parent(folder: Path, store: str) -> tuple[MultiTableEmbedding, list[bytes]]:
    """An embedding with the rows of "base", which two increments follow, and the rows of each snapshot."""
    embedding, saved = make(options(store, folder / "store"), "adagrad"), []
    for i, name in enumerate(("base", "first", "second")):
        train(embedding, range(40 * i, 40 * i + 300))
        embedding.delete(np.arange(20 * i, 20 * i + 10), 0)
        embedding.save_snapshot(name, kind="incremental" if i else "full")
        saved.append(contents(embedding).tobytes())
    embedding.load_snapshot("base")
    return embedding, saved


def damage(folder: Path, name: str) -> str:
    file = next((folder / SNAPSHOTS / name).glob("bucket-*"))
    flip_bit(file, 8 * file.stat().st_size - 1)
    return file.name


def edit_manifest(folder: Path, name: str, edit: Callable[[Any], object]) -> None:
    manifest = folder / SNAPSHOTS / name / MANIFEST
    content = unseal(read_record_bytes(manifest))
    edit(content)
    manifest.write_bytes(seal(content))


on_stores = pytest.mark.parametrize("store", ["host", "cached_host", "ssd", "ssd_host"])


@on_stores
def test_the_parent_is_not_read(tmp_path: Path, store: str) -> None:
    embedding, saved = at_parent(tmp_path, store)
    with embedding:
        file = damage(tmp_path, "base")
        report = embedding.load_snapshot("second")
        assert (report.rows, report.left_out, report.remarks) == (embedding.size(), 0, [])
        assert contents(embedding).tobytes() == saved[2]
        with pytest.raises(SnapshotError, match=file):
            embedding.load_snapshot("first")  # removes rows that the increments brought


@on_stores
def test_changed_rows_are_read_from_the_whole_chain(tmp_path: Path, store: str) -> None:
    embedding, saved = at_parent(tmp_path, store)
    with embedding:
        train(embedding, range(5))
        embedding.load_snapshot("second")
        assert contents(embedding).tobytes() == saved[2]


@pytest.mark.parametrize("what", ["damaged", "missing", "replaced"])
def test_a_bad_chain_changes_no_row(tmp_path: Path, what: str) -> None:
    embedding, saved = at_parent(tmp_path, "ssd")
    with embedding:
        problem = "first"
        if what == "damaged":
            problem = damage(tmp_path, "first")
        else:
            shutil.rmtree(tmp_path / SNAPSHOTS / "first")
        if what == "replaced":
            shutil.copytree(tmp_path / SNAPSHOTS / "base", tmp_path / SNAPSHOTS / "first")
        with pytest.raises(SnapshotError, match=problem):
            embedding.load_snapshot("second")
        assert contents(embedding).tobytes() == saved[0]
        train(embedding, range(5))


@pytest.mark.parametrize(
    ("store", "count"), [("host", 1), ("cached_host", 10**6), ("ssd", 10**6), ("ssd_host", -(10**6))]
)
def test_a_manifest_with_a_wrong_row_count_changes_no_row(tmp_path: Path, store: str, count: int) -> None:
    embedding, saved = at_parent(tmp_path, store)
    with embedding:
        edit_manifest(tmp_path, "second", lambda content: content.update(rows=max(0, content["rows"] + count)))
        with pytest.raises(SnapshotError, match="rows instead of"):
            embedding.load_snapshot("second")
        assert contents(embedding).tobytes() == saved[0]


@pytest.mark.parametrize("has_counts", [True, False])
def test_rows_are_read_from_disk_only_if_a_manifest_lacks_counts(tmp_path: Path, has_counts: bool) -> None:
    embedding, saved = at_parent(tmp_path, "ssd")
    with embedding:
        if not has_counts:  # as in a snapshot of rows that ranks share
            edit_manifest(tmp_path, "second", lambda content: content["description"].pop("row_counts"))
        before = embedding.metrics()["ssd"]
        embedding.load_snapshot("second")
        after = embedding.metrics()
        assert has_counts == all(before[name] == after["ssd"][name] for name in ("hits", "misses"))
        assert contents(embedding).tobytes() == saved[2]
        counts = [after["tables"][label]["rows"] for label in embedding.spec.labels]
        assert counts == np.bincount(contents(embedding)["table"], minlength=len(counts)).tolist()


@on_stores
def test_a_load_that_fails_halfway_or_is_killed(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, saved = at_parent(tmp_path, store)
    apply_changes = increments.apply_changes

    def fail(*args: Any) -> Iterator[Change]:
        yield next(apply_changes(*args))
        copy_as_killed(tmp_path / "store", tmp_path / "killed")
        raise OSError("the test's error")

    with embedding:
        monkeypatch.setattr(increments, "apply_changes", fail)
        with pytest.raises(OSError, match="the test's error"):
            embedding.load_snapshot("second")
        monkeypatch.undo()
        for use in (lambda: train(embedding, [1]), lambda: embedding.save_snapshot("bad")):
            with pytest.raises(StoreError, match=r"[lL]oad a snapshot"):
                use()
        with make(options(store, tmp_path / "killed"), "adagrad") as recovered:
            assert contents(recovered).tobytes() == saved[2]
        embedding.load_snapshot("second")
        assert contents(embedding).tobytes() == saved[2]


def test_an_iteration_that_a_load_in_place_overtakes_goes_on_with_the_old_rows(tmp_path: Path) -> None:
    embedding, saved = at_parent(tmp_path, "host")
    with embedding:
        scan = embedding.table_handle().table.scan()
        rows = [next(scan)[1]]
        embedding.load_snapshot("second")
        assert np.concatenate([*rows, *(part for _, part in scan)]).tobytes() == saved[0]
