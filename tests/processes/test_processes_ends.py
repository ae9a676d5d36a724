"""However a training process ends, its folder opens again: with every step, or it says what is lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from support.killed import Trainer, embedding_at, holds, remarks, trainer
from support.scripts import run_script

__all__ = ["trainer"]

# how many steps ahead are announced, by store
AHEAD = {"device": 0, "ssd": 1, "ssd_host": 3}


def last_step(events: list[str]) -> int:
    return max((int(event.split()[1]) for event in events if event.startswith("step")), default=0)


def runs(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("runs", [few, pytest.param(many, marks=pytest.mark.slow)])


Caplog = pytest.LogCaptureFixture


@runs(1, 10)
@pytest.mark.parametrize("end", ["interrupt", "thread"])
@pytest.mark.parametrize("store", AHEAD)
def test_a_process_that_gets_a_signal_at_any_time_keeps_every_step(
    tmp_path: Path, store: str, end: str, runs: int, trainer: Trainer, caplog: Caplog
) -> None:
    chance, count = random.Random(store + end), 0
    for _ in range(runs):
        after = (chance.randrange(1, 12), chance.uniform(0, 0.01))
        done = last_step(trainer.train(tmp_path, store, end=end, after=after, ahead=AHEAD[store]))
        assert done > count
        with embedding_at(tmp_path, store, open="error") as embedding:
            # the step that was cut took place, or did not
            count = embedding.metrics()["table"]["step"]
            assert count in (done, done + 1)
            holds(embedding, count)
    assert not remarks(caplog)


@runs(2, 20)
@pytest.mark.parametrize("store", AHEAD)
def test_ctrl_c_while_the_process_closes_leaves_a_folder_that_opens(
    tmp_path: Path, store: str, runs: int, trainer: Trainer, caplog: Caplog
) -> None:
    chance = random.Random(store)
    for path in (tmp_path / f"{number}" for number in range(runs)):
        waits = [chance.uniform(0, 0.004) for _ in range(4)]
        done = last_step(trainer.train(path, store, saves=[3], end="interrupt", after=(5, *waits)))
        with embedding_at(path, store) as embedding:
            count = embedding.metrics()["table"]["step"]
            assert count == 3 if remarks(caplog) else count in (done, done + 1)
            holds(embedding, count)


@pytest.mark.parametrize("store", AHEAD)
def test_an_end_without_a_goodbye_is_as_a_kill(tmp_path: Path, store: str, trainer: Trainer, caplog: Caplog) -> None:
    trainer.train(tmp_path, store, count=5, saves=[3], end="_exit", ahead=2)
    with embedding_at(tmp_path, store) as embedding:
        holds(embedding, 3)
    (said,) = remarks(caplog)
    assert "restored snapshot 's3', of step 3; all writes after the snapshot are lost (steps 4 to 5)" in said


# more than a byte cannot be written to any file from here on: as on a full disk, but of this process alone
UNCLOSED = [("device", "saved"), ("ssd_host", "none")]
FULL = f"""
import os, resource, sys
from pathlib import Path
from support.killed import embedding_at, steps

EVERY = {UNCLOSED}
embeddings = [embedding_at(Path(sys.argv[1], saved), store) for store, saved in EVERY]
for embedding, (_, saved) in zip(embeddings, EVERY, strict=True):
    steps(embedding, 3)
    if saved == "saved":
        embedding.save_snapshot("s3")
    steps(embedding, 2)
os.dup2(os.open(sys.argv[2], os.O_WRONLY), 2)  # a pipe
resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
raise RuntimeError("as planned")
"""


FORKED = """
import os, sys
from pathlib import Path
from support.killed import embedding_at, steps

embedding = embedding_at(Path(sys.argv[1]), sys.argv[2])
steps(embedding, 3)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("store", AHEAD)
def test_a_forked_child_ends_without_a_word(tmp_path: Path, store: str) -> None:
    ended = run_script(FORKED, tmp_path, store, whole=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_an_end_that_cannot_close_says_once_what_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours) as pipe:
        ended = run_script(FULL, tmp_path, f"/proc/{os.getpid()}/fd/{theirs}")
        os.close(theirs)
        stderr = pipe.read()
    assert ended.returncode == 1
    assert stderr.count("Traceback") == 1
    said = stderr.splitlines()[-len(UNCLOSED) :]
    assert stderr.count("could not be closed") == len(said)
    kept = {
        "saved": "restores snapshot 's3', of step 3; all writes after the snapshot are lost (steps 4 to 5)",
        "none": "starts empty, because the embedding has no snapshot of its own",
    }
    for store, saved in UNCLOSED:
        (line,) = (line for line in said if line.endswith(f"; the next run {kept[saved]}"))
        assert line.startswith("embedding 'rows' could not be closed: ")
        assert "File too large" in line
        with embedding_at(tmp_path / saved, store) as embedding:
            holds(embedding, 3 if saved == "saved" else 0)
        assert len(remarks(caplog)) == 1


def test_what_is_held_at_the_end_of_a_process_is_no_report_of_leaks() -> None:
    holds = "import ctypes, tierbed.engine._core as core; ctypes.pythonapi.Py_IncRef(ctypes.py_object(core.Crc32c()))"
    done = subprocess.run([sys.executable, "-c", holds], capture_output=True, text=True, check=True)
    assert done.stderr == ""
