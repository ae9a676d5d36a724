"""`World`: the processes that share the rows of embeddings, and the calls that all of them make.

Every operation over ranks begins with a handshake, one all-to-all of headers. All headers of all operations have one
size, so ranks that are in different calls learn of it; a transfer of unequal sizes would end the process. In a world of
one process each of these calls is the plain call.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..engine import errors
from ..engine.checks import as_number
from ..engine.errors import GroupError, OptionError, TierbedError
from .rank_group import CollectiveSequence, PendingAllToAll, RankGroup
from .sendable import bytes_of, check_sendable

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

FIELDS = (
    6  # of a header: whether it refuses, checksums of op and numbers, the count for the receiver, a note, wants more
)
MAX_NAMES = 3  # of values that differ between ranks, in an error
MIN_START_SECONDS = 60.0  # processes of one start import torch at different speeds
MAX_TIMEOUT = 10**7  # seconds
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows and gradients that are sent
POLL_SECONDS = 0.02  # between two reads of torch's store
_START = "tierbed/start"


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
        world: World,
        op: str,
        error: BaseException | None = None,
        same: Mapping[str, Any] | None = None,
        counts: Sequence[int] | None = None,
        note: int = 0,
        wants_more: bool = False,
    ) -> None:
        self._world, self._op, self._error, self._same = world, op, error, dict(same or {})
        self._result: HandshakeResult | None = None
        self.refused: BaseException | None = None  # what `wait` raised
        if world.size == 1:
            self.refused, self._result = error, HandshakeResult([*(counts or [0])], [note], wants_more)
            return
        world.check_thread()
        if world.pending is not None:
            world.pending.wait()  # a rank may have sent other headers instead: all ranks learn of it before these
        given = np.empty((world.size, FIELDS), np.int64)  # by NumPy, whose small calls take a fraction of torch's time
        given[:] = (error is not None, _checksum(op), _checksum(self._same), 0, note, wants_more)
        if counts is not None:
            given[:, 3] = counts
        self._first = given[0, :3].tolist()
        self._headers = np.empty_like(given)
        out, sent = (torch.from_numpy(headers.reshape(-1)) for headers in (self._headers, given))
        sizes = [FIELDS] * world.size
        self._exchange: PendingAllToAll = world.start(op, out, sent, sizes, sizes)
        world.pending = self

    def wait(self) -> HandshakeResult:
        """Wait for all headers. If a rank refuses, or ranks differ, raises on every rank, and nothing has moved.

        Raises the class of the lowest refusing rank's error if that is a TierbedError, else GroupError.
        """
        if self.refused is not None:
            raise self.refused
        if self._result is not None:
            return self._result
        self._world.pending = None
        self._exchange.wait()
        self._world.note_started_by_all(self._exchange.call)
        headers = self._headers.tolist()
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
        same = _packed(self._same, lambda one: one.parts if isinstance(one, CollectiveSequence) else repr(one))
        sent = msgpack.packb({"op": self._op, "same": msgpack.unpackb(same), "error": _described_error(self._error)})
        every = [msgpack.unpackb(data) for data in self._world.exchange_bytes(self._op, sent)]
        self._raise_first_error([one["error"] for one in every])
        self._world.mismatches += 1
        self._world.raise_shared(GroupError(_difference(every)))

    def _raise_first_error(self, given: Sequence[Mapping[str, str] | None]) -> None:
        """Raise the first error that ranks gave, if there is one."""
        world, error = self._world, self._error
        if error is not None and not isinstance(error, Exception):
            world.raise_shared(error)  # Ctrl-C stays what it is where it was pressed
        failed = {rank: one for rank, one in enumerate(given) if one is not None}
        if not failed:
            return
        rank, one = next(iter(failed.items()))
        kind: Any = getattr(errors, one["kind"], None)
        known = isinstance(kind, type) and issubclass(kind, TierbedError)
        more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        message = one["message"] if known else f"{one['kind']}: {one['message']}"
        shared = (kind if known else GroupError)(f"rank {rank}: {message}{more}")
        world.raise_shared(shared, error if rank == world.rank else None)


def catch(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(the result of `call`, None), or (None, what it raised), to be raised on all ranks."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def make_default_group(timeout: float) -> None:
    """Make torch's default group, of Gloo, of the processes that torchrun started.

    timeout: seconds for which ranks wait for each other, at least MIN_START_SECONDS. Raises GroupError if one is
    missing.
    """
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=max(timeout, MIN_START_SECONDS))
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        mine = of_this_start(store, rank, size, limit)
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        if isinstance(error, GroupError):
            raise
        raise GroupError(f"the ranks of this job did not all come in {limit}, or one was lost: {error}") from None


def of_this_start(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """The part of a store that the ranks of this start of a job share, and those of no earlier one.

    torchrun keeps its store when it restarts the processes of a job, and a rank that starts before the others would
    connect to addresses of ranks that have exited (https://github.com/pytorch/pytorch/issues/135712). So rank 0 draws a
    name, and the others take it once rank 0 has answered under it to a number which they drew.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    if rank == 0:
        start = f"{_START}/{secrets.token_hex(16)}"
        store.set(_START, start)
        ranks = [f"{start}/{other}" for other in range(1, size)]
        store.wait(ranks, timeout)
        for other in ranks:
            store.set(f"{start}/{store.get(other).decode()}", "")
        return PrefixStore(start, store)
    end, mine = monotonic() + timeout.total_seconds(), secrets.token_hex(16)
    while monotonic() < end:
        start = store.get(_START).decode()  # of an earlier start, it may be
        store.set(f"{start}/{rank}", mine)
        if store.check([f"{start}/{mine}"]):
            return PrefixStore(start, store)
        sleep(POLL_SECONDS)
    raise GroupError(f"rank 0 did not answer in {timeout}: this job did not start", [0])


class World(RankGroup):
    """The ranks of a process group, each of which keeps a shard of every embedding's rows.

    Every rank makes its world, and calls `gather` and `sum` in the same order as the others, from one thread. A world
    has its own process group next to `group` (default: torch's default group, or this process alone if there is none),
    so that what else a program exchanges never meets what the world does. Rows and gradients are sent between ranks in
    the dtypes `rows` and `grads`. A rank that does not answer within `timeout` seconds aborts the group: every later
    call raises GroupError.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 600,
        rows: torch.dtype = torch.float32,
        grads: torch.dtype = torch.float32,
    ) -> None:
        seconds = as_number(timeout)
        if seconds is None or not 0 < seconds <= MAX_TIMEOUT:
            raise OptionError(f"timeout={timeout!r}: give seconds, above 0 and at most {MAX_TIMEOUT}")
        for name, dtype in (("rows", rows), ("grads", grads)):
            if dtype not in DTYPES:
                raise OptionError(f"{name}={dtype}: give one of {', '.join(map(str, DTYPES))}")
        rank, size = _rank_and_size(group)
        if size > 1:
            _check_backend(group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if size > 1 else []
        super().__init__(ranks, rank, timeout, rows, grads)

    @classmethod
    @cache
    def of_one(cls) -> World:
        """The world of this process alone. It has no process group, and any thread may call it."""
        world = cls.__new__(cls)
        RankGroup.__init__(world, [], 0)
        return world

    @classmethod
    def from_env(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 600,
        rows: torch.dtype = torch.float32,
        grads: torch.dtype = torch.float32,
    ) -> World:
        """`World(...)`, after making torch's default group from torchrun's variables, if they are set and it is not.

        A process that torchrun did not start is a world of one.
        """
        if not dist.is_initialized() and ("RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"):
            missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise OptionError(f"the environment has no {', '.join(missing)}; start the script by torchrun")
            make_default_group(timeout)
        return cls(group, timeout=timeout, rows=rows, grads=grads)

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, one after the other along dimension 0, in the order of ranks.

        Lengths may differ; the other dimensions and the dtype are the same on all ranks. A tensor of no dimension
        counts as one of length 1. Raises InputError on all ranks, and the group continues, if a rank gives anything but
        a dense tensor of numbers.
        """
        return torch.cat(self._all_tensors("gather", x, 1))

    def sum(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape and dtype, added in the order of ranks. Raises as `gather` does."""
        total, *others = self._all_tensors("sum", x, 0)
        for other in others:
            total += other
        return total.view(x.shape)

    def all_bytes(self, op: str, data: bytes, same: Mapping[str, Any] | None = None) -> list[bytes]:
        """The `data` of each rank, in the order of ranks.

        op: what the ranks are doing. same: by name, what must be equal on all of them; else GroupError, and the group
        continues.
        """
        self.check_thread()
        self.check_alive()
        with self.collective_block(op):
            self.handshake(op, same=same)
            return self.exchange_bytes(op, data)

    def handshake(
        self,
        op: str,
        error: BaseException | None = None,
        same: Mapping[str, Any] | None = None,
        counts: Sequence[int] | None = None,
        note: int = 0,
        wants_more: bool = False,
    ) -> HandshakeResult:
        """Send headers and wait for those of all ranks, as `Handshake`. It is a barrier."""
        with self.collective_block(op):
            return Handshake(self, op, error, same, counts, note, wants_more).wait()

    def call_on_all_ranks(self, op: str, call: Callable[[], Any], same: Mapping[str, Any] | None = None) -> Any:
        """The result of a call that every rank makes for itself. What it raises on one rank is raised on all.

        same: by name, what must be equal on all ranks.
        """
        if self.size == 1:
            return call()
        result, error = catch(call)
        self.handshake(op, error, same)
        return result

    def call_on_rank_0(self, op: str, call: Callable[[], Any]) -> Any:
        """The result of a call that rank 0 makes, as msgpack carries it. What it raises is raised on all ranks."""
        return self.all_gather_object(op, call if self.rank == 0 else lambda: None)[0]

    def all_gather_object(self, op: str, call: Callable[[], Any]) -> list[Any]:
        """What `call` returned on each rank, as msgpack carries it. What it raises on one rank is raised on all."""
        if self.size == 1:
            return [call()]
        value, error = catch(call)
        with self.collective_block(op):
            self.handshake(op, error)
            every = self.exchange_bytes(op, msgpack.packb(value))
        return [msgpack.unpackb(data, strict_map_key=False) for data in every]

    def exchange_bytes(self, op: str, data: bytes, readers: int | None = None) -> list[bytes]:
        """The bytes of each rank, in rank order, if all ranks are known to be in this very call.

        readers: how many ranks, from rank 0 on, receive them; None for all. The others get empty ones.
        """
        if self.size == 1:
            return [data]
        readers = self.size if readers is None else readers
        sizes, sent = torch.empty(self.size, dtype=torch.int64), torch.zeros(self.size, dtype=torch.int64)
        sent[:readers] = len(data)
        ones = [1] * self.size
        self.start(op, sizes, sent, ones, ones).wait()
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        out = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        self.start(op, out, given.repeat(readers), sizes.tolist(), sent.tolist()).wait()
        return [bytes(part.numpy()) for part in out.split(sizes.tolist())]

    @contextmanager
    def raise_on_all_ranks(self, op: str) -> Iterator[None]:
        """A block of collectives that all ranks make. What it raises before the first of them is raised on all."""
        before = self.calls
        try:
            yield
        except BaseException as error:
            if self.calls == before and self.must_report(error):
                self.handshake(op, error)
            raise

    def _all_tensors(self, op: str, x: Any, open_dims: int) -> list[Tensor]:
        """Copies of the tensors of all ranks, each with its length as first dimension.

        open_dims: how many of the first dimensions may differ; 0 for tensors that are added up. InputError.
        """
        self.check_thread()
        self.check_alive()
        if self.size == 1:
            x = check_sendable("x", x, open_dims == 0)
            return [x.detach().clone().view(_length(x), *x.shape[1:])]
        data, error = catch(lambda: bytes_of(check_sendable("x", x, open_dims == 0)))
        with self.collective_block(op):
            same = {"tensor": None if error else f"{x.dtype} {list(x.shape[open_dims:])}"}
            lengths = self.handshake(op, error, same, note=0 if error else _length(x)).notes
            parts = self.exchange_bytes(op, data.numpy().tobytes())
        return [_tensor(*part, x) for part in zip(parts, lengths, strict=True)]


def _length(x: Tensor) -> int:
    return len(x) if x.dim() else 1


def _tensor(data: bytes, length: int, like: Tensor) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=like.dtype) if data else like.new_empty(0, device="cpu")
    return flat.view(length, *like.shape[1:]).to(like.device)


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


def _described_error(error: BaseException | None) -> dict[str, str] | None:
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
    values = [_flat(one["same"]) for one in every]
    names = [name for name in dict.fromkeys(name for one in values for name in one) if _differs(name, values)]
    shown = names[:MAX_NAMES]
    by_rank = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name}={one.get(name)}" for name in shown) for rank, one in enumerate(values)
    )
    more = f" (and {len(names) - len(shown)} more differ)" if len(names) > len(shown) else ""
    return f"{every[0]['op']}: ranks differ, {by_rank}{more}; give all ranks the same"


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, those of a map by its name and theirs."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {f"{name}: {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _differs(name: str, values: Sequence[Mapping[str, Any]]) -> bool:
    return any(one.get(name) != values[0].get(name) for one in values)


def _rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise OptionError("there is no process group: World.from_env() makes it, as dist.init_process_group does")
        return 0, 1
    if (rank := dist.get_rank(group)) < 0:
        raise OptionError("group: this process is none of its ranks")
    return rank, dist.get_world_size(group)


def _check_backend(group: dist.ProcessGroup | None) -> None:
    """OptionError for a group that was made without Gloo."""
    backends = dist.get_backend_config(group)
    if "gloo" not in backends:
        raise OptionError(
            f"group: its backends are {backends}; rows are sent between ranks through host memory, those of a GPU "
            "as well, over Gloo, and NCCL sends none of that: call init_process_group('cpu:gloo,cuda:nccl'), or give "
            "new_group(backend='gloo')"
        )
