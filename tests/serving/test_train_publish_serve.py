"""A trainer that is killed and resumed, its publisher, and a reader of an exported model, in processes of their own.

Rows and dense weights follow from the step, so an answer shows whether it is of one step.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.forked import with_pipe
from support.stores import options
from tierbed.serving import ServingFolder, freeze, load_program, open_served
from tierbed.serving.folder import LockedError, MissingVersionError

IDS = torch.arange(300)  # the last 60 are never trained
NUM_KILLS, NUM_PUBLISHES = 5, 180  # of each trainer, and one more of each later one
ROLLBACK, RELEASE = (2, 90), (3, 60)  # in which life of the trainer, and after how many publishes
STEPS, SAVE_EVERY = 3, 4  # of a publish, and publishes


class Ranker(nn.Module):
    """Each step adds 1 to all its rows and to `steps`."""

    def __init__(self, path: Path | None = None, store: str = "device") -> None:
        super().__init__()
        zero, key_type = [tierbed.make_constant_initializer(0.0)], torch.int64
        self.items = tierbed.MultiTableEmbedding("items", 4, torch.float32, key_type, zero, options(store, path))
        self.users = tierbed.MultiTableEmbedding("users", 2, torch.float32, key_type, zero, options("device", path))
        self.steps = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.items(ids), self.users(ids), self.steps.expand(len(ids), 1)], 1)


class Trainer(tierbed.Graph):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ranker = Ranker(path, "ssd")
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=1.0))

    def build(self, ids: Tensor) -> Tensor:
        loss = -self.ranker(ids)[:, :-1].sum() - self.ranker.steps.sum()
        loss.backward()
        return loss


def ids_of(step: int) -> Tensor:
    return ((torch.arange(48) * 7 + step * 5) % 240).unique()


def gone_before(step: int) -> Tensor:
    return (torch.arange(9) * 11 + step) % 240


VALUES = [torch.zeros(len(IDS))]  # of the rows, after each step so far


def answers_at(step: int) -> Tensor:
    """What the model answers for IDS."""
    while len(VALUES) <= step:
        number, values = len(VALUES), VALUES[-1].clone()
        values[gone_before(number)] = 0
        values[ids_of(number)] += 1
        VALUES.append(values)
    return torch.cat([VALUES[step][:, None].expand(-1, 6), torch.full((len(IDS), 1), float(step))], 1)


def train(place: str, pipe: Connection) -> None:
    """Go on from the last save until killed. Sends the number and the step of each version."""
    path, model = Path(place), Trainer(Path(place, "store"))
    if (path / "saved").exists():
        model.load(path / "saved")
    log = os.open(path / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    step = int(model.ranker.steps.item())

    def advance() -> None:
        nonlocal step
        for _ in range(STEPS):
            step += 1
            model.ranker.items.delete(gone_before(step))
            model.ranker.users.delete(gone_before(step))
            model(ids_of(step))

    advance()
    for number in range(1 << 30):
        if number % SAVE_EVERY == 0:
            model.save(path / "saved", overwrite=True)
        os.write(log, b"%d\n" % step)
        handle, published = model.publish(path / "served", "float32"), step
        advance()
        with suppress(LockedError):  # while the folder is rolled back or released
            version = handle.wait()
            assert version is not None
            assert version.step == published
            pipe.send((version.version, published))


def read(place: str, pipe: Connection) -> None:
    """Answer until the pipe is closed, while a thread follows the publisher.

    On request, sends the version and how many answers there were of each step since the last request.
    """
    signal.alarm(1800)  # what hangs fails
    seen, failed = Counter[int](), list[BaseException]()
    with open_served(Path(place, "served")) as served:
        program = load_program(Path(place, "model.pt2"), served)
        has_ended = threading.Event()

        def refresh() -> None:
            try:
                while not has_ended.is_set():
                    served.refresh()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=refresh)
        thread.start()
        try:
            while True:
                if pipe.poll():
                    pipe.recv()
                    served.refresh()
                    seen[check(program(IDS))] += 1
                    assert not failed, failed
                    pipe.send((served.version, dict(seen)))
                    seen.clear()
                seen[check(program(IDS))] += 1
        except EOFError:
            return
        finally:
            has_ended.set()
            thread.join()


def check(answers: Tensor) -> int:
    """Returns the step that all answers are of."""
    step = int(answers[0, -1])
    assert torch.equal(answers, answers_at(step)), f"not of step {step}: {answers}"
    return step


def export(path: Path) -> None:
    with open_served(path / "served") as served:
        program = torch.export.export(freeze(Ranker(), served, "ranker"), (IDS,))
    torch.export.save(program, path / "model.pt2")


def ask(reader: Connection) -> tuple[int, dict[int, int]]:
    """What `read` sends."""
    reader.send(None)
    return reader.recv()


def change(what: Callable[[], int]) -> int:
    """Change the folder in between two publishes. Returns the version that readers take since."""
    while True:
        with suppress(LockedError, MissingVersionError):
            return what()


@pytest.mark.slow
def test_readers_see_whole_versions_while_the_trainer_is_killed_and_resumed(tmp_path: Path) -> None:
    chance, folder, steps = random.Random(0), ServingFolder(tmp_path / "served"), {}
    last, held, answers = 0, None, Counter[int]()

    def roll_back() -> int:
        oldest = folder.list_versions()[0]
        folder.rollback(oldest)
        return oldest

    with ExitStack() as ending:
        for life in range(NUM_KILLS + 1):
            trainer, events = with_pipe(train, str(tmp_path))
            with trainer, events:
                for number in range(NUM_PUBLISHES + life):
                    version, steps[version] = events.recv()
                    assert version > last
                    last = version
                    if not answers:
                        export(tmp_path)
                        reader, pipe = map(ending.enter_context, with_pipe(read, str(tmp_path)))
                    if (life, number) == ROLLBACK:
                        held = change(roll_back)
                        assert held < last
                        answers.update(ask(pipe)[1])
                    elif (life, number) == RELEASE:
                        held = None
                        assert change(lambda: folder.release().version) >= last
                        answers.update(ask(pipe)[1])
                    taken, seen = ask(pipe)
                    answers.update(seen)
                    if held is None:
                        assert taken >= version
                    else:
                        assert (taken, [*seen]) == (held, [steps[held]])
                time.sleep(chance.uniform(0, 0.2))
                trainer.kill()
        pipe.close()
        assert reader.wait() == 0
    assert {*answers} <= {int(line) for line in (tmp_path / "log").read_text().split()}
    assert len(answers) > NUM_PUBLISHES
