"""Sends requests to the process that has a store open, over the socket in the store folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ...engine.errors import InputError, OptionError, SnapshotError, StoreError, TierbedError
from ..files.format import Manifest, check_name, snapshot_id
from ..files.reader import Snapshot
from .protocol import MAX_PACKETS, SOCKET, Message, connect, peer_of, receive, send

TIMEOUT = 60.0  # seconds without a message

_RAISED: dict[str, type[TierbedError]] = {kind.__name__: kind for kind in (SnapshotError, OptionError)}

RowsWritten = Callable[[int, int | None], None]


def request_status(store: Path, timeout: float = TIMEOUT) -> dict[str, Any] | None:
    """The status of the process that has the store open; None if no process has, or if it does not serve the folder.

    The status has `name`, `step`, `rows`, `pid`, and `saving`: the save for another process that is running, or None.
    `saving` has `name`, `rows` written so far, and `of`, the total if it is known. Raises StoreError if the process
    does not answer for `timeout` seconds.
    """
    status: dict[str, Any] | None = _answer(store, {"do": "status"}, "report its status", timeout, "status")
    return status


def request_save(
    store: Path,
    name: str,
    kind: str = "full",
    progress: RowsWritten | None = None,
    timeout: float = TIMEOUT,
    overwrite: bool = False,
    stores: Sequence[Path] = (),
) -> Manifest | None:
    """Have the process that has the store open save a snapshot at the end of its current step.

    stores: stores of that process to save, all or none.

    Returns when the snapshot is durable, or None if no process has the store open or if it does not serve the folder.
    `progress` is called with the number of rows written and the total, None if that is unknown. Raises SnapshotError
    and OptionError as the save does, and StoreError if no message arrives for `timeout` seconds or the process exits.
    """
    check_name(name)
    client = _Client.of(store, timeout)
    if client is None:
        return None
    folder = store / "snapshots" / name
    before = snapshot_id(folder)
    paths = [os.path.realpath(path) for path in stores]
    request: Message = {"do": "save", "name": name, "kind": kind, "overwrite": overwrite}
    if len(paths) > 1:  # a request that an older trainer refuses: it would save one store only
        request |= {"do": "save all", "stores": paths}
    for answer in client.answers(request, f"save snapshot {name!r}"):
        if "done" in answer:
            return Snapshot.open(folder).manifest
        if progress is not None and isinstance(rows := answer.get("rows"), int):
            progress(rows, answer.get("of"))
    is_saved = snapshot_id(folder) not in ("", before)
    result = "the snapshot is complete" if is_saved else "the snapshot was not written; save it again"
    raise StoreError(f"process {client.pid} exited while it saved snapshot {name!r}: {result}")


def request_prune(
    store: Path, keep_last: int, keep_every: int | None, timeout: float = TIMEOUT
) -> tuple[list[str], list[str]] | None:
    """Have the process that has the store open prune its snapshots. Returns the names of removed and of kept ones.

    Returns None if no process has the store open, or if it does not serve the folder. Raises as `request_save`.
    """
    done = _answer(store, {"do": "prune", "keep_last": keep_last, "keep_every": keep_every}, "prune", timeout)
    return None if done is None else (done["removed"], done["kept"])


def request_row(store: Path, table: int | str, key: int, timeout: float = TIMEOUT) -> dict[str, Any] | None:
    """A row, as of `plain_row`, from the process that has the store open; {} if it was never written.

    Returns None if no process has the store open, or if it does not serve the folder. Raises as `request_save`.
    """
    row: dict[str, Any] | None = _answer(store, {"do": "get", "table": table, "key": key}, "read a row", timeout)
    return row


def _answer(store: Path, request: Message, wish: str, timeout: float, field: str = "done") -> Any:
    """The field that the answer has; None as of `request_status`."""
    client = _Client.of(store, timeout)
    if client is None:
        return None
    for answer in client.answers(request, wish):
        if field in answer:
            return answer[field]
    raise StoreError(f"process {client.pid} exited before it answered; ask again")


class _Client:
    """A connection to the process at the socket of a store folder, for one request."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.pid, _ = peer_of(connection)
        self._connection = connection
        self._timeout = timeout
        self._waits = False  # whether the server has received the request

    @classmethod
    def of(cls, store: Path, timeout: float) -> _Client | None:
        try:
            connection = connect(store, timeout)
        except PermissionError as error:
            raise StoreError(f"a process of another user has {str(store)!r} open; run as that user: {error}") from error
        except OSError as error:
            raise StoreError(f"the socket {str(store / SOCKET)!r} cannot be used: {error}") from error
        return None if connection is None else cls(connection, timeout)

    def answers(self, request: Message, wish: str) -> Iterator[Message]:
        """The messages of the server until the connection ends. Each message of progress restarts the timeout."""
        with self._connection:
            with suppress(BrokenPipeError):  # the server has sent an error and closed
                send(self._connection, request)
            deadline = monotonic() + self._timeout
            # else it is a step's of the other process: the caller gave no such input
            raised = {**_RAISED, InputError.__name__: InputError} if request["do"] == "get" else _RAISED
            while (answer := self._next(deadline, wish)) is not None:
                if "error" in answer:
                    raise raised.get(str(answer.get("type")), StoreError)(str(answer["error"]))
                if "waiting" in answer:
                    self._waits = True
                else:
                    deadline = monotonic() + self._timeout
                yield answer

    def _next(self, deadline: float, wish: str) -> Message | None:
        try:
            self._connection.settimeout(max(deadline - monotonic(), 1e-3))
            with suppress(ConnectionResetError):  # is raised first if the server closed without reading everything
                return receive(self._connection, MAX_PACKETS)
            return receive(self._connection, MAX_PACKETS)
        except TimeoutError:
            problem = "did not finish its current step" if self._waits else "did not answer"
            raise StoreError(
                f"process {self.pid} was asked to {wish} and {problem} for {self._timeout:g} seconds. If it is "
                "running, check whether it did so later, or ask again with a longer timeout; if it is stopped, let it "
                "continue, or end it and use the closed store"
            ) from None
        except ValueError as error:
            raise StoreError(f"process {self.pid} sent an invalid reply: {error}") from error
