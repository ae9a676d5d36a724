"""A trainer saves snapshots that other processes ask for: of whole steps, and it trains as if nobody had asked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.asked import STORE, Training, dies_as_it_saves, fills, forks, trains, waits
from support.background_saves import until
from support.cuda_tables import on_devices, tables_on
from support.embeddings import contents, make, train
from support.forked import in_process
from support.killed import embedding_at, holds, rows_after, step, steps
from support.refusals import check_refusal
from support.small_snapshots import whole
from support.stores import STORES, options
from support.warm import Child
from tierbed import InputError, MultiTableEmbedding, SnapshotError, StoreError
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.options.lookup import Lookup
from tierbed.snapshots import Snapshot
from tierbed.snapshots.control import protocol as channel
from tierbed.snapshots.control import server as serving
from tierbed.snapshots.control.client import request_save, request_status

ask = ThreadPoolExecutor(4)


def saved(store: Path, name: str) -> Snapshot:
    """Asked for, and whole: the rows after its step."""
    assert request_save(store, name) is not None
    snapshot = Snapshot.open(store / "snapshots" / name)
    snapshot.verify()
    assert whole(snapshot).tobytes() == rows_after(snapshot.description["step"])
    return snapshot


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


@pytest.fixture
def embedding(tmp_path: Path) -> Iterator[MultiTableEmbedding]:
    """After 3 steps."""
    with embedding_at(tmp_path, "device") as embedding:
        steps(embedding, 3)
        yield embedding


@contextlib.contextmanager
def a_step_under_way(embedding: MultiTableEmbedding) -> Iterator[Callable[[], None]]:
    """Pinned, with what ends it."""
    ids = torch.arange(5)
    pinned = embedding.pin([Lookup(ids, torch.zeros_like(ids))])
    yield lambda: pinned.update([torch.ones_like(pinned.gather(0))])


def request_in_thread(store: Path, name: str = "s", **more: Any) -> Future[Any]:
    """A client in another thread, once the trainer has heard it."""
    answer = ask.submit(request_save, store, name, **more)
    until(lambda: answer.done() or (request_status(store) or {}).get("saving"))
    return answer


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("ahead")
def test_a_snapshot_holds_whole_steps_and_training_is_as_without(tmp_path: Path, store: str, ahead: int) -> None:
    training = Training(trains, tmp_path, store, ahead)
    first, second, third = (saved(training.store, name).description["step"] for name in "abc")
    count = training.end()
    assert 1 <= first <= second <= third <= count
    with embedding_at(tmp_path, store) as embedding:
        holds(embedding, count)
        assert embedding.last_snapshot == "c"


def test_an_idle_trainer_answers_and_a_kill_goes_back_to_the_snapshot_that_was_asked_for(tmp_path: Path) -> None:
    training = Training(waits, tmp_path, "cached_host")
    kept = saved(training.store, "a")
    status = {"name": STORE, "step": 1, "rows": kept.manifest.rows, "pid": training.pid, "saving": None}
    assert request_status(training.store) == status
    training.kill()
    assert (training.store / "SOCKET").is_socket()
    assert request_status(training.store) is None
    assert request_save(training.store, "b") is None
    with embedding_at(tmp_path, "cached_host") as embedding:
        holds(embedding, kept.description["step"])
        steps(embedding, 2)
        saved(training.store, "b")


def test_a_step_that_is_under_way_is_waited_for(tmp_path: Path, store: Path) -> None:
    """It has evicted rows for its own before it writes them."""
    embedding = make(options("host", tmp_path, capacity=40, eviction="lru"), "adagrad", tables=1)
    for begin in range(0, 60, 5):
        train(embedding, range(begin, begin + 5))
    with a_step_under_way(embedding) as end:
        timeout, said = 0.2, ""
        while "did not finish its current step" not in said:  # or it did not answer yet
            with pytest.raises(StoreError, match=rf"process {os.getpid()} (was asked to save|is saving)") as error:
                request_save(store, "s", timeout=timeout)
            timeout, said = 2 * timeout, str(error.value)
        until(lambda: request_status(store)["saving"] is None)  # whoever asked has gone
        answer = request_in_thread(store)
        said = f"process {os.getpid()} is saving snapshot 's'"
        check_refusal((lambda: request_save(store, "t"), StoreError, said))
        end()
    assert answer.result(60).rows == 40
    snapshot = Snapshot.open(store / "snapshots" / "s")
    assert snapshot.description["step"] == 13
    assert whole(snapshot).tobytes() == contents(embedding).tobytes()
    embedding.close()


def test_a_step_that_failed_does_not_hold_a_snapshot_up(store: Path, embedding: MultiTableEmbedding) -> None:
    with a_step_under_way(embedding):
        answer = request_in_thread(store)
        until(lambda: embedding.table_handle().open_table.step_gate.has_reader)  # later than it is heard
    step(embedding)
    assert answer.result(60).description["step"] == 3
    holds(embedding, 4)


def test_a_snapshot_has_its_turn_whatever_the_trainer_does(store: Path, embedding: MultiTableEmbedding) -> None:
    """Steps, reads, and rows that are replaced by those of a snapshot."""
    embedding.save_snapshot("before")
    answer = ask.submit(saved, store, "s")
    while not answer.done():
        step(embedding)
        embedding.get(torch.arange(3), 0)
        embedding.load_snapshot("before")
    answer.result()
    holds(embedding, 3)


def test_the_socket_is_there_while_the_store_is_open_and_for_its_user_alone(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a folder of a long name"] * 6)
    place = deep / STORE / "SOCKET"
    assert len(str(place)) > 108
    threads, files, before = threading.active_count(), len(os.listdir("/proc/self/fd")), os.umask(0)
    try:
        with embedding_at(deep, "device") as embedding:
            assert request_status(place.parent) is None
            steps(embedding, 3)
            assert place.stat().st_mode & 0o777 == 0o600
            assert saved(place.parent, "a").description["step"] == 3
    finally:
        os.umask(before)
    assert not place.exists()
    assert request_status(place.parent) is None
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def _as_nobody(store: Path) -> str:
    os.setuid(65534)
    with pytest.raises(StoreError) as error:
        request_status(store)
    return str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(store: Path, embedding: MultiTableEmbedding) -> None:
    for folder in (store, *store.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    assert "another user's process has" in in_process(_as_nobody, store)
    (store / "SOCKET").chmod(0o666)
    assert f"serves only user {os.geteuid()}" in in_process(_as_nobody, store)


def test_a_forked_child_does_not_stand_in_for_a_killed_trainer(tmp_path: Path) -> None:
    training = Training(forks, tmp_path)
    child = training.says()
    training.kill()
    try:
        assert request_status(training.store) is None
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stopped_trainer_is_named_with_what_to_do(tmp_path: Path) -> None:
    training = Training(waits, tmp_path)
    os.kill(training.pid, signal.SIGSTOP)
    said = f"process {training.pid} was asked to save", "did not answer for 0.2 seconds"
    check_refusal((lambda: request_save(training.store, "a", timeout=0.2), StoreError, *said))
    os.kill(training.pid, signal.SIGCONT)
    saved(training.store, "b")
    training.end()


def test_a_trainer_that_is_killed_in_a_save_leaves_nothing_of_it(tmp_path: Path) -> None:
    training = Training(dies_as_it_saves, tmp_path)
    kept = request_save(training.store, "kept")
    said = f"process {training.pid} exited while it saved", "the snapshot was not written"
    check_refusal((lambda: request_save(training.store, "lost"), StoreError, *said))
    training.kill()  # it is dead; its pipe is closed
    with embedding_at(tmp_path, "device") as embedding:
        assert embedding.size() == kept.rows
        assert embedding.metrics()["table"]["step"] == kept.description["step"]
        assert [path.name for path in (training.store / "snapshots").iterdir() if path.name[0] != "."] == ["kept"]


def _asks_and_dies(store: Path) -> None:
    request_save(store, "a", progress=lambda rows, of: os.kill(os.getpid(), signal.SIGKILL))


def test_a_save_whose_client_is_killed_is_finished(tmp_path: Path) -> None:
    training = Training(fills, tmp_path)
    assert training.says() == "filled"
    assert Child(_asks_and_dies, training.store).wait() == -signal.SIGKILL
    until(lambda: request_status(training.store)["saving"] is None)
    Snapshot.open(training.store / "snapshots" / "a").verify()
    training.end()


def test_a_store_that_closes_undoes_what_was_asked(tmp_path: Path, store: Path, embedding: MultiTableEmbedding) -> None:
    with a_step_under_way(embedding):
        answer = request_in_thread(store)
    embedding.close()
    check_refusal((lambda: answer.result(60), SnapshotError, "closed the store before snapshot 's' was complete"))
    with embedding_at(tmp_path, "device") as embedding:
        holds(embedding, 3)
        assert embedding.last_snapshot is None


def test_errors_come_to_the_client_and_progress_counts_every_row(
    store: Path, embedding: MultiTableEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_PROGRESS_SECONDS", 0)
    messages: list[tuple[int, int | None]] = []
    manifest = request_save(store, "a", progress=lambda rows, of: messages.append((rows, of)))
    assert messages[0] == (0, manifest.rows)
    assert messages[-1] == (manifest.rows, manifest.rows)
    assert messages == sorted(messages)
    for name, kind, error, said in (
        ("a", "full", SnapshotError, "/a' exists"),
        ("../x", "full", SnapshotError, "../x"),
        ("b", "half", ValueError, "kind='half'"),
    ):
        check_refusal((partial(request_save, store, name, kind), error, said))


@on_devices
@pytest.mark.parametrize("store", ["device", "host", "cached_host"])
def test_a_snapshot_of_rows_on_a_gpu(device: Device, tmp_path: Path, store: str) -> None:
    """It may come to what the trainer did wrong before the trainer knows, which still gets the result."""
    with tables_on(device) as place, make(options(store, tmp_path), "adagrad") as embedding:
        embedding.to(place)

        def step_of(tables: list[int]) -> None:
            ids = torch.arange(2, device=place)
            pinned = embedding.pin([Lookup(ids, torch.tensor(tables, device=place))])
            pinned.update([torch.ones_like(pinned.gather(0))])

        step_of([0, 1])
        step_of([2, 3])
        with pytest.raises(StoreError, match=r"table_ids of embedding 'rows'.*changed nothing"):
            request_save(tmp_path / STORE, "a")
        with pytest.raises(InputError, match="table_ids"):
            step_of([0, 1])
        step_of([1, 2])
        assert request_save(tmp_path / STORE, "a").description["step"] == 2
        assert whole(Snapshot.open(tmp_path / STORE / "snapshots" / "a")).tobytes() == contents(embedding).tobytes()


def _connected(store: Path) -> socket.socket:
    connection = channel.connect(store, 30)
    assert connection is not None
    return connection


def test_bad_clients_hurt_nobody(store: Path, embedding: MultiTableEmbedding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_CLIENT_SECONDS", 0.3)
    with contextlib.ExitStack() as stack:
        for bad in (b"\xff\x00", b"[" * 60000, b"[]", b"{}", b'{"do": "save", "name": 3}', b"x" * 150_000):
            client = stack.enter_context(_connected(store))
            client.send(bad)
            assert "error" in channel.receive(client)
        _connected(store).close()
        asks = stack.enter_context(_connected(store))
        channel.send(asks, {"do": "save", "name": "unheard", "kind": "full", "overwrite": False, "stores": []})
        asks.shutdown(socket.SHUT_RDWR)
        silent = [stack.enter_context(_connected(store)) for _ in range(20)]
        assert all("error" in channel.receive(client) for client in silent)
        with _connected(store) as client, pytest.raises(OSError, match="too long"):
            client.send(bytes(1 << 25))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, pytest.raises(OSError, match="wrong type"):
            stream.connect(str(store / "SOCKET"))
        steps(embedding, 2)
        saved(store, "a")
        holds(embedding, 5)


def test_a_folder_without_a_socket_trains_on(tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture) -> None:
    (store / "SOCKET" / "in the way").mkdir(parents=True)
    with caplog.at_level("INFO", "tierbed"), embedding_at(tmp_path, "device") as embedding:
        steps(embedding, 3)
        assert "no `tierbed snapshot save` while it is open" in caplog.records[-1].getMessage()
    with embedding_at(tmp_path, "device") as embedding:
        holds(embedding, 3)


def test_clients_that_come_and_go_at_once_are_all_served(store: Path, embedding: MultiTableEmbedding) -> None:
    def served(_: int) -> bool:
        while True:
            try:
                return request_status(store) is not None
            except StoreError as error:
                if "too many clients; ask again" not in str(error):  # there are on a busy machine
                    raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(12) as clients:
            assert all(clients.map(served, range(200)))
    finally:
        sys.setswitchinterval(interval)
