"""The suite itself: what its caller ignores, and what hangs, does not stop it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.places import TESTS

HANG = """
import collections, itertools, os, pathlib, signal, threading
import pytest
from support.forked import in_process

def test_a_test_can_be_interrupted():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

@pytest.mark.limit(1)
def test_that_hangs():
    threading.Event().wait()

def hang(test):
    pathlib.Path("processes").write_text(f"{os.getppid()} {os.getpid()}")
    os.kill(test, signal.SIGALRM)  # as if the limit were over
    signal.pause()

def test_whose_child_hangs():
    in_process(hang, os.getpid())

@pytest.mark.limit(1)
def test_that_hangs_and_looks_for_no_signal():
    collections.deque(itertools.repeat(0), 0)  # a loop of C
"""


@pytest.mark.slow
def test_neither_a_caller_that_ignores_sigint_nor_a_test_that_hangs_stops_the_others(tmp_path: Path) -> None:
    """Native code that hangs stops its worker, in the end, and shows where."""
    (tmp_path / "test_one.py").write_text(HANG)
    options = ["-p", "conftest", "-n", "1", "--dist", "worksteal"]
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "pytest", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "3 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    for limit in (1, 600):
        assert f"Failed: it hangs: not over after {limit} s" in done.stdout
    for process in (tmp_path / "processes").read_text().split():  # the child that hung, and who forked it
        assert not Path("/proc", process).exists()
    assert "crashed while running 'test_one.py::test_that_hangs_and_looks_for_no_signal'" in done.stdout
    for said in ("in test_that_hangs\n", "Timeout (0:00:02)!", "in test_that_hangs_and_looks_for_no_signal\n"):
        assert said in done.stderr
    assert done.returncode == 1


def test_only_the_tests_of_peers_need_peers() -> None:
    needed = re.compile(r"^\s*(import|from) (torchrec|fbgemm_gpu|support\.fbgemm)\b", re.M)
    files = [*(TESTS / "jagged").glob("*.py"), *(TESTS / "peers").glob("*.py")]
    assert {path.parent.name for path in files if needed.search(path.read_text())} == {"peers"}
