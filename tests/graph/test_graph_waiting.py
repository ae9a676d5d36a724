"""A profile says where threads that wait for work hold the cores of those that have some, and only there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from support.forked import in_process
from support.graphs import graph_of

ADVICE = "start the process with OMP_WAIT_POLICY=PASSIVE"


def profiled_on_one_core(threads: int, policy: str | None) -> str:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ.pop("OMP_WAIT_POLICY", None)
    if policy is not None:
        os.environ["OMP_WAIT_POLICY"] = policy
    torch.set_num_threads(threads)

    def build(graph: Any, x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.tanh(x)
        return x.sum()

    return str(graph_of(build).profile([torch.ones(1 << 20)] * 5))


@pytest.mark.parametrize(("threads", "policy", "advised"), [(2, None, True), (2, "PASSIVE", False), (1, None, False)])
def test_threads_that_wait_for_a_core_are_told_of_where_others_may_spin(
    threads: int, policy: str | None, advised: bool
) -> None:
    said = in_process(profiled_on_one_core, threads, policy)
    assert (ADVICE in said.splitlines()[-1]) == advised
    assert (ADVICE in said) == advised
