"""`World`: what users hold of the processes that share an embedding."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..embedding.training_group import TrainingGroup
from ..engine.errors import GroupError, OptionError
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.options.store_options import StoreOptions
from ..engine.options.table_spec import TableSpec
from .agreement import all_gather_bytes, catch, handshake
from .held import ShardedTableHandle
from .sendable import bytes_of, check_sendable
from .together import SavesTogether

LEAST = 60.0  # seconds: processes of one start import torch at different speeds
LOOK = 0.02  # seconds between two looks at the store
_START = "tierbed/start"


def make_default_group(timeout: float) -> None:
    """Make torch's default group, of Gloo, of the processes that torchrun started.

    timeout: seconds for which ranks wait for each other, at least LEAST. Raises GroupError where one does not come.
    """
    limit = timedelta(seconds=max(timeout, LEAST))
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

    torchrun keeps its store when it restarts the processes of a job, and a rank which is there before the others would
    connect to addresses of ranks that are gone (https://github.com/pytorch/pytorch/issues/135712). So rank 0 draws a
    name, and the others take it once rank 0 has answered under it to a number which they drew.
    """
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
        sleep(LOOK)
    raise GroupError(f"rank 0 did not answer in {timeout}: this job did not start", [0])


class World(SavesTogether):
    """The ranks of a process group, each of which keeps a part of every embedding's rows.

    Every rank makes its world, and calls `gather` and `sum` in the same order as the others, from one thread. A world
    has a process group of its own beside `group` (default: torch's default group, or this process alone where there
    is none), so that what else a program exchanges never meets what the world does. Rows and gradients travel between
    ranks in the dtypes `rows` and `grads`. A rank that does not answer within `timeout` seconds ends the group: every
    later call raises GroupError.
    """

    @classmethod
    def from_env(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 600,
        rows: torch.dtype = torch.float32,
        grads: torch.dtype = torch.float32,
    ) -> World:
        """`World(...)`, after making torch's default group from torchrun's variables, if these are there and it is not.

        A process that torchrun did not start is a group of one.
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
        counts as one of length 1. Raises InputError on all ranks, and the group goes on, if a rank gives what is no
        dense tensor of numbers.
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

        op: what the ranks are about. same: by name, what must be equal on all of them; else GroupError, and the group
        goes on.
        """
        self.check_thread()
        self.check_alive()
        if self.size == 1:
            return [data]
        with self.whole(op):
            handshake(self, op, same=same)
            return all_gather_bytes(self, op, data)

    def meet(self, op: str, error: BaseException | None = None, note: int = 0) -> list[int]:
        """The notes of all ranks, of 63 bits, in their order. The error that a rank gives is raised on all of them."""
        return handshake(self, op, error, note=note).notes

    def hold(
        self,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        group: TrainingGroup | None = None,
        for_load: bool = False,
    ) -> ShardedTableHandle:
        """Open the rows of an embedding over all ranks, as `ShardedTableHandle`."""
        return ShardedTableHandle(self, spec, options, optimizer, device, group, for_load)

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
        with self.whole(op):
            same = {"tensor": None if error else f"{x.dtype} {list(x.shape[open_dims:])}"}
            lengths = handshake(self, op, error, same, note=0 if error else _length(x)).notes
            parts = all_gather_bytes(self, op, data.numpy().tobytes())
        return [_tensor(*part, x) for part in zip(parts, lengths, strict=True)]


def _length(x: Tensor) -> int:
    return len(x) if x.dim() else 1


def _tensor(data: bytes, length: int, like: Tensor) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=like.dtype) if data else like.new_empty(0, device="cpu")
    return flat.view(length, *like.shape[1:]).to(like.device)
