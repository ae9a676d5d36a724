"""Sends requests to a store's lock holder, the process that has the store open, over the socket in the store folder.

The functions return None if the store is not open, or if the lock holder serves no socket. The functions raise
StoreError if the lock holder exits or sends nothing for `timeout` seconds. They also raise the lock holder's errors.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ...engine.errors import InputError, OptionError, SnapshotError, StoreError, TierbedError
from ..files.format import Manifest, check_name, read_snapshot_id
from ..files.reader import Snapshot
from .protocol import MAX_PACKETS, SOCKET, Message, connect, read_peer_credentials, receive, send

TIMEOUT = 60.0  # seconds to wait for a message from the lock holder

_ERROR_TYPES: dict[str, type[TierbedError]] = {kind.__name__: kind for kind in (SnapshotError, OptionError)}

TotalProgressCallback = Callable[[int, int | None], None]


def request_status(store: Path, timeout: float = TIMEOUT) -> dict[str, Any] | None:
    """Returns the lock holder's `name`, `step`, `rows`, `pid` and `saving`.

    saving: a dict while the lock holder runs a save for another process, otherwise None. In this dict, `name` is the
    snapshot's name, `rows` is the number of rows written so far, and `of` is the total number, or None if unknown.
    """
    return _request(store, {"do": "status"}, "report its status", timeout, "status")


def request_save(
    store: Path,
    name: str,
    kind: str = "full",
    progress: TotalProgressCallback | None = None,
    timeout: float = TIMEOUT,
    overwrite: bool = False,
    stores: Sequence[Path] = (),
) -> Manifest | None:
    """Ask the lock holder to save a snapshot after its current step, and wait until the snapshot is durable.

    progress: called with the number of rows written so far, and the total number if known, else None. stores: paths of
    several stores to save together; the lock holder saves all of them or none.
    """
    check_name(name)
    folder = store / "snapshots" / name
    old_id = read_snapshot_id(folder)
    paths = [os.path.realpath(path) for path in stores] if len(stores) > 1 else []
    request = {"do": "save", "name": name, "kind": kind, "overwrite": overwrite, "stores": paths}
    pid, answers = _send_request(store, request, f"save snapshot {name!r}", timeout)
    if pid is None:
        return None
    for answer in answers:
        if "done" in answer:
            return Snapshot.open(folder).manifest
        if progress is not None and isinstance(rows := answer.get("rows"), int):
            progress(rows, answer.get("of"))
    is_saved = read_snapshot_id(folder) not in ("", old_id)
    result = "the snapshot is complete" if is_saved else "the snapshot was not written; save it again"
    raise StoreError(f"process {pid} exited while it saved snapshot {name!r}: {result}")


def request_prune(
    store: Path, keep_last: int, keep_every: int | None, timeout: float = TIMEOUT
) -> tuple[list[str], list[str]] | None:
    """Ask the lock holder to prune. Returns the names of the removed and of the kept snapshots."""
    done = _request(store, {"do": "prune", "keep_last": keep_last, "keep_every": keep_every}, "prune", timeout)
    return None if done is None else (done["removed"], done["kept"])


def request_row(store: Path, table: int | str, key: int, timeout: float = TIMEOUT) -> dict[str, Any] | None:
    """Ask the lock holder for a row. Returns a dict like `to_plain_row`, or {} for a row that was never written."""
    return _request(store, {"do": "get", "table": table, "key": key}, "read a row", timeout)


def _request(store: Path, request: Message, action: str, timeout: float, field: str = "done") -> dict[str, Any] | None:
    """Send a request, and return the value of `field` in the answer."""
    pid, answers = _send_request(store, request, action, timeout)
    if pid is None:
        return None
    for answer in answers:
        if field in answer:
            result: dict[str, Any] = answer[field]
            return result
    raise StoreError(f"process {pid} exited before it answered; ask again")


def _send_request(store: Path, request: Message, action: str, timeout: float) -> tuple[int | None, Iterator[Message]]:
    """Send a request. Returns the server's process id (None if there is no server) and an iterator of its answers."""
    try:
        connection = connect(store, timeout)
    except PermissionError as error:
        raise StoreError(f"another user's process has {str(store)!r} open; run as that user: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot connect to the socket {str(store / SOCKET)!r}: {error}") from error
    if connection is None:
        return None, iter(())
    pid, _ = read_peer_credentials(connection)
    return pid, _receive(connection, pid, request, action, timeout)


def _receive(connection: socket.socket, pid: int, request: Message, action: str, timeout: float) -> Iterator[Message]:
    """Yields the server's messages until the connection ends. Each progress message restarts the timeout."""
    # Only a `get` request can have wrong input. Otherwise, an InputError comes from training, not from the request.
    error_types = {**_ERROR_TYPES, InputError.__name__: InputError} if request["do"] == "get" else _ERROR_TYPES
    problem, deadline = "did not answer", monotonic() + timeout
    with connection:
        with suppress(BrokenPipeError):  # the server has sent an error and closed the connection
            send(connection, request)
        while True:
            try:
                connection.settimeout(max(deadline - monotonic(), 1e-3))
                try:
                    answer = receive(connection, MAX_PACKETS)
                except ConnectionResetError:  # the server did not read the whole request, but may have answered
                    answer = receive(connection, MAX_PACKETS)
            except TimeoutError:
                raise StoreError(
                    f"process {pid} was asked to {action}, but {problem} for {timeout:g} seconds. If the process is "
                    "running, check later whether the work is done, or ask again with a longer timeout. If the process "
                    "is suspended, resume it, or end it and use the closed store"
                ) from None
            except ValueError as error:
                raise StoreError(f"process {pid} sent an invalid reply: {error}") from error
            if answer is None:
                return
            if "error" in answer:
                raise error_types.get(str(answer.get("type")), StoreError)(str(answer["error"]))
            if "waiting" in answer:
                problem = "did not finish its current step"
            else:
                deadline = monotonic() + timeout
            yield answer
