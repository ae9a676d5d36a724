"""Loops of steps run on the threads of torch where those spin, else on the engine's; the rows are the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.places import environment

STEPS = """
import hashlib, os
import torch
from support.embeddings import contents, make, train
import tierbed

def trained():
    with make(tierbed.make_device_mem_store_options(), "adagrad", tables=1) as embedding:
        for step in range(3):
            train(embedding, torch.arange(6_000) * (step + 1) % 4_000, grad=1.0)  # no op of torch needs threads for it
        return hashlib.sha256(contents(embedding).tobytes()).hexdigest()

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
torch.rand(1000, 1000) + 1  # from here on torch has its threads
before = threads()
rows = trained()
print(threads() - before, rows)
"""
FORK = """
child = os.fork()
if child == 0:
    os._exit(0 if trained() == rows else 1)
assert os.waitpid(child, 0)[1] == 0
"""

LATE = """
import os
import torch

torch.set_num_threads(2)
torch.rand(1000, 1000) + 1  # torch has its threads before the fork, and the engine is loaded after it
child = os.fork()
if child == 0:
    from support.embeddings import make, train
    import tierbed

    with make(tierbed.make_device_mem_store_options(), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(6_000), grad=1.0)
        os._exit(0 if embedding.size() == 6_000 else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, "-")
"""


def run(policy: str | None, script: str) -> tuple[str, str]:
    """How many threads the steps added, and the rows."""
    variables = environment()
    variables.pop("OMP_WAIT_POLICY", None)
    if policy is not None:
        variables["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    added, rows = done.stdout.split()
    return added, rows


@pytest.fixture(scope="module")
def of_torch() -> tuple[str, str]:
    return run(None, STEPS + FORK)


@pytest.mark.slow
def test_steps_add_no_thread_beside_those_that_spin_and_a_fork_without_them_trains(of_torch: tuple[str, str]) -> None:
    assert of_torch[0] == "0"


@pytest.mark.slow
def test_steps_have_a_thread_of_their_own_where_those_of_torch_sleep(of_torch: tuple[str, str]) -> None:
    assert run("PASSIVE", STEPS) == ("1", of_torch[1])


def test_a_child_that_loads_the_engine_after_its_parent_used_threads_trains() -> None:
    assert run(None, LATE)[0] == "0"
