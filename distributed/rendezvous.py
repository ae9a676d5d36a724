"""Torch's default process group, from the variables that torchrun gives."""

from __future__ import annotations

import secrets
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..engine.errors import GroupError

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
