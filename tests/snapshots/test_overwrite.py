"""Saving under a name that is taken: refused, or the new snapshot takes the place of the old one."""

from __future__ import annotations

import ctypes
import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support import small_snapshots as snapshots
from support.asked import STORE, Training, waits
from support.embeddings import contents, make, train
from support.forked import in_process
from support.records import last_snapshot
from support.refusals import check_refusal
from support.shell import command
from support.small_snapshots import chunked, description, make_buckets
from support.stores import STORES, options
from support.together import Model
from support.warm import SHIMMED
from tierbed import MultiTableEmbedding, OptionError, SnapshotError, StoreError
from tierbed.distributed.world import World
from tierbed.embedding.saving.save_and_load import save_together
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.control.client import request_save
from tierbed.snapshots.files.read_errors import ReadIOError
from tierbed.snapshots.files.verify import chains_of, verify_all
from tierbed.snapshots.files.writer import check_free
from tierbed.snapshots.store.group import Group


def open_embedding(path: Path, store: str = "device") -> MultiTableEmbedding:
    return make(options(store, path), "adagrad", tables=1)


def save(embedding: MultiTableEmbedding, name: str, kind: str = "full") -> None:
    """Saves over what has the name. kind: one of snapshots, or "background"."""
    how: dict[str, Any] = {"background": True} if kind == "background" else {"kind": kind}
    saving = embedding.save_snapshot(name, **how, overwrite=True)
    if saving is not None:
        saving.wait()


def step_of(path: Path, name: str) -> int:
    snapshot = Snapshot.open(path / "rows" / "snapshots" / name)
    snapshot.verify()
    return int(snapshot.description["step"])


def names(path: Path) -> set[str]:
    return {place.name for place in (path / "rows" / "snapshots").iterdir()}


@pytest.mark.parametrize("store", STORES)
def test_a_second_run_saves_under_the_name_of_the_first(tmp_path: Path, store: str) -> None:
    with open_embedding(tmp_path, store) as embedding:
        train(embedding, range(5))
        save(embedding, "final")  # a new name
        for kind in ["full", "background", "incremental", *(["checkpoint"] if store == "ssd" else [])]:
            train(embedding, range(3))
            with pytest.raises(SnapshotError, match=r"final' exists: .* or save with overwrite=True"):
                embedding.save_snapshot("final")
            if kind == "incremental":
                embedding.save_snapshot("before")
            save(embedding, "final", kind)
            assert embedding.last_snapshot == "final"
            step, saved = embedding.metrics()["table"]["step"], contents(embedding).tobytes()
            assert step_of(tmp_path, "final") == step
            train(embedding, range(7))
            embedding.load_snapshot("final")
            assert contents(embedding).tobytes() == saved
        assert names(tmp_path) == {"final", "before"}


def test_what_others_go_over_is_not_overwritten_and_told_before_training(tmp_path: Path) -> None:
    with open_embedding(tmp_path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("final")
        train(embedding, range(3))
        with pytest.raises(SnapshotError, match=r"'final' cannot be based on the one that it replaces: .* kind="):
            save(embedding, "final", "incremental")
        embedding.save_snapshot("over", "incremental")
        (tmp_path / "rows" / "snapshots" / "notes").mkdir()
        for call, *named in (
            (lambda: embedding.check_save("final", overwrite=True), "final' cannot", "the parent of 'over'"),
            (lambda: save(embedding, "final"), "final' cannot", "the parent of 'over'"),
            (lambda: save(embedding, "final", "background"), "final' cannot", "the parent of 'over'"),
            (lambda: embedding.check_save("over"), "over' exists"),
            (lambda: save(embedding, "notes"), "notes' is not a snapshot"),
        ):
            check_refusal((call, SnapshotError, *named))
        check_refusal((lambda: embedding.check_save("new", "checkpoint"), OptionError, "kind='checkpoint'"))
        embedding.check_save("over", overwrite=True)
        embedding.check_save("new", "incremental")
        assert embedding.last_snapshot == "over"
        assert (step_of(tmp_path, "final"), step_of(tmp_path, "over")) == (1, 2)


def test_an_overwriting_save_that_fails_leaves_the_old_one_and_what_rows_go_back_to(tmp_path: Path) -> None:
    with open_embedding(tmp_path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("final")
        train(embedding, range(3))
        embedding.save_snapshot("monday")
        train(embedding, range(3))

        def stop(rows: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        tables = [embedding.table_handle().snapshots]
        with pytest.raises(SnapshotError, match=r"'final' was not written.*no space"):
            save_together(World.of_one(), tables, "final", overwrite=True, progress=stop)
        assert embedding.last_snapshot == "monday"
        assert (step_of(tmp_path, "final"), names(tmp_path)) == (1, {"final", "monday"})
        assert embedding.prune_snapshots(2) == []
        embedding.save_snapshot("final", overwrite=True)
        assert (embedding.last_snapshot, step_of(tmp_path, "final")) == ("final", 3)


def test_a_snapshot_that_another_took_the_place_of_is_no_base(tmp_path: Path) -> None:
    with open_embedding(tmp_path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("final")
        embedding.save_snapshot("monday")
    final = tmp_path / "rows" / "snapshots" / "final"
    shutil.rmtree(final)
    snapshots.save(final)  # and the process was killed
    assert last_snapshot(tmp_path / "rows") == "monday"
    (final / "manifest.msgpack").write_bytes(b"damaged")
    assert last_snapshot(tmp_path / "rows") == "monday"
    with open_embedding(tmp_path) as embedding:  # what is damaged may be replaced
        train(embedding, range(3))
        save(embedding, "final")
        assert (embedding.last_snapshot, step_of(tmp_path, "final")) == ("final", 2)


def test_a_save_that_the_record_cannot_name_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Group, *_: object, **__: object) -> None:
        raise StoreError("no space left")

    with open_embedding(tmp_path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("final")
        train(embedding, range(3))
        for kind in ("full", "background"):
            for name in ("final", "new"):
                with monkeypatch.context() as patch:
                    patch.setattr(Group, "write", full)
                    with pytest.raises(StoreError, match="no space"):
                        save(embedding, name, kind)
                assert step_of(tmp_path, "final") == 1
                assert {one for one in names(tmp_path) if not one.startswith("replaced-")} == {"final"}
        assert (embedding.last_snapshot, last_snapshot(tmp_path / "rows")) == ("final", "final")
        save(embedding, "final")
        assert (step_of(tmp_path, "final"), names(tmp_path)) == (2, {"final"})


def replaced(path: Path) -> dict[str, int]:
    """How many snapshots of each store are kept for recovery under another name."""
    return {name: len(list(path.glob(f"{name}/snapshots/replaced-*"))) for name in "ab"}


def test_of_stores_trained_together_what_was_replaced_is_kept_until_the_record_has_moved_on(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "host"))
    model.steps(1)
    model.save_snapshot("best")
    for _ in range(3):
        model.steps(1)
        model.members[0].save_snapshot("best", overwrite=True)
        assert replaced(tmp_path) == {"a": 1, "b": 0}  # b has no later snapshot
        model.members[1].save_snapshot("best", overwrite=True)
        assert replaced(tmp_path) == {"a": 1, "b": 0}  # which nothing needs since
    model.members[0].prune_snapshots(9)
    assert replaced(tmp_path) == {"a": 0, "b": 0}
    for number in range(3):
        model.steps(1)
        model.members[number % 2].save_snapshot("best", overwrite=True)
    model.save_snapshot("best", overwrite=True)
    assert replaced(tmp_path) == {"a": 0, "b": 0}
    model.close()


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    with open_embedding(tmp_path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("final")
        snapshots = tmp_path / "rows" / "snapshots"
        (snapshots / "final").rename(tmp_path / "elsewhere")
        (snapshots / "final").symlink_to(tmp_path / "elsewhere")
        train(embedding, range(3))
        embedding.save_snapshot("final", overwrite=True)
    assert step_of(tmp_path, "final") == 2
    assert not (snapshots / "final").is_symlink()
    assert Snapshot.open(tmp_path / "elsewhere").description["step"] == 1


def refuse_exchanges(path: Path) -> None:
    shim = ctypes.CDLL(None)
    with open_embedding(path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("final")
        train(embedding, range(3))
        for number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            shim.fail_exchange(number)
            for save in (embedding.check_save, embedding.save_snapshot):
                with pytest.raises(SnapshotError, match=r"cannot be overwritten: .*cannot exchange two folders"):
                    save("final", overwrite=True)
            assert (embedding.last_snapshot, step_of(path, "final"), names(path)) == ("final", 1, {"final"})
        embedding.save_snapshot("new", overwrite=True)  # nothing is replaced
        shim.fail_exchange(0)
        embedding.save_snapshot("final", overwrite=True)
        assert step_of(path, "final") == 2


def test_a_file_system_that_cannot_exchange_folders_keeps_the_old_one(tmp_path: Path) -> None:
    in_process(refuse_exchanges, tmp_path, server=SHIMMED)


def test_a_running_trainer_and_commands_overwrite_where_they_are_asked_to(tmp_path: Path) -> None:
    training = Training(waits, tmp_path)
    first = request_save(training.store, "final")
    with pytest.raises(SnapshotError, match="exists"):
        request_save(training.store, "final")
    second = request_save(training.store, "final", overwrite=True)
    assert first is not None
    assert second is not None
    assert first.id != second.id == Snapshot.open(training.store / "snapshots" / "final").manifest.id
    training.end()
    store = str(tmp_path / STORE)
    for words in (["save", store, "final"], ["merge", store, "final", "merged"], ["merge", store, "final", "merged"]):
        assert command("snapshot", *words, "--overwrite") == 0
    assert command("snapshot", "merge", store, "merged", "final", "--overwrite") == 1  # the live rows go back to it
    for more, code in (([], 0), ([], 1), (["--overwrite"], 0)):
        assert command("snapshot", "export", store, "final", tmp_path / "final.npz", *more) == code
    merged = Snapshot.open(training.store / "snapshots" / "merged").manifest
    final = Snapshot.open(training.store / "snapshots" / "final").manifest
    assert merged.files == final.files
    assert final.id != second.id


REPLACED = r"x' was replaced by another while it was read: read it again"
ROWS = dict.fromkeys(range(64), 9)


@pytest.mark.parametrize("how", ["read", "verified", "a checkpoint"])
def test_a_snapshot_that_is_replaced_while_others_read_it_is_not_called_damaged(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "rows" / "snapshots" / "x"
    if how == "a checkpoint":
        with open_embedding(tmp_path, "ssd") as embedding:
            train(embedding, range(100))
            embedding.save_snapshot("x", "checkpoint")
    else:
        snapshots.save(folder, ROWS)
    old = Snapshot.open(folder)
    reading = old.chunks(max_rows=4)
    if how == "read":
        next(reading)
    chains, damaged = chains_of([old])
    write_snapshot(folder, description(), chunked(make_buckets(6, dict.fromkeys(ROWS, 11))), overwrite=True)
    with pytest.raises(ReadIOError, match=REPLACED):
        list(reading) if how == "read" else verify_all(chains, damaged, lambda count: None)
    Snapshot.open(folder).verify()
    next(folder.glob("bucket-*")).unlink()
    with pytest.raises(SnapshotError, match="is damaged") as caught:
        Snapshot.open(folder).verify()
    assert not isinstance(caught.value, ReadIOError)


def test_asking_whether_a_snapshot_can_be_replaced_fails_no_save_that_replaces_it(tmp_path: Path) -> None:
    snapshots.save(tmp_path / "x")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(check_free, tmp_path / "x", True) for _ in range(100)]
        for _ in range(20):
            write_snapshot(tmp_path / "x", description(), chunked(make_buckets(6, {3: 5})), overwrite=True)
        for answer in asked:
            answer.result()
    assert [place.name for place in tmp_path.iterdir()] == ["x"]
