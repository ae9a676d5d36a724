"""Saving under a name that is taken: refused, or the new snapshot takes the place of the old one, killed or not."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.power import Disk

from support import small_snapshots as snapshots
from support.asked import Training, waits
from support.embeddings import contents, make, train
from support.forked import in_process
from support.killed import Warm, copy_as_killed
from support.records import last_snapshot
from support.refusals import check_refusal
from support.shell import command
from support.small_snapshots import chunked, description, make_buckets
from support.stores import STORES, options
from support.together import Model
from tierbed import MultiTableEmbedding, OptionError, SnapshotError, StoreError
from tierbed.distributed.world import World
from tierbed.embedding.saving.save_and_load import save_together
from tierbed.snapshots import Snapshot, list_snapshots, write_snapshot
from tierbed.snapshots.control.client import request_save
from tierbed.snapshots.files.read_errors import ReadIOError
from tierbed.snapshots.files.verify import find_chains, verify_all
from tierbed.snapshots.files.writer import check_name_free
from tierbed.snapshots.store.group import StoreGroup


def open_embedding(path: Path, store: str = "device", dtype: Any = torch.float32, **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), "adagrad", tables=1, dtype=dtype)


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


@pytest.fixture
def embedding(tmp_path: Path) -> Iterator[MultiTableEmbedding]:
    """At step 2, with the snapshot "final" of step 1."""
    with open_embedding(tmp_path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("final")
        train(embedding, range(3))
        yield embedding


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


def test_what_others_go_over_is_not_overwritten_and_told_before_training(
    tmp_path: Path, embedding: MultiTableEmbedding
) -> None:
    check_refusal((lambda: save(embedding, "final", "incremental"), SnapshotError, "'final'", 'kind="full"'))
    embedding.save_snapshot("over", "incremental")
    (tmp_path / "rows" / "snapshots" / "notes").mkdir()
    for call, *named in (
        (lambda: embedding.check_save("final", overwrite=True), "final' cannot be overwritten", "parent of 'over'"),
        (lambda: save(embedding, "final"), "final' cannot be overwritten", "parent of 'over'"),
        (lambda: save(embedding, "final", "background"), "final' cannot be overwritten", "parent of 'over'"),
        (lambda: embedding.check_save("over"), "over' exists"),
        (lambda: save(embedding, "notes"), "notes' is not a snapshot"),
    ):
        check_refusal((call, SnapshotError, *named))
    check_refusal((lambda: embedding.check_save("new", "checkpoint"), OptionError, "kind='checkpoint'"))
    embedding.check_save("over", overwrite=True)
    embedding.check_save("new", "incremental")
    assert embedding.last_snapshot == "over"
    assert (step_of(tmp_path, "final"), step_of(tmp_path, "over")) == (1, 2)


def test_an_overwriting_save_that_fails_leaves_the_old_one(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    def stop(rows: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    embedding.save_snapshot("monday")
    manager = embedding.table_handle().snapshot_manager
    with pytest.raises(SnapshotError, match=r"'final' was not written.*no space"):
        save_together(World.single(), [manager], "final", overwrite=True, progress=stop)
    assert (embedding.last_snapshot, step_of(tmp_path, "final"), names(tmp_path)) == ("monday", 1, {"final", "monday"})
    assert embedding.prune_snapshots(2) == []
    save(embedding, "final")
    assert (embedding.last_snapshot, step_of(tmp_path, "final")) == ("final", 2)


def test_a_snapshot_that_another_took_the_place_of_is_no_base(tmp_path: Path) -> None:
    with open_embedding(tmp_path) as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("monday")
    final = tmp_path / "rows" / "snapshots" / "final"
    snapshots.save(final)  # and the process was killed
    assert last_snapshot(tmp_path / "rows") == "monday"
    (final / "manifest.msgpack").write_bytes(b"damaged")
    assert last_snapshot(tmp_path / "rows") == "monday"
    with open_embedding(tmp_path) as embedding:  # what is damaged may be replaced
        train(embedding, range(3))
        save(embedding, "final")
        assert (embedding.last_snapshot, step_of(tmp_path, "final")) == ("final", 2)


def test_a_save_that_the_record_cannot_name_leaves_the_old_one(
    tmp_path: Path, embedding: MultiTableEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: StoreGroup, *_: object, **__: object) -> None:
        raise StoreError("no space left")

    for kind in ("full", "background"):
        for name in ("final", "new"):
            with monkeypatch.context() as patch:
                patch.setattr(StoreGroup, "write", full)
                check_refusal((partial(save, embedding, name, kind), StoreError, "no space"))
            assert step_of(tmp_path, "final") == 1
            assert {one for one in names(tmp_path) if not one.startswith("replaced-")} == {"final"}
    assert (embedding.last_snapshot, last_snapshot(tmp_path / "rows")) == ("final", "final")
    save(embedding, "final")
    assert (step_of(tmp_path, "final"), names(tmp_path)) == (2, {"final"})


def test_of_stores_trained_together_what_was_replaced_is_kept_until_the_record_has_moved_on(tmp_path: Path) -> None:
    def replaced() -> list[int]:
        """How many snapshots of each store are kept for recovery under another name."""
        return [len(list(tmp_path.glob(f"{name}/snapshots/replaced-*"))) for name in "ab"]

    model = Model(tmp_path, ("host", "host"))
    model.steps(1)
    model.save_snapshot("best")
    for _ in range(3):
        model.steps(1)
        model.members[0].save_snapshot("best", overwrite=True)
        assert replaced() == [1, 0]  # b has no later snapshot
        model.members[1].save_snapshot("best", overwrite=True)
        assert replaced() == [1, 0]  # which nothing needs since
    model.members[0].prune_snapshots(9)
    assert replaced() == [0, 0]
    for number in range(3):
        model.steps(1)
        model.members[number % 2].save_snapshot("best", overwrite=True)
    model.save_snapshot("best", overwrite=True)
    assert replaced() == [0, 0]
    model.close()


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    final = tmp_path / "rows" / "snapshots" / "final"
    final.rename(tmp_path / "elsewhere")
    final.symlink_to(tmp_path / "elsewhere")
    save(embedding, "final")
    assert (step_of(tmp_path, "final"), final.is_symlink()) == (2, False)
    assert Snapshot.open(tmp_path / "elsewhere").description["step"] == 1


def refuse_exchanges(path: Path) -> None:
    shim = ctypes.CDLL(None)
    with open_embedding(path) as embedding:
        embedding.save_snapshot("final")
        train(embedding, range(3))
        for number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            shim.fail_exchange(number)
            for call in (embedding.check_save, embedding.save_snapshot):
                with pytest.raises(SnapshotError, match=r"cannot be overwritten: .*cannot exchange two folders"):
                    call("final", overwrite=True)
            assert (embedding.last_snapshot, step_of(path, "final"), names(path)) == ("final", 0, {"final"})
        save(embedding, "new")  # nothing is replaced
        shim.fail_exchange(0)
        save(embedding, "final")
        assert step_of(path, "final") == 1


def test_a_file_system_that_cannot_exchange_folders_keeps_the_old_one(tmp_path: Path) -> None:
    in_process(refuse_exchanges, tmp_path)


def test_a_running_trainer_and_commands_overwrite_where_they_are_asked_to(tmp_path: Path) -> None:
    training = Training(waits, tmp_path)
    store = training.store
    request_save(store, "final")
    check_refusal((lambda: request_save(store, "final"), SnapshotError, "exists"))
    second = request_save(store, "final", overwrite=True)
    assert second is not None
    assert second.id == Snapshot.open(store / "snapshots" / "final").manifest.id
    training.end()
    for words in (["save", store, "final"], ["merge", store, "final", "merged"], ["merge", store, "final", "merged"]):
        assert command("snapshot", *words, "--overwrite") == 0
    assert command("snapshot", "merge", store, "merged", "final", "--overwrite") == 1  # the live rows go back to it
    for more, code in (([], 0), ([], 1), (["--overwrite"], 0)):
        assert command("snapshot", "export", store, "final", tmp_path / "final.npz", *more) == code
    merged, final = (Snapshot.open(store / "snapshots" / name).manifest for name in ("merged", "final"))
    assert (merged.files, final.id == second.id) == (final.files, False)


REPLACED_PREFIX = r"x' was replaced or removed while it was read: read it again"
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
    chains, damaged = find_chains([old])
    write_snapshot(folder, description(), chunked(make_buckets(6, dict.fromkeys(ROWS, 11))), overwrite=True)
    with pytest.raises(ReadIOError, match=REPLACED_PREFIX):
        list(reading) if how == "read" else verify_all(chains, damaged, lambda count: None)
    Snapshot.open(folder).verify()
    next(folder.glob("bucket-*")).unlink()
    with pytest.raises(SnapshotError, match="is damaged") as caught:
        Snapshot.open(folder).verify()
    assert not isinstance(caught.value, ReadIOError)


def test_asking_whether_a_snapshot_can_be_replaced_fails_no_save_that_replaces_it(tmp_path: Path) -> None:
    snapshots.save(tmp_path / "x")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(check_name_free, tmp_path / "x", True) for _ in range(100)]
        for _ in range(20):
            write_snapshot(tmp_path / "x", description(), chunked(make_buckets(6, {3: 5})), overwrite=True)
        for answer in asked:
            answer.result()
    assert [place.name for place in tmp_path.iterdir()] == ["x"]


OLD, BASE, NEW = 2, 3, 4  # steps of the snapshot that is replaced, of the one saved last, and of the one that replaces
IDS = torch.arange(3)
GRAD = torch.ones(3, 1)  # rows follow from the number of steps


def killed_at(place: str, call: str, number: int, when: int, events: int, act: Callable[[], None]) -> None:
    """`act`, in which the process is killed at the `number`th `call`, or after it."""
    signal.alarm(60)  # what hangs fails
    shim = ctypes.CDLL(None)
    trace = os.open(Path(place, "trace"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    shim.watch_calls(os.fsencode(Path(place, "store")), os.fsencode(Path(place, "aside")), trace)
    shim.die_at(call.encode(), ctypes.c_long(number), when)
    act()
    shim.die_at(b"", ctypes.c_long(0), 0)
    os.write(events, b"returned\n")
    os.kill(os.getpid(), signal.SIGKILL)


def kills(warm: Warm, path: Path, call: str, stride: int, begun: Path | None = None, **plan: Any) -> Iterator[Any]:
    """The folder of a kill at the first `call` and at each `stride`th behind it, its number, and whether none came."""
    number, returned = 1, False
    while not returned:
        place = path / f"{call}-{number}"
        (place / "aside").mkdir(parents=True)
        shutil.copytree(begun, place / "store", symlinks=True) if begun else (place / "store").mkdir()
        answer = warm.order(plan | {"place": str(place), "call": call, "number": number, "when": number % 2})
        assert answer["signal"] == signal.SIGKILL
        returned = "returned" in answer["events"]
        yield place, number, returned
        number += stride
    assert number > 1 + stride, f"no {call} was reached"


def convert(place: str, store: str, call: str, number: int, when: int, events: int) -> None:
    """Load the float32 rows into a bfloat16 table and train on."""
    embedding = open_embedding(Path(place, "store"), store, torch.bfloat16)
    embedding.size()

    def act() -> None:
        embedding.load_snapshot("wide", convert=True)
        train(embedding, range(9))

    killed_at(place, call, number, when, events, act)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("store", ["ssd", pytest.param("host", marks=SLOW), pytest.param("ssd_host", marks=SLOW)])
def test_a_kill_amid_a_conversion_leaves_rows_of_one_dtype_and_every_snapshot(tmp_path: Path, store: str) -> None:
    begun, narrow_type = tmp_path / "begun", torch.bfloat16
    with open_embedding(begun, store) as embedding:
        train(embedding, range(12))
        embedding.save_snapshot("wide")
    with open_embedding(begun, store, narrow_type, open="fresh") as embedding:
        embedding.load_snapshot("wide", convert=True)
        converted = contents(embedding).tobytes()
        train(embedding, range(6, 15))
        embedding.save_snapshot("narrow")
        narrow = contents(embedding).tobytes()
    warm = Warm(convert)
    more = {} if store == "ssd" else {"sync": 6, "write": 23}
    for call, stride in {"rename": 3, **more}.items():
        for place, _, returned in kills(warm, tmp_path, call, stride, begun, store=store):
            listing = list_snapshots(place / "store" / "rows" / "snapshots")
            assert not listing.damaged
            assert [snapshot.name for snapshot in listing.snapshots] == ["wide", "narrow"]
            with open_embedding(place / "store", store, narrow_type) as embedding:
                assert contents(embedding).tobytes() in ([narrow] if returned else [narrow, converted])
                embedding.load_snapshot("wide", convert=True)
                assert contents(embedding).tobytes() == converted


def rows_after(steps: int) -> bytes:
    with make(options("device"), "adagrad", tables=1) as embedding:
        for _ in range(steps):
            train(embedding, IDS, grad=GRAD)
        return contents(embedding).tobytes()


def overwrite(
    place: str, store: str, kind: str, call: str, number: int, when: int, background: bool, events: int
) -> None:
    """Replace the snapshot "final"."""
    embedding = open_embedding(Path(place, "store"), store)
    for step in range(1, NEW + 1):
        train(embedding, IDS, grad=GRAD)
        if step in (OLD, BASE):
            embedding.save_snapshot("final" if step == OLD else "other")

    def act() -> None:
        save = embedding.save_snapshot("final", kind, background, overwrite=True)
        if save is not None:
            save.wait()

    killed_at(place, call, number, when, events, act)


@pytest.mark.parametrize(
    ("store", "kind", "background"),
    [
        ("device", "full", False),
        pytest.param("host", "full", True, marks=SLOW),
        pytest.param("device", "incremental", False, marks=SLOW),
        pytest.param("ssd", "checkpoint", False, marks=SLOW),
    ],
)
def test_a_kill_or_power_loss_leaves_the_old_or_the_new(
    tmp_path: Path, store: str, kind: str, background: bool
) -> None:
    expected = {steps: rows_after(steps) for steps in (OLD, BASE, NEW)}
    seen: dict[str, set[int]] = {"killed": set(), "without power": set()}
    warm, plan = Warm(overwrite), {"store": store, "kind": kind, "background": background}
    more = {} if (store, kind) == ("device", "full") else {"unlink": 1, "mkdir": 1}
    for call, stride in {"rename": 1, "sync": 5, **more}.items():
        for place, number, returned in kills(warm, tmp_path, call, stride, **plan):
            copy_as_killed(place / "store", place / "killed")
            Disk(place / "store", (place / "trace").read_text()).cut(random.Random(number))
            seen["killed"].add(check(place / "killed", store, expected, returned))
            seen["without power"].add(check(place / "store", store, expected, returned))
    assert seen == {"killed": {OLD, NEW}, "without power": {OLD, NEW}}


def check(path: Path, store: str, expected: dict[int, bytes], returned: bool) -> int:
    """What is left is right. Returns the step of the snapshot under the name."""
    snapshots = path / "rows" / "snapshots"
    listing = list_snapshots(snapshots)
    assert not listing.damaged
    assert {snapshot.name for snapshot in listing.snapshots} == {"final", "other"}
    for snapshot in listing.snapshots:
        assert b"".join(rows.tobytes() for _, rows in snapshot.chunks()) == expected[snapshot.description["step"]]
    final = int(Snapshot.open(snapshots / "final").description["step"])
    assert final == NEW if returned else final in (OLD, NEW)
    base = last_snapshot(path / "rows")
    assert base == "final" if returned else base in ("other", "final" if final == NEW else "other")
    with open_embedding(path, store) as embedding:
        assert contents(embedding).tobytes() == expected[NEW if base == "final" else BASE]
        train(embedding, IDS, grad=GRAD)
        name = "after" if base == "final" else "final"
        embedding.save_snapshot(name, overwrite=final == OLD)  # else it does not count
        assert not [place.name for place in snapshots.iterdir() if place.name.startswith(".")]
    return final
