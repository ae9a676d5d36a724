"""`World`: the processes that share embedding rows, and the collective calls that these processes make.

Every operation across ranks begins with a handshake, in which ranks compare what they are about to do (`Handshake`).
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

from ..engine.checks import as_number, validate_arguments
from ..engine.errors import GroupError, OptionError
from .handshake import Handshake, HandshakeResult
from .rank_group import RankGroup
from .sendable import check_sendable, to_bytes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MIN_START_SECONDS = 60.0  # the least time to wait at start, because processes import torch at different speeds
MAX_TIMEOUT = 10**7  # seconds
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes for sending rows and gradients
POLL_SECONDS = 0.02  # interval between polls of torch's store
_PREFIX_KEY = "tierbed/start"


def try_call(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return (result, None), or (None, exception) if the call raised. The exception can then be raised on all ranks."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def make_default_group(timeout: float) -> None:
    """Create torch's default process group (Gloo) from torchrun's processes. Raises GroupError if a rank is missing."""
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=max(timeout, MIN_START_SECONDS))
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        prefix_store = make_prefix_store(store, rank, size, limit)
        dist.init_process_group("gloo", store=prefix_store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        if isinstance(error, GroupError):
            raise
        problem = f"the ranks of this job did not all start within {limit}, or one was lost: {error}"
        raise GroupError(f"{problem}; check the ranks' logs and MASTER_ADDR, or raise World's timeout") from None


def make_prefix_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return torch's store with a key prefix that is new each time the job starts.

    torchrun keeps its store when it restarts a job's processes. A rank that starts early could then read addresses of
    ranks that have already exited (https://github.com/pytorch/pytorch/issues/135712). So rank 0 draws a random prefix
    whenever the job starts. Every other rank draws a token, and uses the prefix after rank 0 has confirmed the token.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    if rank == 0:
        prefix = f"{_PREFIX_KEY}/{secrets.token_hex(16)}"
        store.set(_PREFIX_KEY, prefix)
        keys = [f"{prefix}/{key}" for key in range(1, size)]
        store.wait(keys, timeout)
        for key in keys:
            store.set(f"{prefix}/{store.get(key).decode()}", "")
        return PrefixStore(prefix, store)
    deadline, token = monotonic() + timeout.total_seconds(), secrets.token_hex(16)
    while monotonic() < deadline:
        prefix = store.get(_PREFIX_KEY).decode()  # may be a prefix from before a restart of the job
        store.set(f"{prefix}/{rank}", token)
        if store.check([f"{prefix}/{token}"]):
            return PrefixStore(prefix, store)
        sleep(POLL_SECONDS)
    problem = f"rank {rank} waited {timeout} for rank 0, so the job did not start"
    raise GroupError(f"{problem}; check that rank 0 runs and is reachable, or raise World's timeout", [0])


class World(RankGroup):
    """The ranks that share embedding rows. Each rank keeps one shard of every embedding.

    Every rank creates the world. `gather` and `sum` are collective: every rank calls them in the same order, from a
    single thread. The world creates its own process group, so its traffic never mixes with a program's other
    collectives. If a rank does not answer within `timeout` seconds, the world is aborted. Every later call then raises
    GroupError. docs/glossary.md explains tierbed's terms.

    Args:
        group: The process group whose ranks share rows. Default: torch's default group, or this process alone if there
            is no default group.
        timeout: Seconds to wait for other ranks. Default: 600.
        rows: The dtype for sending rows: float32, bfloat16 or float16. Default: float32.
        grads: The dtype for sending gradients: float32, bfloat16 or float16. Default: float32.

    Raises:
        OptionError: If an argument is wrong, or `group` lacks a Gloo backend.
        GroupError: If the ranks cannot connect to each other.
    """

    @validate_arguments("group", "rows", "grads")
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
            raise OptionError(f"timeout={timeout!r}: give a number of seconds above 0, at most {MAX_TIMEOUT}")
        for name, dtype in (("rows", rows), ("grads", grads)):
            if dtype not in WIRE_DTYPES:
                raise OptionError(f"{name}={dtype}: give one of {', '.join(map(str, WIRE_DTYPES))}")
        rank, size = _read_rank_and_size(group)
        if size > 1 and "gloo" not in (backends := dist.get_backend_config(group)):
            raise OptionError(
                f"group: its backends are {backends}, but a World needs Gloo to exchange rows through host memory, "
                "even on a GPU; call init_process_group('cpu:gloo,cuda:nccl'), or give new_group(backend='gloo')"
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if size > 1 else []
        super().__init__(ranks, rank, timeout, rows, grads)

    @classmethod
    def single(cls) -> World:
        """Return a world for this process alone, without a process group. Any thread may use this world."""
        world = cls.__new__(cls)
        RankGroup.__init__(world, [], 0)
        return world

    @classmethod
    def from_env(cls, group: dist.ProcessGroup | None = None, *, timeout: float = 600, **dtypes: torch.dtype) -> World:
        """Create a world from torchrun's environment variables.

        If the variables are set, this creates torch's default process group, unless it exists. A process that torchrun
        did not start becomes a world of one process.

        Args:
            group, timeout: As for `World`.
            **dtypes: `rows` and `grads`, as for `World`.

        Raises:
            OptionError: If an environment variable is missing, or an argument is wrong.
            GroupError: If a rank is missing or cannot be reached.
        """
        if not dist.is_initialized() and ("RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"):
            missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise OptionError(f"the environment has no {', '.join(missing)}; start the script with torchrun")
            make_default_group(timeout)
        return cls(group, timeout=timeout, **dtypes)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks along dimension 0, in rank order.

        Args:
            x: A dense tensor of numbers. Only dimension 0 may differ between ranks. A scalar counts as a tensor [1].

        Returns:
            A tensor on the device of `x`, with the same values on all ranks.

        Raises:
            InputError: On all ranks, if any rank passes something other than a dense tensor of numbers.
            GroupError: On all ranks, if dtypes or shapes differ, or if the world is aborted.
        """
        return torch.cat(self._gather_tensors("gather", x, 1))

    def sum(self, x: Tensor) -> Tensor:
        """Add the tensors of all ranks, in rank order.

        Args:
            x: A dense tensor of numbers, with the same shape and dtype on all ranks.

        Returns:
            A tensor on the device of `x`, with the same values on all ranks.

        Raises:
            InputError, GroupError: As for `gather`.
        """
        total, *others = self._gather_tensors("sum", x, 0)
        for other in others:
            total += other
        return total.view(x.shape)

    def handshake(
        self, op: str, error: BaseException | None = None, shared_values: Mapping[str, Any] | None = None, **fields: Any
    ) -> HandshakeResult:
        """Exchange headers with all ranks (see `Handshake`), and wait for all headers. This call is a barrier."""
        with self.collective_block(op):
            return Handshake(self, op, error, shared_values, **fields).wait()

    def call_on_all_ranks(self, op: str, call: Callable[[], Any], shared_values: dict[str, Any] | None = None) -> Any:
        """Return this rank's result of a call that every rank makes. An error on one rank is raised on all ranks.

        shared_values: values by name that must be equal on all ranks.
        """
        if self.size == 1:
            return call()
        result, error = try_call(call)
        self.handshake(op, error, shared_values)
        return result

    def call_on_rank_0(self, op: str, call: Callable[[], Any]) -> Any:
        """Return rank 0's result of a call, sent as msgpack. Rank 0's error is raised on all ranks."""
        return self.all_gather_object(op, call if self.rank == 0 else lambda: None)[0]

    def all_gather_object(self, op: str, call: Callable[[], Any]) -> list[Any]:
        """Return each rank's result of `call`, sent as msgpack. An error on one rank is raised on all ranks."""
        if self.size == 1:
            return [call()]
        value, error = try_call(call)
        with self.collective_block(op):
            self.handshake(op, error)
            parts = self.exchange_bytes(op, msgpack.packb(value))
        return [msgpack.unpackb(data, strict_map_key=False) for data in parts]

    @contextmanager
    def raise_on_all_ranks(self, op: str) -> Iterator[None]:
        """Wrap a block of collectives. An error before the first collective is raised on all ranks."""
        num_calls_before = self.num_calls
        try:
            yield
        except BaseException as error:
            if self.num_calls == num_calls_before and self.must_report(error):
                self.handshake(op, error)
            raise

    def _gather_tensors(self, op: str, x: Any, first_fixed_dim: int) -> list[Tensor]:
        """Return copies of all ranks' tensors. Dimensions from `first_fixed_dim` on must be equal on all ranks."""
        self.check_thread()
        self.check_alive()
        data, error = try_call(lambda: to_bytes(check_sendable("x", x, first_fixed_dim == 0)))
        with self.collective_block(op):
            shared_values = {"tensor": None if error else f"{x.dtype} {list(x.shape[first_fixed_dim:])}"}
            length = 0 if error else len(torch.atleast_1d(x))
            lengths = self.handshake(op, error, shared_values, payload=length).payloads
            parts = self.exchange_bytes(op, data.numpy().tobytes())
        return [_decode_tensor(*part, x) for part in zip(parts, lengths, strict=True)]


def _decode_tensor(data: bytes, length: int, like: Tensor) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=like.dtype) if data else like.new_empty(0, device="cpu")
    return flat.view(length, *like.shape[1:]).to(like.device)


def _read_rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise OptionError("there is no process group: call World.from_env() or dist.init_process_group() first")
        return 0, 1
    if (rank := dist.get_rank(group)) < 0:
        raise OptionError("group: this process is not in this group; give a group that contains it")
    return rank, dist.get_world_size(group)
