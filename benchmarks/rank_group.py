"""Processes of one group, which benchmarks over ranks run in."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(size: int, task: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 returns of `task(*arguments)`, called by `size` processes of one Gloo group with a thread each.

    Raises what the first of them raises.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        heard: dict[Any, int] = {}
        processes = []
        for rank in range(size):
            end, theirs = context.Pipe(duplex=False)
            heard[end] = rank
            processes.append(
                context.Process(target=_rank, args=(theirs, rank, size, folder, task, arguments), daemon=True)
            )
            processes[-1].start()
            theirs.close()
        results: dict[int, Any] = {}
        try:
            while heard:
                for end in wait(heard):
                    failed, result = end.recv()  # type: ignore[union-attr]
                    if failed:
                        raise result
                    results[heard.pop(end)] = result
        finally:
            for process in processes:
                process.terminate() if heard else process.join()
        return results[0]


def _rank(end: Connection, rank: int, size: int, folder: str, task: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
        end.send((False, task(*arguments)))
        dist.barrier()  # nobody leaves the group of those who are at work
        dist.destroy_process_group()
    except BaseException as error:
        error.add_note(traceback.format_exc())
        end.send((True, error))


def in_turns(steps: Sequence[Callable[[int], object]], batches: int, turns: int) -> list[list[float]]:
    """Milliseconds of each of the steps, over all turns, by the slowest rank: ranks begin every step together.

    A step is called with the number of a batch. Turns over each batch once go before, and are not counted.
    """
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(batches + turns):
        order = range(len(steps)) if turn % 2 else reversed(range(len(steps)))
        for number in order:
            dist.barrier()
            begin = perf_counter()
            out = steps[number](turn % batches)
            taken[number].append(1e3 * (perf_counter() - begin))
            del out  # freeing the output is no part of a step
    slowest = torch.tensor(taken)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    warm: list[list[float]] = slowest[:, batches:].tolist()
    return warm
