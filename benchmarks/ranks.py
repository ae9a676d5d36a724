"""Ranks: processes of one group, and the time of steps that they make together."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import timing
import torch
import torch.distributed as dist
from timing import Times
from traces import BATCHES


def on_ranks(size: int, task: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 returns of `task(*arguments)`, called by `size` processes of one Gloo group with a thread each.

    Raises what the first of them raises.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        open_ends: dict[Any, int] = {}
        processes = []
        for rank in range(size):
            end, given = context.Pipe(duplex=False)
            open_ends[end] = rank
            processes.append(
                context.Process(target=_rank, args=(given, rank, size, folder, task, arguments), daemon=True)
            )
            processes[-1].start()
            given.close()
        results: dict[int, Any] = {}
        try:
            while open_ends:
                for end in wait(open_ends):
                    failed, result = end.recv()  # type: ignore[union-attr]
                    if failed:
                        raise result
                    results[open_ends.pop(end)] = result
        finally:
            for process in processes:
                process.terminate() if open_ends else process.join()
        return results[0]


def _rank(end: Connection, rank: int, size: int, folder: str, task: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
        end.send((False, task(*arguments)))
        dist.barrier()  # no rank leaves a group whose others are at work
        dist.destroy_process_group()
    except BaseException as error:
        error.add_note(traceback.format_exc())
        end.send((True, error))


def in_turns(sides: Mapping[str, Callable[[int], object]], turns: int) -> Times:
    """Of the slowest rank: ranks start every step together."""
    times = timing.in_turns(sides, turns, BATCHES, before=dist.barrier)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Times(zip(times, slowest.tolist(), strict=True))
