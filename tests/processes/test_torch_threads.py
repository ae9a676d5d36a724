"""Loops of steps run on the threads of torch where those spin, else on the engine's; the rows are the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.places import environment

THREADS = """
import hashlib, os
import torch

torch.set_num_threads(2)
torch.rand(1000, 1000) + 1  # from here on torch has its threads

def trained():
    from support.embeddings import contents, make, train
    import tierbed

    with make(tierbed.make_device_mem_store_options(), "adagrad", tables=1) as embedding:
        for step in range(3):
            train(embedding, torch.arange(6_000) * (step + 1) % 4_000, grad=1.0)  # no op of torch needs threads for it
        return hashlib.sha256(contents(embedding).tobytes()).hexdigest()

def threads():
    return len(os.listdir("/proc/self/task"))

def in_a_child():
    child = os.fork()
    if child == 0:
        print(trained(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
STEPS = f"{THREADS}\nimport support.embeddings\nbefore = threads()\nrows = trained()\nprint(threads() - before, rows)"


def run(policy: str | None, script: str) -> list[str]:
    variables = environment()
    variables.pop("OMP_WAIT_POLICY", None)
    variables |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_steps_add_a_thread_only_where_those_of_torch_sleep_and_a_fork_without_threads_trains() -> None:
    added, rows, again = run(None, f"{STEPS}\nin_a_child()")
    assert (added, rows) == ("0", again)
    assert run("PASSIVE", STEPS) == ["1", rows]


def test_a_child_that_loads_the_engine_after_its_parent_used_threads_trains() -> None:
    assert len(run(None, f"{THREADS}\nin_a_child()")) == 1
