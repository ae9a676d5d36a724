"""Asking the process that trains an embedding, over the socket in its store folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ...engine.errors import InputError, OptionError, SnapshotError, StoreError, TierbedError
from ..files.format import Manifest, check_name, snapshot_id
from ..files.reader import Snapshot
from .protocol import MAX_PACKETS, SOCKET, Message, connect, peer_of, receive, send

TIMEOUT = 60.0  # seconds without an answer

_RAISED: Mapping[str, type[TierbedError]] = {kind.__name__: kind for kind in (SnapshotError, OptionError)}

RowsWritten = Callable[[int, int | None], None]


def ask_status(store: Path, timeout: float = TIMEOUT) -> dict[str, Any] | None:
    """How far the process is that has the store open; None where no process has, or it does not serve the folder.

    The status has `name`, `step`, `rows`, `pid`, and `saving`: the save for another process that is under way, None
    without one. `saving` has `name`, `rows` written so far, and `of` how many where that is known. Raises StoreError
    where the process gives no answer in `timeout` seconds.
    """
    trainer = _Trainer.of(store, timeout)
    if trainer is None:
        return None
    for answer in trainer.answers({"do": "status"}, "tell how far it is"):
        if isinstance(status := answer.get("status"), dict):
            return status
    raise StoreError(f"process {trainer.pid} went away before it answered; ask again")


def request_save(
    store: Path,
    name: str,
    kind: str = "full",
    progress: RowsWritten | None = None,
    timeout: float = TIMEOUT,
    overwrite: bool = False,
    stores: Sequence[Path] = (),
) -> Manifest | None:
    """Let the process that has the store open save a snapshot at the end of its present step.

    stores: those of which it is to save one each, all or none.

    Returns when the snapshot is durable; returns None where no process has the store open, or it does not serve the
    folder. `progress` is called with how many rows are written, and of how many, None where that is not known. Raises
    SnapshotError and OptionError as the save does, and StoreError where no message comes for `timeout` seconds or the
    process goes away.
    """
    check_name(name)
    trainer = _Trainer.of(store, timeout)
    if trainer is None:
        return None
    place = store / "snapshots" / name
    before = snapshot_id(place)
    paths = [os.path.realpath(path) for path in stores]
    request: Message = {"do": "save", "name": name, "kind": kind, "overwrite": overwrite}
    if len(paths) > 1:  # an older trainer does not know this request, and would save one store by the other
        request |= {"do": "save all", "stores": paths}
    for answer in trainer.answers(request, f"save snapshot {name!r}"):
        if "done" in answer:
            return Snapshot.open(place).manifest
        if progress is not None and isinstance(rows := answer.get("rows"), int):
            progress(rows, answer.get("of"))
    there = snapshot_id(place) not in ("", before)
    left = "the snapshot is there, whole" if there else "nothing of the snapshot is to be seen; save it again"
    raise StoreError(f"process {trainer.pid} went away while it saved snapshot {name!r}: {left}")


def request_prune(
    store: Path, keep_last: int, keep_every: int | None, timeout: float = TIMEOUT
) -> tuple[list[str], list[str]] | None:
    """Let the process that has the store open prune its snapshots. The names of those removed, and of those kept.

    None where no process has the store open, or it does not serve the folder. Raises as `request_save`.
    """
    done = _answer(store, {"do": "prune", "keep_last": keep_last, "keep_every": keep_every}, "prune", timeout)
    return None if done is None else (done["removed"], done["kept"])


def ask_row(store: Path, table: int | str, key: int, timeout: float = TIMEOUT) -> dict[str, Any] | None:
    """A row, as `plain_row` has it, of the process that has the store open; {} where it was never written.

    None where no process has the store open, or it does not serve the folder. Raises as `request_save`.
    """
    also = {**_RAISED, InputError.__name__: InputError}
    return _answer(store, {"do": "get", "table": table, "key": key}, "read a row", timeout, also)


def _answer(
    store: Path, request: Message, wish: str, timeout: float, raised: Mapping[str, type[TierbedError]] = _RAISED
) -> Any:
    trainer = _Trainer.of(store, timeout)
    if trainer is None:
        return None
    trainer.raised = raised
    for answer in trainer.answers(request, wish):
        if "done" in answer:
            return answer["done"]
    raise StoreError(f"process {trainer.pid} went away before it answered; ask again")


class _Trainer:
    """A connection to the process at the socket of a store folder, good for one request."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.pid = peer_of(connection).pid
        self._connection = connection
        self._timeout = timeout
        self.raised = _RAISED
        self._waits = False  # whether the trainer has confirmed the request

    @classmethod
    def of(cls, store: Path, timeout: float) -> _Trainer | None:
        try:
            connection = connect(store, timeout)
        except PermissionError as error:
            raise StoreError(f"another user trains {str(store)!r}; ask as that user: {error}") from error
        except OSError as error:
            raise StoreError(f"the socket {str(store / SOCKET)!r} cannot be used: {error}") from error
        return None if connection is None else cls(connection, timeout)

    def answers(self, request: Message, wish: str) -> Iterator[Message]:
        """The trainer's messages until the connection ends. Every message of progress begins the timeout anew."""
        with self._connection:
            with suppress(BrokenPipeError):  # the trainer has said why not, and closed
                send(self._connection, request)
            deadline = monotonic() + self._timeout
            while (answer := self._next(deadline, wish)) is not None:
                if "error" in answer:
                    raise self.raised.get(str(answer.get("type")), StoreError)(str(answer["error"]))
                if "waiting" in answer:
                    self._waits = True
                else:
                    deadline = monotonic() + self._timeout
                yield answer

    def _next(self, deadline: float, wish: str) -> Message | None:
        try:
            self._connection.settimeout(max(deadline - monotonic(), 1e-3))
            with suppress(ConnectionResetError):  # comes first where the trainer closed without reading all
                return receive(self._connection, MAX_PACKETS)
            return receive(self._connection, MAX_PACKETS)
        except TimeoutError:
            found = "came to no end of a step, or of a read," if self._waits else "did not answer"
            raise StoreError(
                f"process {self.pid} was asked to {wish} and {found} for {self._timeout:g} seconds. If it is at work, "
                "see whether it did so after all, and ask again with a longer timeout; if it is stopped, let it "
                "continue, or end it and use the closed store"
            ) from None
        except ValueError as error:
            raise StoreError(f"process {self.pid} gave an answer that is none: {error}") from error
