"""`World`: the processes that share the rows of embeddings, and the calls that all of them make.

Every operation over ranks begins with a handshake. In a world of one process each of these calls is the plain call.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.checks import as_number, checked_arguments
from ..engine.errors import GroupError, OptionError
from .handshake import Handshake, HandshakeResult
from .rank_group import RankGroup
from .sendable import bytes_of, check_sendable

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MIN_START_SECONDS = 60.0  # processes of one start import torch at different speeds
MAX_TIMEOUT = 10**7  # seconds
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows and gradients that are sent
POLL_SECONDS = 0.02  # between two reads of torch's store
_START = "tierbed/start"


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

    @checked_arguments("group", "rows", "grads")
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
        if size > 1 and "gloo" not in (backends := dist.get_backend_config(group)):
            raise OptionError(
                f"group: its backends are {backends}; rows are sent between ranks through host memory, those of a GPU "
                "as well, over Gloo, and NCCL sends none of that: call init_process_group('cpu:gloo,cuda:nccl'), or "
                "give new_group(backend='gloo')"
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if size > 1 else []
        super().__init__(ranks, rank, timeout, rows, grads)

    @classmethod
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
        **dtypes: torch.dtype,
    ) -> World:
        """`World(...)`, after making torch's default group from torchrun's variables, if they are set and it is not.

        A process that torchrun did not start is a world of one.
        """
        if not dist.is_initialized() and ("RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"):
            missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise OptionError(f"the environment has no {', '.join(missing)}; start the script by torchrun")
            make_default_group(timeout)
        return cls(group, timeout=timeout, **dtypes)

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

    def handshake(
        self,
        op: str,
        error: BaseException | None = None,
        same: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> HandshakeResult:
        """Send headers and wait for those of all ranks, as `Handshake`. It is a barrier."""
        with self.collective_block(op):
            return Handshake(self, op, error, same, **given).wait()

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


def _rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise OptionError("there is no process group: World.from_env() makes it, as dist.init_process_group does")
        return 0, 1
    if (rank := dist.get_rank(group)) < 0:
        raise OptionError("group: this process is none of its ranks")
    return rank, dist.get_world_size(group)
