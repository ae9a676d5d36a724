"""The ranks that share rows, and what moves bytes between them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from logging import getLogger
from threading import Lock
from time import monotonic
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..engine.checks import as_number
from ..engine.errors import GroupError, OptionError
from ..engine.signals import deferred_signals, uninterrupted
from .peer_monitor import ADDRESS, GroupAborted, PeerMonitor, connect

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun's report finds what a rank raised
LOOK = timedelta(seconds=0.1)  # a wait looks for signals, and for ranks that ended the group, so often
PATIENCE = 1.0  # seconds that a wait goes on after a signal, so that a step whose ranks all answer is made whole
ENDING = (signal.SIGINT, signal.SIGTERM)
MEETING = 60.0  # seconds for all ranks to connect to each other
LONGEST = 10**7  # seconds of a timeout
WIRE = (torch.float32, torch.bfloat16, torch.float16)
_left: set[tuple[int, ...]] = set()  # the ranks of groups that this process has left


class CollectiveSequence:
    """The exchanges of a step in their order, and the dense parameters whose gradients it sums, in words."""

    def __init__(self, exchanges: Sequence[str] = (), parameters: Sequence[str] = ()) -> None:
        self._exchanges, self._parameters = exchanges, parameters

    @property
    def parts(self) -> dict[str, str]:
        """Every part of it by kind and place."""
        exchanges = {f"exchange {place}": said for place, said in enumerate(self._exchanges)}
        return exchanges | {f"parameter {place}": said for place, said in enumerate(self._parameters)}

    @cached_property
    def checksum(self) -> int:
        """A number that is equal on ranks whose scripts are."""
        return crc32(repr((*self._exchanges, "", *self._parameters)).encode())


NO_COLLECTIVES = CollectiveSequence()  # outside of a graph's steps


class LossReport:
    """Writes the first error of a group to the log, which is stderr by default, and to torchrun's report."""

    def __init__(self, rank: int) -> None:
        self._rank, self._writing, self._is_written = rank, Lock(), False
        if ERROR_FILE in os.environ:  # imported now, since there is no time once a rank is lost
            import torch.distributed.elastic.multiprocessing.errors  # noqa: F401

    def write(self, error: GroupError, noticed: bool = False) -> None:
        """May be called by any thread. noticed: by no call of this rank, which ends by the first such error.

        Ranks that are lost after the first are those that torchrun ends because of it.
        """
        with self._writing:
            if self._is_written and noticed:
                return
            if not self._is_written:
                getLogger("tierbed").error("GroupError on rank %d: %s", self._rank, error)
            self._is_written = True
            if ERROR_FILE in os.environ:
                _record(error)


def _record(error: GroupError) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # the handler takes the traceback of the error that is handled
    except GroupError:
        try:
            get_error_handler().record_exception(error)
        except OSError as failed:
            getLogger("tierbed").warning("%s=%s: %s", ERROR_FILE, os.environ[ERROR_FILE], failed)
    finally:
        error.__traceback__ = None


class Settles(Protocol):
    """Headers on their way."""

    def settle(self) -> object: ...


class RankGroup:
    """A process group of its own for the ranks of `group`, and the collectives that it makes, in one thread.

    Where a rank does not answer, or this one is interrupted while it waits, the group is at its end: `failure` says
    why, and every later call raises it. The end of the process waits for no other rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 600,
        rows: torch.dtype = torch.float32,
        grads: torch.dtype = torch.float32,
    ) -> None:
        seconds = as_number(timeout)
        if seconds is None or not 0 < seconds <= LONGEST:
            raise OptionError(f"timeout={timeout!r}: give seconds, above 0 and at most {LONGEST}")
        for name, dtype in (("rows", rows), ("grads", grads)):
            if dtype not in WIRE:
                raise OptionError(f"{name}={dtype}: give one of {', '.join(map(str, WIRE))}")
        self.rank, self.size = _place(group)
        self.timeout, self.rows, self.grads = timeout, rows, grads
        self.on_host = 1  # how many of the ranks are on this host
        self.passed = 0  # exchanges of steps that began
        self.script = NO_COLLECTIVES  # of the step under way, which all ranks must be in
        self.pending: Settles | None = None  # headers on their way
        self.begun = WeakTensorKeyDictionary()  # the tensors that began as those of rank 0
        self.batches: list[Any] | None = None  # that a graph's step has pinned so far, in the order of its pins
        self.told: BaseException | None = None  # what was raised on all ranks last
        self.differed = 0  # how often all ranks were told that they differ
        self.failure: GroupError | None = None
        self._user: tuple[int, int] | None = None  # the process and the thread that make the calls
        self.calls = self._common = 0  # exchanges that this rank began, and those that all are known to have begun
        self._under_way: list[PendingAllToAll] = []  # a failed step leaves some that nobody waits for
        self._group: dist.ProcessGroup | None = None
        self._peers: PeerMonitor | None = None
        self._op = "start of the world"  # the last call that began
        self._report = LossReport(self.rank)
        if self.size > 1:
            _check_backend(group)
            self._meet(dist.get_process_group_ranks(group or dist.group.WORLD))

    def close(self) -> None:
        """Leave the group. This waits for no other rank, but a moment for what all ranks have begun."""
        with uninterrupted():
            if self.failure is None:
                self._finish()
            self.failure = self.failure or GroupError("this world is closed")
            if self._peers is not None:  # first, so that no rank meets a closed group unsaid
                self._peers.close("it closed its world")
                self._peers = None
            self._leave_group()

    def check_thread(self) -> None:
        """The calling thread is the one that issues every collective, which the first call decides."""
        here = os.getpid(), threading.get_ident()
        self._user = self._user or here
        if here != self._user:
            who = "a forked process" if here[0] != self._user[0] else threading.current_thread().name
            raise GroupError(
                f"{who} uses a world that another thread uses: ranks meet in the order of their calls, so one thread "
                "makes all of them"
            )

    def untold(self, error: BaseException) -> bool:
        """Whether other ranks are to hear of an error: it was not raised on all, and the group is not at its end."""
        return self.failure is None and error is not self.told

    def check_alive(self) -> None:
        """Raises GroupError where the group is at its end."""
        if self.failure is not None:
            raise GroupError(f"the group of ranks is at its end: {self.failure}", self.failure.ranks)

    def start(
        self, op: str, out: Tensor, given: Tensor, out_sizes: Sequence[int], given_sizes: Sequence[int]
    ) -> PendingAllToAll:
        """Begin to send parts of `given` to the ranks, and to receive parts of `out` from them.

        Both are contiguous CPU tensors of one dimension, and the sizes, in elements, are in the order of ranks. Each
        size is what the other rank knows as well: a wrong one ends the process. `op` tells the user what is exchanged.
        """
        self.check_thread()
        self.check_alive()
        self.check_others(op, self.calls + 1)  # what they still wait for may be of other sizes
        assert self._group is not None
        # what all_to_all_single calls, without the half of its time that is Python's
        work = self._group.alltoall_base(out, given, [*out_sizes], [*given_sizes], dist.AllToAllOptions())
        self.calls += 1
        self._op = op
        if self._peers is not None:
            self._peers.at = self.calls
        begun = PendingAllToAll(self, op, self.calls, work, out)
        self._under_way = [*(one for one in self._under_way if one.lasts()), begun]
        return begun

    @contextmanager
    def whole(self, op: str) -> Iterator[None]:
        """A block of exchanges, which other ranks make as well. Handlers of signals wait until it ends.

        Where it raises in the middle what the other ranks do not know of, the group is at its end.
        """
        self.check_thread()
        before = self.calls
        with uninterrupted():
            try:
                yield
            except BaseException as error:
                if self.untold(error) and self.calls > before:
                    self.broken_off(op, f"failed by {type(error).__name__}: {error}")
                raise

    def met(self, call: int) -> None:
        """All ranks have begun the exchange of this number, and so those before it."""
        self._common = max(self._common, call)

    def check_others(self, op: str, call: int) -> None:
        """Raises GroupError where another rank has ended the group, or closed its world before this call.

        This one is told of that whatever it does.
        """
        if self._peers is None:
            return
        if self._peers.left is not None:
            raise self._ended_by(op, self._peers.left)
        if self._peers.closed_before(call):
            raise self.lost(op, call, "a rank closed its world")

    def lost(self, op: str, call: int, how: str) -> GroupError:
        """The group is at its end: what the ranks say that `op`, of this number, failed by. how: as it showed here."""
        missing: Mapping[int, str] = {}
        if self._peers is not None:
            try:
                missing = self._peers.missing(call)
            except GroupAborted as left:
                return self._ended_by(op, left)
            self._peers.leave(self.rank, missing)
        return self._end(f"{op}: {_said(missing) or how}", missing)

    def broken_off(self, op: str, why: str) -> GroupError:
        """The group is at its end, by what happened to this rank in the middle of `op`."""
        if self._peers is not None:
            self._peers.leave(self.rank, {self.rank: why})
        return self._end(f"{op}: {why}", {})

    def _ended_by(self, op: str, left: GroupAborted) -> GroupError:
        if self._peers is not None:
            self._peers.leave(left.rank, left.why)
        return self._end(f"{op}: rank {left.rank} ended the group: {_said(left.why)}", left.why)

    def _end(self, message: str, missing: Mapping[int, str]) -> GroupError:
        self.failure = GroupError(message, sorted(missing))
        if missing:
            self._report.write(self.failure)
        self._leave_group()
        return self.failure

    def _note_loss(self, rank: int, why: str) -> None:
        """Report a rank whose process was killed as soon as the thread that watches the others hears of it."""
        said = f"rank {rank} was lost ({why}); the last call here: {self._op}"
        self._report.write(GroupError(said, [rank]), noticed=True)

    def _leave_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            _left.add(tuple(dist.get_process_group_ranks(group)))
            left, self._under_way = self._under_way, []
            over = [one.let_go() for one in left]
            if not all(over):  # the end of the object would wait for that
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            dist.destroy_process_group(group)

    def _finish(self) -> None:
        """Let exchanges arrive that failed steps left, of those that all ranks have begun."""
        end = monotonic() + PATIENCE
        for exchange in self._under_way:
            while exchange.call <= self._common and exchange.lasts() and monotonic() < end:
                exchange.look()

    def _meet(self, ranks: list[int]) -> None:
        """Make a process group with the other ranks, and connect to each of them."""
        if tuple(ranks) in _left:
            raise OptionError(
                "a world of these ranks was closed in this process, and torch would meet at its old addresses; make "
                "one World, and close it at the end"
            )
        timeout, self.timeout = self.timeout, max(self.timeout, MEETING)  # processes may be starting yet
        try:
            self._group = dist.new_group(
                ranks, timedelta(seconds=self.timeout), "gloo", use_local_synchronization=True, sort_ranks=False
            )
        except RuntimeError as error:
            raise GroupError(f"the ranks {ranks} did not meet: {error}") from error
        try:
            sockets, self.on_host = connect(self.rank, self.size, self._addresses, MEETING)
            self._peers = PeerMonitor(sockets, self._note_loss)
        except BaseException:
            self.close()
            raise
        self.timeout = timeout

    def _addresses(self, own: bytes) -> list[bytes]:
        given = torch.frombuffer(bytearray(own.ljust(ADDRESS)), dtype=torch.uint8).repeat(self.size)
        sizes = [ADDRESS] * self.size
        found = self.start("start of the world", torch.empty_like(given), given, sizes, sizes).wait()
        return [part.numpy().tobytes() for part in found.split(ADDRESS)]


class PendingAllToAll:
    """Tensors on their way between the ranks."""

    def __init__(self, group: RankGroup, op: str, call: int, work: dist.Work, out: Tensor) -> None:
        self._group, self._op, self.call, self._out = group, op, call, out
        self._work: dist.Work | None = work  # which holds the process group
        self._end = monotonic() + group.timeout
        self._arrived = False

    def wait(self) -> Tensor:
        """Wait until all that was sent has gone and all that comes is there. Returns `out`.

        Handlers of signals wait as well, until a surrounding `uninterrupted` block ends. Ctrl-C and SIGTERM end the
        group where they have waited for a second.

        Raises:
            GroupError: a rank did not answer, or a signal came. The group is at its end.
        """
        if self._arrived:
            return self._out
        with uninterrupted():
            self._group.check_alive()
            came = None
            while not self._over():
                self._group.check_others(self._op, self.call)
                now = monotonic()
                if now > self._end:
                    raise self._group.lost(self._op, self.call, f"no answer in {self._group.timeout:g} s")
                if signals := [number for number in deferred_signals() if number in ENDING]:
                    came = came or now
                    if now > came + PATIENCE:
                        name = signal.Signals(signals[0]).name
                        raise self._group.broken_off(self._op, f"interrupted by {name} in a wait for others")
            return self._out

    def lasts(self) -> bool:
        """Whether it is under way. What has arrived lets go of the process group, whoever waits for it."""
        if self._work is not None and self._work.is_completed():
            with suppress(RuntimeError):  # `wait` says why it failed
                self._work.wait()
                self._arrived, self._work = True, None
            return False
        return self._work is not None

    def look(self) -> None:
        """Wait for it, LOOK at most."""
        if self._work is not None:
            with suppress(RuntimeError):
                self._work.wait(LOOK)

    def let_go(self) -> bool:
        """End its hold on the process group. Returns whether it was over."""
        work, self._work = self._work, None
        return work is None or work.is_completed()

    def _over(self) -> bool:
        """Whether it is over, after a wait of LOOK at most. Raises GroupError where it failed."""
        self.look()
        if self.lasts():
            return False
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._group.lost(self._op, self.call, str(error)) from None  # its text is in ours
        return True


def _said(missing: Mapping[int, str]) -> str:
    """What is known of the ranks that did not answer."""
    reasons = dict.fromkeys(missing.values())
    return "; ".join(
        f"{named([rank for rank in sorted(missing) if missing[rank] == why])} did not answer ({why})" for why in reasons
    )


def named(ranks: Sequence[int]) -> str:
    """The ranks as a message names them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise OptionError("there is no process group: World.from_env() makes it, as dist.init_process_group does")
        return 0, 1
    if (rank := dist.get_rank(group)) < 0:
        raise OptionError("group: this process is none of its ranks")
    return rank, dist.get_world_size(group)


def _check_backend(group: dist.ProcessGroup | None) -> None:
    """OptionError for a group that was made without Gloo."""
    backends = dist.get_backend_config(group)
    if "gloo" not in backends:
        raise OptionError(
            f"group: its backends are {backends}; rows travel between ranks through host memory, those of a GPU as "
            "well, over Gloo, and NCCL sends none of that: call init_process_group('cpu:gloo,cuda:nccl'), or give "
            "new_group(backend='gloo')"
        )
