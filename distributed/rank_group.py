"""The ranks that share rows, and what moves bytes between them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from logging import getLogger
from threading import Lock
from time import monotonic
from typing import Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..engine.errors import GroupError, OptionError
from ..engine.ops.batch import empty
from ..engine.signals import deferred_signals, uninterrupted
from .peer_monitor import GroupAborted, PeerMonitor, connect

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun's report finds what a rank raised
POLL = timedelta(seconds=0.1)  # how often a wait checks for signals, and for ranks that aborted the group
PATIENCE = 1.0  # seconds that a wait continues after a signal, so that a step whose ranks all answer completes
ENDING = (signal.SIGINT, signal.SIGTERM)
CONNECT_SECONDS = 60.0  # for all ranks to connect to each other
_closed_groups: set[tuple[int, ...]] = set()  # the ranks of groups that this process has left


class CollectiveSequence:
    """The collectives of a step in their order, and the dense parameters whose gradients it sums, as texts."""

    def __init__(self, exchanges: Sequence[str] = (), parameters: Sequence[str] = ()) -> None:
        self.parts = {f"exchange {number}": text for number, text in enumerate(exchanges)}
        self.parts |= {f"parameter {number}": text for number, text in enumerate(parameters)}
        self._checksum = str(crc32(repr(self.parts).encode()))

    def __repr__(self) -> str:
        """A text that is equal on ranks whose sequences are equal."""
        return self._checksum


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


class RankGroup:
    """A separate process group for the ranks of `group`, and the collectives that it makes, in one thread.

    If a rank does not answer, or this one is interrupted while it waits, the group is aborted: `failure` says why, and
    every later call raises it. The end of the process waits for no other rank.
    """

    def __init__(
        self,
        ranks: list[int],
        rank: int,
        timeout: float = 600,
        rows: torch.dtype = torch.float32,
        grads: torch.dtype = torch.float32,
    ) -> None:
        """ranks: those of torch's processes, in order; none for this process alone. rank: the place of this one."""
        self.rank, self.size = rank, max(len(ranks), 1)
        self.timeout, self.rows, self.grads = timeout, rows, grads
        self.on_host = 1  # how many of the ranks are on this host
        self.step_collectives = 0  # collectives of steps that began
        self.collectives = NO_COLLECTIVES  # of the running step, which all ranks must be in
        self.pending: Any = None  # the Handshake whose headers are in flight
        self.synced_tensors = WeakTensorKeyDictionary()  # those that began with the values of rank 0
        self.pinned_batches: list[Any] | None = None  # of a graph's step so far, in the order of its pins
        self.shared_error: BaseException | None = None  # what was raised on all ranks last
        self.mismatches = 0  # how often all ranks raised that they differ
        self.failure: GroupError | None = None
        self._user: tuple[int, int] | None = None  # the process and the thread that make the calls
        self.calls = self._common = 0  # collectives that this rank began, and those that all are known to have begun
        self._in_flight: list[PendingAllToAll] = []  # a failed step leaves some that no thread waits for
        self._group: dist.ProcessGroup | None = None
        self._peers: PeerMonitor | None = None
        self._op = "start of the world"  # the last call that began
        self._report = LossReport(self.rank)
        if ranks:
            self._connect(ranks)

    def close(self) -> None:
        """Leave the group. This waits for no other rank, and at most PATIENCE for what all ranks have begun."""
        with uninterrupted():
            if self.failure is None:
                self._finish_common()
            self.failure = self.failure or GroupError("this world is closed")
            if self._peers is not None:  # first, so that no rank waits for a closed group
                self._peers.close("it closed its world")
                self._peers = None
            self._leave_group()

    def check_thread(self) -> None:
        """GroupError unless the calling thread is that of the first call, which issues every collective."""
        if self.size == 1:
            return
        here = os.getpid(), threading.get_ident()
        self._user = self._user or here
        if here != self._user:
            who = "a forked process" if here[0] != self._user[0] else threading.current_thread().name
            raise GroupError(
                f"{who} uses a world that another thread uses: ranks meet in the order of their calls, so one thread "
                "makes all of them"
            )

    def begin_step(self, collectives: CollectiveSequence, nested: bool) -> None:
        """A graph's step begins, which makes these collectives. nested: within a step."""
        self.collectives, self.shared_error = collectives, None
        if not nested:
            self.pinned_batches = []

    def end_step(self, nested: bool) -> None:
        """The step has ended."""
        self.collectives = NO_COLLECTIVES
        if not nested:
            self.shared_error = self.pinned_batches = None  # frames of the error hold what the step computed

    def must_report(self, error: BaseException) -> bool:
        """Whether other ranks still need an error: it was not raised on all, and the group is not aborted."""
        return self.size > 1 and self.failure is None and error is not self.shared_error

    def raise_shared(self, error: BaseException, cause: BaseException | None = None) -> NoReturn:
        """Raise an error that every rank raises in this call."""
        self.shared_error = error
        if cause is None:
            raise error
        raise error from cause

    def check_alive(self) -> None:
        """Raises GroupError if the group is aborted or closed."""
        if self.failure is not None:
            raise GroupError(f"the group of ranks has ended: {self.failure}", self.failure.ranks)

    def start(
        self,
        op: str,
        given: Tensor,
        sends: Sequence[int] | None = None,
        takes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> PendingAllToAll:
        """Start to send blocks of `given` to the ranks, and to receive theirs, in `out` or else in new memory.

        Both are contiguous CPU tensors. sends, takes: the lengths of blocks along dimension 0, in the order of ranks;
        all equal if left out. Each is what the other rank knows as well: a wrong one ends the process. `op` names the
        call in errors.
        """
        sends = sends or [len(given) // self.size] * self.size
        takes = takes or sends
        if out is None:
            out = empty((sum(takes), *given.shape[1:]), given.dtype)
        self.check_thread()
        self.check_alive()
        self.check_others(op, self.calls + 1)  # what they still wait for may be of other sizes
        assert self._group is not None
        # what all_to_all_single calls, without the half of its time that is Python's
        work = self._group.alltoall_base(out, given, [*takes], [*sends], dist.AllToAllOptions())
        self.calls += 1
        self._op = op
        if self._peers is not None:
            self._peers.at = self.calls
        pending = PendingAllToAll(self, op, self.calls, work, out)
        self._in_flight = [*(one for one in self._in_flight if one.is_pending()), pending]
        return pending

    def exchange_bytes(self, op: str, data: bytes, readers: int | None = None) -> list[bytes]:
        """The bytes of each rank, in rank order, if all ranks are known to be in this very call.

        readers: how many ranks, from rank 0 on, receive them; None for all. The others get empty ones.
        """
        if self.size == 1:
            return [data]
        readers = self.size if readers is None else readers
        sends = [len(data) * (rank < readers) for rank in range(self.size)]
        takes: list[int] = self.start(op, torch.tensor(sends)).wait().tolist()
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        out = self.start(op, given.repeat(readers), sends, takes).wait()
        return [bytes(part.numpy()) for part in out.split(takes)]

    @contextmanager
    def collective_block(self, op: str) -> Iterator[None]:
        """A block of collectives, which other ranks make as well. Handlers of signals wait until it ends.

        If it raises in the middle an error that the other ranks do not know of, the group is aborted.
        """
        if self.size == 1:
            yield
            return
        self.check_thread()
        before = self.calls
        with uninterrupted():
            try:
                yield
            except BaseException as error:
                if self.must_report(error) and self.calls > before:
                    self.abort(op, f"failed with {type(error).__name__}: {error}")
                raise

    def note_started_by_all(self, call: int) -> None:
        """All ranks have begun the collective of this number, and so those before it."""
        self._common = max(self._common, call)

    def check_others(self, op: str, call: int) -> None:
        """Raises GroupError if another rank has aborted the group, or closed its world before this call.

        That rank has sent why, whatever this one does.
        """
        if self._peers is None:
            return
        if self._peers.aborted is not None:
            raise self._abort_by_peer(op, self._peers.aborted)
        if self._peers.closed_before(call):
            raise self.abort_unresponsive(op, call, "a rank closed its world")

    def abort_unresponsive(self, op: str, call: int, how: str) -> GroupError:
        """Abort the group since `op`, the collective of this number, failed. Returns the error with what ranks report.

        how: as the failure showed here.
        """
        missing: Mapping[int, str] = {}
        if self._peers is not None:
            try:
                missing = self._peers.unresponsive(call)
            except GroupAborted as aborted:
                return self._abort_by_peer(op, aborted)
            self._peers.broadcast_abort(self.rank, missing)
        return self._abort(f"{op}: {_described(missing) or how}", missing)

    def abort(self, op: str, why: str) -> GroupError:
        """Abort the group since this rank failed in the middle of `op`. Returns the error."""
        if self._peers is not None:
            self._peers.broadcast_abort(self.rank, {self.rank: why})
        return self._abort(f"{op}: {why}", {})

    def _abort_by_peer(self, op: str, aborted: GroupAborted) -> GroupError:
        if self._peers is not None:
            self._peers.broadcast_abort(aborted.rank, aborted.why)
        return self._abort(f"{op}: rank {aborted.rank} ended the group: {_described(aborted.why)}", aborted.why)

    def _abort(self, message: str, missing: Mapping[int, str]) -> GroupError:
        self.failure = GroupError(message, sorted(missing))
        if missing:
            self._report.write(self.failure)
        self._leave_group()
        return self.failure

    def _note_loss(self, rank: int, why: str) -> None:
        """Report a rank whose process was killed as soon as the thread that watches the others notices it."""
        message = f"rank {rank} was lost ({why}); the last call here: {self._op}"
        self._report.write(GroupError(message, [rank]), noticed=True)

    def _leave_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            _closed_groups.add(tuple(dist.get_process_group_ranks(group)))
            left, self._in_flight = self._in_flight, []
            completed = [one.release() for one in left]
            if not all(completed):  # the end of the object would wait for that
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            dist.destroy_process_group(group)

    def _finish_common(self) -> None:
        """Wait for the collectives that failed steps left, of those that all ranks have begun."""
        end = monotonic() + PATIENCE
        for pending in self._in_flight:
            while pending.call <= self._common and monotonic() < end and pending.poll():
                pass

    def _connect(self, ranks: list[int]) -> None:
        """Make a process group with the other ranks, and connect to each of them."""
        if tuple(ranks) in _closed_groups:
            raise OptionError(
                "a world of these ranks was closed in this process, and torch would meet at its old addresses; make "
                "one World, and close it at the end"
            )
        timeout, self.timeout = self.timeout, max(self.timeout, CONNECT_SECONDS)  # some may still be starting
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # torch 2.11 sorts always
        try:
            self._group = dist.new_group(
                ranks, timedelta(seconds=self.timeout), "gloo", use_local_synchronization=True, **order
            )
        except RuntimeError as error:
            raise GroupError(f"the ranks {ranks} did not meet: {error}") from error
        try:
            exchange = partial(self.exchange_bytes, self._op)
            sockets, self.on_host = connect(self.rank, self.size, exchange, CONNECT_SECONDS)
            self._peers = PeerMonitor(sockets, self._note_loss)
        except BaseException:
            self.close()
            raise
        self.timeout = timeout


class PendingAllToAll:
    """An all-to-all in flight."""

    def __init__(self, group: RankGroup, op: str, call: int, work: dist.Work, out: Tensor) -> None:
        self._group, self._op, self.call, self._out = group, op, call, out
        self._work: dist.Work | None = work  # which holds the process group
        self._end = monotonic() + group.timeout
        self._arrived, self._failure = False, ""

    def wait(self) -> Tensor:
        """Wait until all is sent and received. Returns `out`.

        Handlers of signals wait as well, until a surrounding `uninterrupted` block ends. Ctrl-C and SIGTERM abort the
        group if they have waited for a second.

        Raises:
            GroupError: a rank did not answer, or a signal came. The group is aborted.
        """
        if self._arrived:
            return self._out
        with uninterrupted():
            self._group.check_alive()
            interrupted_at = None
            while self.poll():
                self._group.check_others(self._op, self.call)
                now = monotonic()
                if now > self._end:
                    raise self._group.abort_unresponsive(self._op, self.call, f"no answer in {self._group.timeout:g} s")
                if signals := [number for number in deferred_signals() if number in ENDING]:
                    interrupted_at = interrupted_at or now
                    if now > interrupted_at + PATIENCE:
                        name = signal.Signals(signals[0]).name
                        raise self._group.abort(self._op, f"interrupted by {name} in a wait for others")
            if self._failure:
                raise self._group.abort_unresponsive(self._op, self.call, self._failure)
            return self._out

    def is_pending(self) -> bool:
        """Whether it is in flight. Once completed it releases the process group."""
        if self._work is not None and self._work.is_completed():
            try:
                self._work.wait()
                self._arrived = True
            except RuntimeError as error:
                self._failure = str(error)
            self._work = None
        return self._work is not None

    def poll(self) -> bool:
        """Wait for it, POLL at most. Returns whether it is still in flight."""
        if self._work is not None:
            with suppress(RuntimeError):
                self._work.wait(POLL)
        return self.is_pending()

    def release(self) -> bool:
        """Release the process group. Returns whether it was completed."""
        work, self._work = self._work, None
        return work is None or work.is_completed()


def _described(missing: Mapping[int, str]) -> str:
    """What is known of the ranks that did not answer."""
    reasons = dict.fromkeys(missing.values())
    return "; ".join(
        f"{name_ranks([rank for rank in sorted(missing) if missing[rank] == why])} did not answer ({why})"
        for why in reasons
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks as a message names them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
