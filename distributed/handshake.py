"""The handshake before an operation of ranks: all are in the same call, can make it, and agree on its arguments.

It is one all-to-all of headers. All headers of all operations have one size, so ranks that are in different calls learn
of it; a transfer of unequal sizes would end the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from ..engine import errors
from ..engine.errors import GroupError, TierbedError
from .rank_group import CollectiveSequence, PendingAllToAll, RankGroup

# of a header: whether it refuses, checksums of op and numbers, the count for the receiver, a note, wants more
FIELDS = 6
MAX_NAMES = 3  # of values that differ between ranks, in an error


class HandshakeResult(NamedTuple):
    """What the headers of all ranks say, by rank."""

    counts: list[int]  # what each rank sends to this one
    notes: list[int]
    wants_more: bool  # whether a rank asks for more


class Handshake:
    """One all-to-all of headers, in flight until `wait`.

    op: what every rank must be about to do. same: values that must be equal on all ranks, by name. counts: by rank,
    how much this one sends. note: a number for all ranks. wants_more: whether the ranks are to do more after this.
    error: why this rank cannot take part.
    """

    def __init__(
        self,
        group: RankGroup,
        op: str,
        error: BaseException | None = None,
        same: Mapping[str, Any] | None = None,
        counts: Sequence[int] | None = None,
        note: int = 0,
        wants_more: bool = False,
    ) -> None:
        self._group, self._op, self._error, self._same = group, op, error, dict(same or {})
        self._result: HandshakeResult | None = None
        self.refused: BaseException | None = None  # what `wait` raised
        if group.size == 1:
            self.refused, self._result = error, HandshakeResult([*(counts or [0])], [note], wants_more)
            return
        group.check_thread()
        if group.pending is not None:
            group.pending.wait()  # a rank may have sent other headers instead: all ranks learn of it before these
        given = np.empty((group.size, FIELDS), np.int64)  # by NumPy, whose small calls take a fraction of torch's time
        given[:] = (error is not None, _checksum(op), _checksum(self._same), 0, note, wants_more)
        if counts is not None:
            given[:, 3] = counts
        self._first = given[0, :3].tolist()
        self._exchange: PendingAllToAll = group.start(op, torch.from_numpy(given))
        group.pending = self

    def wait(self) -> HandshakeResult:
        """Wait for all headers. If a rank refuses, or ranks differ, raises on every rank, and nothing has moved.

        Raises the class of the lowest refusing rank's error if that is a TierbedError, else GroupError.
        """
        if self.refused is not None:
            raise self.refused
        if self._result is not None:
            return self._result
        self._group.pending = None
        headers = self._exchange.wait().tolist()
        self._group.note_started_by_all(self._exchange.call)
        if self._first[0] or any(header[:3] != self._first for header in headers):
            try:
                self._refuse()
            except BaseException as error:
                self.refused = error
                raise
        counts, notes, wants_more = ([header[field] for header in headers] for field in range(3, FIELDS))
        self._result = HandshakeResult(counts, notes, any(wants_more))
        return self._result

    def _refuse(self) -> NoReturn:
        group, error = self._group, self._error
        why = None if error is None else {"kind": type(error).__name__, "message": _text(str(error))}
        sent = msgpack.packb({"op": self._op, "same": _texts(self._same), "error": why})
        every = [msgpack.unpackb(data) for data in group.exchange_bytes(self._op, sent)]
        failed = {rank: one["error"] for rank, one in enumerate(every) if one["error"] is not None}
        if error is not None and not isinstance(error, Exception):
            group.raise_shared(error)  # Ctrl-C stays what it is where it was pressed
        if not failed:
            group.mismatches += 1
            group.raise_shared(GroupError(_difference(every)))
        rank, one = next(iter(failed.items()))
        kind: Any = getattr(errors, one["kind"], None)
        known = isinstance(kind, type) and issubclass(kind, TierbedError)
        more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        message = one["message"] if known else f"{one['kind']}: {one['message']}"
        shared = (kind if known else GroupError)(f"rank {rank}: {message}{more}")
        group.raise_shared(shared, error if rank == group.rank else None)


def _checksum(value: Any) -> int:
    try:
        return zlib.crc32(msgpack.packb(value, default=repr))
    except (ValueError, OverflowError):  # of a number or a text that msgpack cannot carry
        return zlib.crc32(repr(value).encode(errors="backslashreplace"))


def _text(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text.encode(errors="backslashreplace").decode()


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Values by name, as text. The parts of a map, and of a CollectiveSequence, have its name and theirs."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        parts = value.parts if isinstance(value, CollectiveSequence) else value
        named = {f"{name}: {key}": one for key, one in parts.items()} if isinstance(parts, dict) else {name: parts}
        texts |= {key: _text(one) for key, one in named.items()}
    return texts


def _difference(every: Sequence[Mapping[str, Any]]) -> str:
    """Which ranks are about to do what, or which number differs."""
    if any(one["op"] != every[0]["op"] for one in every):
        calls = "; ".join(f"rank {rank}: {one['op']}" for rank, one in enumerate(every))
        return (
            f"ranks are in different calls, {calls}; lookups, steps and saves of embeddings of a World are made by all "
            "ranks in the same order"
        )
    values = [one["same"] for one in every]
    every_name = dict.fromkeys(name for one in values for name in one)
    names = [name for name in every_name if any(one.get(name) != values[0].get(name) for one in values)]
    shown = names[:MAX_NAMES]
    by_rank = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name}={one.get(name)}" for name in shown) for rank, one in enumerate(values)
    )
    more = f" (and {len(names) - len(shown)} more differ)" if len(names) > len(shown) else ""
    return f"{every[0]['op']}: ranks differ, {by_rank}{more}; give all ranks the same"
