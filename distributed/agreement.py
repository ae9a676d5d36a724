"""How ranks agree, before an operation moves anything, that each of them wants it and can do it.

Every operation over ranks begins with one all-to-all of headers. All headers of all operations have one size, so ranks
that meet in different operations learn of it; a transfer of unequal sizes would end the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from ..engine import errors
from ..engine.errors import GroupError, TierbedError
from .rank_group import CollectiveSequence

if TYPE_CHECKING:
    from .rank_group import PendingAllToAll, RankGroup

FIELDS = 6  # of a header: whether it refuses, the checksums of op and numbers, the count for the receiver, a note, asks

MOST_NAMED = 3  # of what differs between ranks, an error names so much


class HandshakeResult(NamedTuple):
    """What the headers of all ranks say, by rank."""

    counts: list[int]  # what each rank sends to this one
    notes: list[int]
    asked: bool  # whether a rank asks for more


class Handshake:
    """One exchange of headers, on its way from here until `settle`.

    op: what every rank must be about to do. same: numbers that must be equal on all ranks, by name. counts: by rank,
    how much this one sends. note: a number for all ranks. asks: whether the ranks are to do more after this.
    error: why this rank cannot take part.
    """

    def __init__(
        self,
        world: RankGroup,
        op: str,
        error: BaseException | None = None,
        same: Mapping[str, Any] | None = None,
        counts: Sequence[int] | None = None,
        note: int = 0,
        asks: bool = False,
    ) -> None:
        world.check_thread()
        self._world, self._op, self._error, self._same = world, op, error, dict(same or {})
        if world.pending is not None:
            world.pending.settle()  # in the place of its headers a rank may have sent others: all are told before these
        self._answer: HandshakeResult | None = None
        self.refused: BaseException | None = None  # what `settle` raised
        given = np.empty((world.size, FIELDS), np.int64)  # by NumPy, whose small calls take a fraction of torch's time
        given[:] = (error is not None, _checksum(op), _checksum(self._same), 0, note, asks)
        if counts is not None:
            given[:, 3] = counts
        self._first = given[0, :3].tolist()
        self._headers = np.empty_like(given)
        out, sent = (torch.from_numpy(headers.reshape(-1)) for headers in (self._headers, given))
        sizes = [FIELDS] * world.size
        self._exchange: PendingAllToAll = world.start(op, out, sent, sizes, sizes)
        world.pending = self

    def settle(self) -> HandshakeResult:
        """Wait for all headers. Where a rank refuses, or ranks differ, raises on every rank, and nothing has moved.

        Raises the class of the lowest refusing rank's error where that is a TierbedError, else GroupError.
        """
        if self.refused is not None:
            raise self.refused
        if self._answer is not None:
            return self._answer
        self._world.pending = None
        self._exchange.wait()
        self._world.met(self._exchange.call)
        headers = self._headers.tolist()
        if self._first[0] or any(header[:3] != self._first for header in headers):
            try:
                self._refuse()
            except BaseException as error:
                self.refused = error
                raise
        counts, notes, asks = ([header[field] for header in headers] for field in range(3, FIELDS))
        self._answer = HandshakeResult(counts, notes, any(asks))
        return self._answer

    def _refuse(self) -> NoReturn:
        same = _packed(self._same, lambda one: one.parts if isinstance(one, CollectiveSequence) else repr(one))
        said = msgpack.packb({"op": self._op, "same": msgpack.unpackb(same), "error": _told(self._error)})
        every = [msgpack.unpackb(data) for data in all_gather_bytes(self._world, self._op, said)]
        raise_first_error([one["error"] for one in every], self._error, self._world)
        self._world.differed += 1
        self._world.told = GroupError(_difference(every))
        raise self._world.told


def handshake(
    world: RankGroup,
    op: str,
    error: BaseException | None = None,
    same: Mapping[str, Any] | None = None,
    counts: Sequence[int] | None = None,
    note: int = 0,
    asks: bool = False,
) -> HandshakeResult:
    """Exchange headers and wait for them, as `Handshake`."""
    with world.whole(op):
        return Handshake(world, op, error, same, counts, note, asks).settle()


def call_on_all_ranks(world: RankGroup, op: str, call: Callable[[], Any]) -> Any:
    """The result of a call that every rank makes for itself. What it raises on one rank is raised on all."""
    result, error = catch(call)
    handshake(world, op, error)
    return result


def all_gather_object(world: RankGroup, op: str, call: Callable[[], Any]) -> list[Any]:
    """What `call` returned on each rank, as msgpack carries it. What it raises on one rank is raised on all."""
    value, error = catch(call)
    with world.whole(op):
        handshake(world, op, error)
        every = all_gather_bytes(world, op, msgpack.packb(value))
    return [msgpack.unpackb(data, strict_map_key=False) for data in every]


@contextmanager
def raise_on_all_ranks(world: RankGroup, op: str) -> Iterator[None]:
    """A block of exchanges that all ranks make. What it raises before the first of them is raised on all ranks."""
    before = world.calls
    try:
        yield
    except BaseException as error:
        if world.calls == before and world.untold(error):
            handshake(world, op, error)
        raise


def catch(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(the result of `call`, None), or (None, what it raised), to be told to the other ranks."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def raise_first_error(told: Sequence[Mapping[str, str] | None], error: BaseException | None, world: RankGroup) -> None:
    """Raise the first error that ranks told, if there is one. error: that of this rank."""
    if error is not None and not isinstance(error, Exception):
        world.told = error
        raise error  # Ctrl-C stays what it is where it was pressed
    failed = {rank: one for rank, one in enumerate(told) if one is not None}
    if not failed:
        return
    rank, one = next(iter(failed.items()))
    kind: Any = getattr(errors, one["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, TierbedError)
    more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
    message = one["message"] if known else f"{one['kind']}: {one['message']}"
    world.told = (kind if known else GroupError)(f"rank {rank}: {message}{more}")
    raise world.told from (error if rank == world.rank else None)


def all_gather_bytes(world: RankGroup, op: str, data: bytes, readers: int | None = None) -> list[bytes]:
    """The bytes of each rank, in rank order, where all ranks are known to be in this very call.

    readers: how many ranks, from rank 0 on, are given them; None for all. The others get empty ones.
    """
    readers = world.size if readers is None else readers
    sizes, sent = torch.empty(world.size, dtype=torch.int64), torch.zeros(world.size, dtype=torch.int64)
    sent[:readers] = len(data)
    ones = [1] * world.size
    world.start(op, sizes, sent, ones, ones).wait()
    given = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    out = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    world.start(op, out, given.repeat(readers), sizes.tolist(), sent.tolist()).wait()
    return [bytes(part.numpy()) for part in out.split(sizes.tolist())]


def _checksum(value: Any) -> int:
    if isinstance(value, str):
        return zlib.crc32(value.encode(errors="backslashreplace"))
    return zlib.crc32(_packed(value, lambda one: one.checksum if isinstance(one, CollectiveSequence) else repr(one)))


def _packed(value: Any, default: Callable[[Any], Any]) -> bytes:
    """A map as msgpack; a value that msgpack cannot carry as text, since a rank that raised here would raise alone."""

    def carried(one: Any) -> Any:
        try:
            msgpack.packb(one, default=default)
        except (ValueError, OverflowError):
            return repr(one)
        return one

    try:
        return bytes(msgpack.packb(value, default=default))
    except (ValueError, OverflowError):
        return bytes(msgpack.packb({name: carried(one) for name, one in value.items()}, default=default))


def _told(error: BaseException | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"kind": type(error).__name__, "message": str(error).encode(errors="backslashreplace").decode()}


def _difference(every: Sequence[Mapping[str, Any]]) -> str:
    """Which ranks are about to do what, or which number differs."""
    if any(one["op"] != every[0]["op"] for one in every):
        calls = "; ".join(f"rank {rank}: {one['op']}" for rank, one in enumerate(every))
        return (
            f"ranks are in different calls, {calls}; lookups, steps and saves of embeddings of a World are made by all "
            "ranks in the same order"
        )
    said = [_flat(one["same"]) for one in every]
    names = [name for name in dict.fromkeys(name for one in said for name in one) if _differs(name, said)]
    shown = names[:MOST_NAMED]
    values = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name}={one.get(name)}" for name in shown) for rank, one in enumerate(said)
    )
    more = f" (and {len(names) - len(shown)} more differ)" if len(names) > len(shown) else ""
    return f"{every[0]['op']}: ranks differ, {values}{more}; give all ranks the same"


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, those of a map by its name and theirs."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {f"{name}: {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _differs(name: str, said: Sequence[Mapping[str, Any]]) -> bool:
    return any(one.get(name) != said[0].get(name) for one in said)
