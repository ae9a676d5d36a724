"""`RankGroup`: a process group that moves bytes between the ranks that share rows.

All transfers are all-to-alls over Gloo. One thread per rank starts them, in the same order on every rank. Starting a
transfer and waiting for it are separate calls, so that computation can overlap with the transfer. While a rank waits,
it checks for signals and for ranks that aborted the group. So neither a lost rank nor Ctrl-C leaves a rank hanging.
After a failure the group is aborted and cannot be used again.
"""

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

from ..engine.errors import GroupError, OptionError, undo_on_error
from ..engine.ops.batch import empty
from ..engine.signals import defer_signals, list_deferred_signals
from .peer_monitor import GroupAbortedError, PeerMonitor, connect

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # torchrun reads a rank's error from this file
POLL_INTERVAL = timedelta(seconds=0.1)  # how often a wait checks for signals and aborts
GRACE_SECONDS = 1.0  # after Ctrl-C or SIGTERM, a wait continues this long, so that a running step may finish
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CONNECT_SECONDS = 60.0  # how long all ranks have to connect
_closed_groups: set[tuple[int, ...]] = set()  # closed groups of this process; each tuple lists the ranks of a group


class CollectiveSequence:
    """Describes a step's collectives in order, and the dense parameters whose gradients the step sums."""

    def __init__(self, exchanges: Sequence[str] = (), parameters: Sequence[str] = ()) -> None:
        self.parts = {f"exchange {index}": text for index, text in enumerate(exchanges)}
        self.parts |= {f"parameter {index}": text for index, text in enumerate(parameters)}
        self._checksum = str(crc32(repr(self.parts).encode()))

    def __repr__(self) -> str:
        """Return a checksum. Ranks compare these checksums to check that their sequences are the same."""
        return self._checksum


NO_COLLECTIVES = CollectiveSequence()  # used outside a graph's steps


class LostRankReporter:
    """Writes a group's first error to the log (by default, to stderr) and to torchrun's error file."""

    def __init__(self, rank: int) -> None:
        self._rank, self._lock, self._has_written = rank, Lock(), False
        if ERROR_FILE_VARIABLE in os.environ:  # import now, since after a rank is lost there is no time
            import torch.distributed.elastic.multiprocessing.errors  # noqa: F401

    def write(self, error: GroupError, is_early: bool = False) -> None:
        """Write an error. Any thread may call this.

        is_early: True if no call of this rank has raised the error yet. An early error is written only if it is the
        first error: once a rank is lost, torchrun ends the other ranks, so later lost ranks are only a consequence.
        """
        with self._lock:
            if self._has_written and is_early:
                return
            if not self._has_written:
                getLogger("tierbed").error("GroupError on rank %d: %s", self._rank, error)
            self._has_written = True
            if ERROR_FILE_VARIABLE in os.environ:
                _write_error_file(error)


def _write_error_file(error: GroupError) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # the handler reads the traceback of the exception being handled
    except GroupError:
        try:
            get_error_handler().record_exception(error)
        except OSError as failed:
            getLogger("tierbed").warning("%s=%s: %s", ERROR_FILE_VARIABLE, os.environ[ERROR_FILE_VARIABLE], failed)
    finally:
        error.__traceback__ = None


class RankGroup:
    """A separate process group for the given ranks, and its collectives. One thread must make all collectives.

    If a rank does not answer, or if a signal interrupts a wait, the group is aborted. `failure` is then the error, and
    every later call raises it. A process that ends never waits for other ranks.
    """

    def __init__(
        self,
        ranks: list[int],
        rank: int,
        timeout: float = 600,
        rows: torch.dtype = torch.float32,
        grads: torch.dtype = torch.float32,
    ) -> None:
        """ranks: the group's global ranks, in order; [] for a single process. rank: this process's index in `ranks`."""
        self.rank, self.size = rank, max(len(ranks), 1)
        self.timeout, self.row_dtype, self.grad_dtype = timeout, rows, grads
        self.num_ranks_on_host = 1
        self.num_step_collectives = 0  # number of collectives that this rank has begun in steps
        self.collectives = NO_COLLECTIVES  # the running step's collectives; must be equal on all ranks
        self.pending_handshake: Any = None  # the Handshake whose headers are in flight
        self.synced_tensors = WeakTensorKeyDictionary()  # tensors that were broadcast from rank 0
        self.pinned_batches: list[Any] | None = None  # batches pinned in a graph's running step, in order
        self.shared_error: BaseException | None = None  # the last error raised on all ranks
        self.num_mismatches = 0  # how often all ranks raised because their calls or values differed
        self.failure: GroupError | None = None
        self._caller: tuple[int, int] | None = None  # ids of the process and the thread that must make all calls
        self.num_calls = 0  # how many collectives this rank has begun
        self.num_shared_calls = 0  # how many collectives all ranks have begun, as far as this rank knows
        self._transfers: list[PendingAllToAll] = []  # includes transfers of failed steps; no step waits for these
        self._group: dist.ProcessGroup | None = None
        self._peer_monitor: PeerMonitor | None = None
        self._last_op = "connecting the ranks"  # the last call begun here
        self._lost_rank_reporter = LostRankReporter(self.rank)
        if ranks:
            self._connect(ranks)

    def close(self) -> None:
        """Leave the group. Waits up to GRACE_SECONDS, and only for collectives that all ranks have begun."""
        with defer_signals():
            if self.failure is None:
                deadline = monotonic() + GRACE_SECONDS
                for transfer in [t for t in self._transfers if t.call_number <= self.num_shared_calls]:
                    while monotonic() < deadline and transfer.wait_briefly():
                        pass
            self.failure = self.failure or GroupError("this world is closed")
            if self._peer_monitor is not None:  # closed before the process group, so that no rank waits for that
                self._peer_monitor.close("it closed its world")
                self._peer_monitor = None
            self._leave_group()

    def check_thread(self) -> None:
        """Raise GroupError if the calling thread is not the first caller. One thread must make all collectives."""
        if self.size == 1:
            return
        caller = os.getpid(), threading.get_ident()
        self._caller = self._caller or caller
        if caller != self._caller:
            caller_name = "a forked process" if caller[0] != self._caller[0] else threading.current_thread().name
            raise GroupError(
                f"{caller_name} uses a world that another thread uses: ranks match calls by their order, so one thread "
                "must make all of them"
            )

    def begin_step(self, collectives: CollectiveSequence, is_nested: bool) -> None:
        """Begin a graph's step with these collectives. is_nested: True inside another step."""
        self.collectives, self.shared_error = collectives, None
        if not is_nested:
            self.pinned_batches = []

    def end_step(self, is_nested: bool) -> None:
        self.collectives = NO_COLLECTIVES
        if not is_nested:
            self.shared_error = self.pinned_batches = None  # an error's frames keep the step's tensors alive

    def must_report(self, error: BaseException) -> bool:
        """True if other ranks do not know this error yet: they did not raise it, and the group is alive."""
        return self.size > 1 and self.failure is None and error is not self.shared_error

    def raise_shared_error(self, error: BaseException, cause: BaseException | None = None) -> NoReturn:
        """Raise an error that every rank raises in this call."""
        self.shared_error = error
        if cause is None:
            raise error
        raise error from cause

    def check_alive(self) -> None:
        """Raise GroupError if the group is aborted or closed."""
        if self.failure is not None:
            raise GroupError(f"the group of ranks has ended: {self.failure}", self.failure.ranks)

    def start_all_to_all(
        self,
        op: str,
        data: Tensor,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> PendingAllToAll:
        """Start to send blocks of `data` to all ranks, and to receive their blocks into `out` or new memory.

        data, out: contiguous CPU tensors. send_counts, receive_counts: block lengths along dimension 0, by rank. By
        default, all blocks are equally long. If a sender's and a receiver's lengths differ, the process is aborted.
        """
        send_counts = send_counts or [len(data) // self.size] * self.size
        receive_counts = receive_counts or send_counts
        if out is None:
            out = empty((sum(receive_counts), *data.shape[1:]), data.dtype)
        self.check_thread()
        self.check_alive()
        self.check_peers(op, self.num_calls + 1)  # other ranks may be waiting for a transfer of other sizes
        assert self._group is not None
        # torch's all_to_all_single calls this function too, but spends half its time in Python code
        work = self._group.alltoall_base(out, data, [*receive_counts], [*send_counts], dist.AllToAllOptions())
        self.num_calls += 1
        self._last_op = op
        if self._peer_monitor is not None:
            self._peer_monitor.last_call_number = self.num_calls
        transfer = PendingAllToAll(self, op, self.num_calls, work, out)
        self._transfers = [*(other for other in self._transfers if other.is_in_flight()), transfer]
        return transfer

    def exchange_bytes(self, op: str, data: bytes, num_readers: int | None = None) -> list[bytes]:
        """Send bytes to ranks below `num_readers` (default: all). They get each rank's bytes; others get b""."""
        if self.size == 1:
            return [data]
        num_readers = self.size if num_readers is None else num_readers
        send_counts = [len(data) * (rank < num_readers) for rank in range(self.size)]
        receive_counts: list[int] = self.start_all_to_all(op, torch.tensor(send_counts)).wait().tolist()
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        out = self.start_all_to_all(op, payload.repeat(num_readers), send_counts, receive_counts).wait()
        return [bytes(part.numpy()) for part in out.split(receive_counts)]

    @contextmanager
    def collective_block(self, op: str) -> Iterator[None]:
        """Wrap a block of collectives that all ranks make. Signal handlers run after the block.

        If the block fails after its first collective, with an error unknown to other ranks, the group is aborted.
        """
        if self.size == 1:
            yield
            return
        self.check_thread()
        num_calls_before = self.num_calls
        with defer_signals():
            try:
                yield
            except BaseException as error:
                if self.must_report(error) and self.num_calls > num_calls_before:
                    self.abort(op, f"failed with {type(error).__name__}: {error}")
                raise

    def check_peers(self, op: str, call_number: int) -> None:
        """Raise GroupError if another rank has aborted the group, or has left the group before this call."""
        if self._peer_monitor is None:
            return
        if self._peer_monitor.abort_error is not None:
            raise self._abort_by_peer(op, self._peer_monitor.abort_error)
        if self._peer_monitor.has_closed_before(call_number):
            raise self.abort_unresponsive(op, call_number, "a rank closed its world")

    def abort_unresponsive(self, op: str, call_number: int, reason: str) -> GroupError:
        """Abort the group because collective `call_number` failed. Returns the error, with other ranks' reports."""
        reasons: Mapping[int, str] = {}
        if self._peer_monitor is not None:
            try:
                reasons = self._peer_monitor.find_unresponsive_ranks(call_number)
            except GroupAbortedError as aborted:
                return self._abort_by_peer(op, aborted)
            self._peer_monitor.broadcast_abort(self.rank, reasons)
        return self._abort(f"{op}: {_describe_unresponsive(reasons) or reason}", reasons)

    def abort(self, op: str, reason: str) -> GroupError:
        """Abort the group because this rank failed in the middle of `op`. Returns the error."""
        if self._peer_monitor is not None:
            self._peer_monitor.broadcast_abort(self.rank, {self.rank: reason})
        return self._abort(f"{op}: {reason}", {})

    def _abort_by_peer(self, op: str, aborted: GroupAbortedError) -> GroupError:
        if self._peer_monitor is not None:
            self._peer_monitor.broadcast_abort(aborted.rank, aborted.reasons)
        text = _describe_unresponsive(aborted.reasons)
        return self._abort(f"{op}: rank {aborted.rank} ended the group: {text}", aborted.reasons)

    def _abort(self, message: str, reasons: Mapping[int, str]) -> GroupError:
        self.failure = GroupError(message, sorted(reasons))
        if reasons:
            self._lost_rank_reporter.write(self.failure)
        self._leave_group()
        return self.failure

    def _report_lost_rank(self, rank: int, reason: str) -> None:
        """Report a killed rank as soon as the monitor thread notices."""
        message = f"rank {rank} was lost ({reason}); the last call here: {self._last_op}"
        self._lost_rank_reporter.write(GroupError(message, [rank]), is_early=True)

    def _leave_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            _closed_groups.add(tuple(dist.get_process_group_ranks(group)))
            transfers, self._transfers = self._transfers, []
            completed = [transfer.release() for transfer in transfers]
            if not all(completed):  # leak the process group, since its destructor would wait for these transfers
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            dist.destroy_process_group(group)

    def _connect(self, ranks: list[int]) -> None:
        """Create a process group with the other ranks, and connect to each of them."""
        if tuple(ranks) in _closed_groups:
            raise OptionError(
                "a world of these ranks was already closed in this process, and torch would reuse its old addresses; "
                "create one World, and close it at the end"
            )
        timeout, self.timeout = self.timeout, max(self.timeout, CONNECT_SECONDS)  # ranks may still be starting
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # torch 2.11 always sorts ranks
        try:
            self._group = dist.new_group(
                ranks, timedelta(seconds=self.timeout), "gloo", use_local_synchronization=True, **order
            )
        except RuntimeError as error:
            raise GroupError(f"the ranks {ranks} could not form a process group: {error}") from error
        with undo_on_error(self.close):
            exchange = partial(self.exchange_bytes, self._last_op)
            sockets, self.num_ranks_on_host = connect(self.rank, self.size, exchange, CONNECT_SECONDS)
            self._peer_monitor = PeerMonitor(sockets, self._report_lost_rank)
        self.timeout = timeout


class PendingAllToAll:
    """An all-to-all in flight."""

    def __init__(self, group: RankGroup, op: str, call_number: int, work: dist.Work, out: Tensor) -> None:
        self._group, self._op, self.call_number, self._out = group, op, call_number, out
        self._work: dist.Work | None = work  # keeps the process group alive
        self._deadline = monotonic() + group.timeout
        self._has_arrived, self._failure = False, ""

    def wait(self) -> Tensor:
        """Wait until everything is sent and received, and return `out`. On failure, aborts and raises GroupError.

        Signal handlers run only after the outermost `defer_signals` block. Ctrl-C and SIGTERM abort the group if the
        wait has not ended a second later.
        """
        if self._has_arrived:
            return self._out
        group, interrupted_at = self._group, 0.0  # 0: not interrupted
        with defer_signals():
            group.check_alive()
            while self.wait_briefly():
                group.check_peers(self._op, self.call_number)
                now = monotonic()
                if now > self._deadline:
                    raise group.abort_unresponsive(self._op, self.call_number, f"no answer in {group.timeout:g} s")
                if signals := [number for number in list_deferred_signals() if number in ENDING_SIGNALS]:
                    interrupted_at = interrupted_at or now
                    if now > interrupted_at + GRACE_SECONDS:
                        name = signal.Signals(signals[0]).name
                        raise group.abort(self._op, f"interrupted by {name} in a wait for others")
            if self._failure:
                raise group.abort_unresponsive(self._op, self.call_number, self._failure)
            return self._out

    def is_in_flight(self) -> bool:
        """Return True if the transfer is in flight. If it is complete, stop keeping the process group alive."""
        if self._work is not None and self._work.is_completed():
            try:
                self._work.wait()
                self._has_arrived = True
            except RuntimeError as error:
                self._failure = str(error)
            self._work = None
        return self._work is not None

    def wait_briefly(self) -> bool:
        """Wait up to POLL_INTERVAL. Returns True if the transfer is still in flight."""
        if self._work is not None:
            with suppress(RuntimeError):
                self._work.wait(POLL_INTERVAL)
        return self.is_in_flight()

    def release(self) -> bool:
        """Release the process group. Returns True if the transfer was complete."""
        work, self._work = self._work, None
        return work is None or work.is_completed()


def _describe_unresponsive(reasons: Mapping[int, str]) -> str:
    texts = []
    for reason in dict.fromkeys(reasons.values()):
        ranks = [str(rank) for rank in sorted(reasons) if reasons[rank] == reason]
        texts.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} did not answer ({reason})")
    return "; ".join(texts)
