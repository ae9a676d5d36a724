"""A function in the processes of a group, forked from the suite's warm process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from support.forked import with_pipe
from support.warm import Child


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
    """What `function(world, *arguments)` returns on each rank of a new group, whose ranks wait `timeout` seconds.

    What the first rank to fail raised is raised here, with its traceback as a note. No process is left.
    """
    with started(ranks, function, *arguments, timeout=timeout) as group:
        found = _answers(group)
        codes = [child.wait() for child, _ in group]
    assert codes == [0] * ranks, f"exit codes of ranks: {codes}"
    return found


def _answers(group: Sequence[tuple[Child, Connection]]) -> list[Any]:
    answers: dict[Any, Any] = {}
    while left := [pipe for _, pipe in group if pipe not in answers]:
        for pipe in wait(left):
            answers[pipe] = answer(pipe)  # type: ignore[arg-type]
    return [answers[pipe] for _, pipe in group]


_kept: dict[int, tuple[contextlib.ExitStack, list[tuple[Child, Connection]]]] = {}


def run_kept(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As `run_ranks`, on ranks that go on to the next call: `function` leaves its process and world as they were."""
    if ranks not in _kept:
        ending = contextlib.ExitStack()
        _kept[ranks] = ending, ending.enter_context(started(ranks, None))
    try:
        for _, pipe in _kept[ranks][1]:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        return _answers(_kept[ranks][1])
    except BaseException:
        end_kept()
        raise


def end_kept() -> None:
    """Those of a group end at once: none says that others are lost."""
    while _kept:
        ending, group = _kept.popitem()[1]
        for child, _ in group:
            os.kill(child.pid, signal.SIGKILL)
        ending.close()


def alike(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What each of these ranks returns, which is the same on all."""
    first, *others = run_kept(ranks, function, *arguments)
    assert others == [first] * (ranks - 1)
    return first


def on_ranks(ranks: int, run: Callable[..., Any] = run_ranks) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs on each rank of a new group, which comes first of its arguments, the fixtures after it."""

    def over(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            run(ranks, _on_rank, test, fixtures)

        signature = inspect.signature(body)
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values()][1:]
        )
        return test

    return over


def assert_alike(world: Any, found: object) -> None:
    """Each rank has found the same, to the bit."""
    found = {name: x.numpy().tobytes() for name, x in found.items()} if isinstance(found, dict) else found
    of_ranks = world.all_gather_object("what ranks found", lambda: pickle.dumps(found))
    assert of_ranks == [of_ranks[0]] * world.size, found


def _on_rank(world: Any, test: Any, fixtures: Mapping[str, Any]) -> None:
    test.__wrapped__(world, **fixtures)


@contextlib.contextmanager
def started(
    ranks: int,
    function: Callable[..., Any] | None,
    *arguments: Any,
    timeout: float = 60,
    whole: bool = False,
) -> Iterator[list[tuple[Child, Connection]]]:
    """The processes of `run_ranks` in the order of ranks, each with a pipe to `answer`. They end with the block.

    function: if None, each calls what comes by its pipe, until it is killed. whole: whether they free at their end
    what they and torch hold, as scripts do.
    """
    from torch.distributed import TCPStore  # not where the workers of a run are started

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as group:
        members = []
        for rank in range(ranks):
            place = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is this one
            member = with_pipe(be_rank, rank, ranks, place, timeout, function, arguments, whole=whole)
            for part in member:
                group.enter_context(part)
            members.append(member)
        yield members


def survivors(group: Sequence[tuple[Child, Connection]], lost: int) -> dict[int, Any]:
    """By rank, what all ranks but one returned; each of them ends in good order."""
    left = {rank: member for rank, member in enumerate(group) if rank != lost}
    found = {rank: answer(pipe) for rank, (_, pipe) in left.items()}
    assert {rank: child.wait() for rank, (child, _) in left.items()} == dict.fromkeys(left, 0)
    return found


def fails(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...]) -> str:
    """What the error says that a call raises."""
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def outcome(call: Callable[[], Any]) -> str:
    """What a call raises, after the name of its class; "fine" if it raises nothing."""
    from tierbed import TierbedError

    try:
        call()
    except (TierbedError, ArithmeticError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def answer(pipe: Connection) -> Any:
    """What a rank's function returned; what it raised is raised."""
    try:
        passed, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise AssertionError("a rank ended without an answer") from None
    if not passed:
        raise value
    return value


def be_rank(
    rank: int,
    ranks: int,
    place: Mapping[str, str],
    timeout: float,
    function: Callable[..., Any] | None,
    arguments: tuple[Any, ...],
    pipe: Connection,
) -> None:
    """Call `function(world, *arguments)` and send `answer` what it comes to. place: environment variables of torch."""
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= place
    warnings.simplefilter("error")
    import torch

    from tierbed import World

    try:
        world = World.from_env(timeout=timeout)
        while function is None:
            torch.manual_seed(0)
            task, given = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_pickled((True, task(world, *given))))
        found = True, function(world, *arguments)
        world.close()
    except BaseException as error:
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        found = False, error
    pipe.send_bytes(_pickled(found))


def _pickled(found: tuple[bool, Any]) -> bytes:
    """By pickle itself: that of `Connection` shares the memory of tensors with the process, which ends."""
    try:
        data = pickle.dumps(found)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps((False, AssertionError(f"a rank came to {found!r}: {traceback.format_exc()}")))
    return data
