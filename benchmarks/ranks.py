"""Start the ranks of a process group, and time steps that they run together."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import timing
import torch
import torch.distributed as dist
from timing import Times
from traces import BATCHES


def run_on_ranks(size: int, task: Callable[..., Any], *arguments: Any) -> Any:
    """Run `task(*arguments)` in `size` single-threaded processes of a Gloo group. Returns rank 0's result.

    If a rank raises, raises the same error and terminates the other ranks.
    """
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(size) as pool:
        results = dict(pool.imap_unordered(partial(_rank, size, folder, task, arguments), range(size)))
        pool.close()  # lets all workers exit normally
        pool.join()
        return results[0]


def _rank(size: int, folder: str, task: Callable[..., Any], arguments: Any, rank: int) -> tuple[int, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    result = task(*arguments)
    dist.barrier()  # no rank may leave while others still communicate
    dist.destroy_process_group()
    return rank, result


def time_in_turns(sides: Mapping[str, Callable[[int], object]], turns: int) -> Times:
    """Time the sides in turns. Ranks start each step together; its time is the slowest rank's."""
    times = timing.time_in_turns(sides, turns, BATCHES, before=dist.barrier)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Times(zip(times, slowest.tolist(), strict=True))
