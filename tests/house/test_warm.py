"""Children of the warm process: each has the environment and files it was given, and none outlives who ordered it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from support.forked import in_process, with_pipe
from support.places import environment
from support.scripts import run_script

ENDS: dict[str, int] = {
    "import sys; sys.exit(3)": 3,
    "raise ValueError": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}


def test_a_child_that_ends_or_is_killed_reports_it() -> None:
    assert {script: run_script(script).returncode for script in ENDS} == ENDS


def surroundings(name: str) -> tuple[object, ...]:
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))  # of the server
    return os.environ.get(name), os.getcwd(), sys.stdin.read(), signal.getsignal(signal.SIGINT), threads


def test_a_child_has_the_surroundings_of_who_ordered_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("one", "other"):
        monkeypatch.setenv("WORD", word)
        assert in_process(surroundings, "WORD") == (word, str(tmp_path), "", signal.default_int_handler, 1)
    monkeypatch.delenv("WORD")
    assert in_process(surroundings, "WORD")[0] is None


def fails() -> None:
    found = {"rows": 4}
    assert found["rows"] == 5


def test_an_assertion_that_fails_in_a_child_says_why() -> None:
    with pytest.raises(pytest.fail.Exception, match="assert 4 == 5"):
        in_process(fails)


def forks_and_waits(pipe: Connection) -> None:
    os.fork()
    pipe.send(os.getpid())
    threading.Event().wait()


def test_children_of_two_orders_hold_nothing_of_each_other_and_are_killed_with_their_own() -> None:
    first, first_pipe = with_pipe(forks_and_waits)
    other, other_pipe = with_pipe(forks_and_waits)
    with first_pipe, other_pipe, first, other:
        for child, pipe in ((first, first_pipe), (other, other_pipe)):
            assert child.pid in {pipe.recv(), pipe.recv()}
            child.close()
            with pytest.raises(EOFError):  # at once, though the other runs
                pipe.recv()


def test_a_server_ends_with_its_maker_however_that_ends() -> None:
    script = "import os; from support.warm import Server; server = Server(); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, b"")  # until none has standard error
