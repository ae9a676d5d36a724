"""Serves requests from other processes to an open store: save, prune, read a row, report the status."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, current_thread
from time import monotonic
from typing import Any, Protocol

from ...engine.errors import SnapshotError, StoreError, TierbedError, undo_on_error
from ...engine.signals import defer_signals
from ...engine.threads import Thread
from ..files.format import Manifest
from .protocol import Message, listen, open_folder_fd, read_peer_credentials, receive, remove_socket, send

log = logging.getLogger("tierbed")

_MAX_CLIENTS = 8  # how many clients are served at the same time
_CLIENT_SECONDS = 5.0  # timeout for receiving a request and for sending an answer
_PROGRESS_SECONDS = 0.1  # minimum interval between two progress messages
_MAX_ERROR = 8000  # maximum characters of an error text

_services: weakref.WeakSet[Service] = weakref.WeakSet()
# a forked child that outlives its parent must not keep the sockets open
os.register_at_fork(after_in_child=lambda: [*map(Service._close_descriptors, list(_services))])


class RequestHandler(Protocol):
    """The methods of an open table that the server calls."""

    def save_between_steps(self, save: ClientSaveRequest) -> Manifest | None:
        """Save a snapshot between two training steps. A thread of the server calls this method. Raises TierbedError.

        Returns None without saving if `save.is_given_up()` is True before the save starts. Calls `save.progress` with 0
        when the save starts, then with each chunk's row count. If `save.progress` raises, removes the new snapshot.
        """

    def prune_between_steps(
        self, keep_last: int, keep_every: int | None, progress: Callable[[int], None]
    ) -> tuple[list[str], list[str]]:
        """Prune the snapshots. Returns the names of the removed and of the kept snapshots. Raises TierbedError.

        Calls `progress` with the row count of each chunk that is folded.
        """

    def read_row_between_steps(self, table: int | str, key: int, give_up: Callable[[], bool]) -> dict[str, Any] | None:
        """Read a row's values between two steps. Returns {} for a missing row, or None once `give_up()` is True."""

    def status(self) -> dict[str, Any]:
        """Returns `name`, `step`, and the number of `rows`. Raises TierbedError."""


class Service:
    """Serves a store over a socket in its folder, from `start` to `stop`. Both methods defer signal handlers.

    One thread blocks in `accept`, and each client gets its own thread. A forked child has no server. Python's module
    `socketserver` does not fit: it polls for its shutdown, does not join daemon threads, and sets no thread limit.
    """

    def __init__(self) -> None:
        self._is_running = False
        self._save_lock = Lock()
        self._save: ClientSaveRequest | None = None  # the running save
        self._clients: dict[Thread, socket.socket] = {}

    def start(self, folder: Path, handler: RequestHandler) -> None:
        """Serve the store in `folder`, already locked by this process. If the server cannot start, log the reason."""
        with defer_signals():
            try:
                self._start(folder, handler)
            except (OSError, RuntimeError) as error:  # no socket, descriptor or thread is available
                log.info("store folder %s: no `tierbed snapshot save` while it is open: %s", folder, error)

    def _start(self, folder: Path, handler: RequestHandler) -> None:
        self._path, self._handler, self._stop_event = folder, handler, Event()
        self._folder_fd = open_folder_fd(folder)
        with undo_on_error(os.close, self._folder_fd):
            self._listener = listen(self._folder_fd)
        self._thread = Thread(target=self._accept, name="tierbed-server", daemon=True)
        _services.add(self)
        with undo_on_error(self._remove):
            self._thread.start()
        self._is_running = True

    def stop(self) -> None:
        """Remove the socket, undo a running save, and end all threads. A client's thread may also call `stop`."""
        if not self._is_running:
            return
        with defer_signals():
            self._stop_event.set()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._join(self._thread)
            for thread, client in list(self._clients.items()):
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RD)
                self._join(thread)
            self._remove()
            self._is_running = False

    @staticmethod
    def _join(thread: Thread) -> None:
        if thread is not current_thread():
            thread.join()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            remove_socket(self._folder_fd)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        _services.discard(self)
        for client in list(self._clients.values()):
            client.close()
        self._listener.close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def _accept(self) -> None:
        while not self._stop_event.is_set():
            try:
                self._start_client(self._listener.accept()[0])
            except OSError:  # the server stops, or no file descriptors are left
                self._stop_event.wait(1)
            except Exception:
                log.warning("a client of store folder %s was not served", self._path, exc_info=True)
                self._stop_event.wait(1)

    def _start_client(self, client: socket.socket) -> None:
        client.settimeout(_CLIENT_SECONDS)
        for thread, connection in list(self._clients.items()):  # copied, because threads remove their entries
            if not thread.is_alive():  # the thread died before it could remove itself
                self._clients.pop(thread, None)
                connection.close()
        thread = Thread(target=self._serve, args=(client,), name="tierbed-client", daemon=True)
        if len(self._clients) < _MAX_CLIENTS:
            self._clients[thread] = client
            try:
                thread.start()
                return
            except RuntimeError:  # the system allows no more threads
                del self._clients[thread]
            except BaseException:
                self._clients.pop(thread).close()
                raise
        with client, contextlib.suppress(OSError):
            send(client, _make_error(StoreError(f"process {os.getpid()} has too many clients; ask again")))

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                try:
                    answer = self._answer(client)
                except Exception as error:
                    if not isinstance(error, TierbedError):
                        log.warning("a client of store folder %s was not served", self._path, exc_info=True)
                    answer = _make_error(error)
                with contextlib.suppress(OSError):  # the client has exited
                    send(client, answer)
        finally:
            self._clients.pop(current_thread(), None)  # type: ignore[call-overload]

    def _answer(self, client: socket.socket) -> Message:
        try:
            (pid, user), request = read_peer_credentials(client), receive(client)
        except (OSError, ValueError) as error:
            raise StoreError(f"process {os.getpid()} received no valid request: {error}") from error
        if user != os.geteuid():
            raise StoreError(f"process {os.getpid()} serves only user {os.geteuid()}; run as that user")
        match request:
            case {"do": "status"}:
                saving = None
                if (save := self._save) is not None:
                    saving = {"name": save.name, "rows": save.report.num_rows, "of": save.num_total_rows}
                return {"status": {**self._handler.status(), "pid": os.getpid(), "saving": saving}}
            case {"do": "save", "name": str(name), "kind": str(kind), "overwrite": bool(over), "stores": list(stores)}:
                return self._save_for(client, pid, name, kind, over, [*map(str, stores)])
            case {"do": "prune", "keep_last": keep_last, "keep_every": keep_every}:
                progress = _ProgressReport(client).add_rows
                removed, kept = self._handler.prune_between_steps(keep_last, keep_every, progress)
                return {"done": {"removed": removed, "kept": kept}}
            case {"do": "get", "table": int() | str() as table, "key": int(key)}:
                row = self._handler.read_row_between_steps(table, key, self._stop_event.is_set)
                if row is None:
                    raise StoreError(f"process {os.getpid()} closed the store; ask again")
                return {"done": row}
        raise StoreError(f"process {os.getpid()} runs another version of tierbed, which does not know this request")

    def _save_for(
        self, client: socket.socket, pid: int, name: str, kind: str, overwrite: bool, stores: Sequence[str]
    ) -> Message:
        save = ClientSaveRequest(client, self._stop_event, self._handler, name, kind, overwrite, stores)
        if (is_abandoned := save.is_given_up()) or not self._save_lock.acquire(blocking=False):
            client.settimeout(_CLIENT_SECONDS)
            if is_abandoned:  # the client no longer waits, so do not report that another save is running
                raise save.make_undone_error()
            other = "another snapshot" if self._save is None else f"snapshot {self._save.name!r}"
            raise StoreError(f"process {os.getpid()} is saving {other}; ask again when that is done")
        self._save = save
        try:
            save.report.send({"waiting": "for the end of a step"})
            manifest = self._handler.save_between_steps(save)
            if manifest is None:
                raise save.make_undone_error()
            log.info("store folder %s: snapshot %r was saved for process %d", self._path, name, pid)
        except Exception as error:
            log.info("store folder %s: snapshot %r was not saved for process %d: %s", self._path, name, pid, error)
            raise
        finally:
            self._save = None
            self._save_lock.release()
            client.settimeout(_CLIENT_SECONDS)
        done = {"name": name, "kind": manifest.kind, "rows": manifest.rows, "bytes": manifest.total_bytes}
        return {"done": {**done, "step": manifest.description["step"]}}


class _ProgressReport:
    """Tells a client how many rows were processed, so that the client does not stop waiting."""

    def __init__(self, client: socket.socket) -> None:
        self.num_rows = 0
        self._client, self._next_time = client, 0.0

    def add_rows(self, count: int, **fields: int | None) -> None:
        self.num_rows += count
        if monotonic() >= self._next_time:
            self._next_time = monotonic() + _PROGRESS_SECONDS
            self.send({"rows": self.num_rows, **fields})

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the client has exited or does not receive; the work continues
            send(self._client, message)


@dataclass(eq=False)
class ClientSaveRequest:
    """A save that a client requested. While the client listens, it receives progress messages."""

    _client: socket.socket
    _stop_event: Event
    _handler: RequestHandler
    name: str
    kind: str
    overwrite: bool
    stores: Sequence[str]  # real paths of all stores to save together; if empty, only the handler's own store is saved
    num_total_rows: int | None = None  # the total number of rows; known once a full save of one store has started

    def __post_init__(self) -> None:
        self._client.setblocking(False)
        self.report = _ProgressReport(self._client)

    def is_given_up(self) -> bool:
        """True if the client no longer waits for the save, or the server stops. Called before the save starts."""
        if self._stop_event.is_set():
            return True
        try:
            return not self._client.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def make_undone_error(self) -> SnapshotError:
        if not self._stop_event.is_set():
            return SnapshotError(f"snapshot {self.name!r} was not started: the client that requested it has exited")
        return SnapshotError(
            f"process {os.getpid()} closed the store before snapshot {self.name!r} was complete, and removed the "
            "snapshot; save again, from the closed store"
        )

    def progress(self, count: int) -> None:
        if self._stop_event.is_set():
            raise self.make_undone_error()
        if self.num_total_rows is None and self.kind == "full" and not self.stores:
            self.num_total_rows = self._handler.status()["rows"]
        self.report.add_rows(count, of=self.num_total_rows)


def _make_error(error: Exception) -> Message:
    return {"error": str(error)[:_MAX_ERROR] or type(error).__name__, "type": type(error).__name__}
