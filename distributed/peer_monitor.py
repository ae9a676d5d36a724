"""Detect failed ranks. A thread in each rank answers the other ranks, even if the rank's other threads hang.

A collective that hangs does not say which rank is missing. So all ranks are also connected by sockets. When a
collective takes too long, a rank asks the others on these sockets which call they have reached. If a rank's process
ended, its sockets are closed. If a rank hangs, its thread reports an earlier call. If a host is dead, no answer comes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from threading import Condition
from time import monotonic
from typing import Any, NamedTuple

from ..engine.durable import choose_remedy
from ..engine.errors import GroupError
from ..engine.threads import Thread

SIOCGIFADDR = 0x8915  # netdevice(7)
BACKLOG = 65535  # length of the accept queue, unknown connections included; Linux lowers this number to its own limit
MAX_WAITING_CONNECTIONS = 16  # how many connections may wait without a greeting, not counting one for each missing rank
MAX_NAMES = 3  # a message names at most this many unknown hosts
GREETING = struct.Struct("32si")  # the greeting: the listener's token, and the number of the rank that connects
RESOURCE_ERRORS = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM  # accept() lacks descriptors or memory
ANSWER_SECONDS = 3.0  # how long to wait for other ranks' answers
EXIT_REASON = "its process ended"
SILENT_REASON = f"it was silent for {ANSWER_SECONDS:g} seconds"
LATE_REASON = "it runs, but has not reached this call"


class Connections(NamedTuple):
    """Sockets to all other ranks, by rank. num_ranks_on_host: the number of ranks on this host, this rank included."""

    sockets: dict[int, socket.socket]
    num_ranks_on_host: int


def connect(rank: int, size: int, exchange: Callable[[bytes], list[bytes]], timeout: float) -> Connections:
    """Connect this rank to all others. Raises GroupError if a rank cannot be reached within `timeout` seconds.

    `exchange` sends bytes to all ranks, and returns the bytes that each rank sent.
    """
    deadline = monotonic() + timeout
    host = _find_own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack, socket.create_server((host, 0), family=family, backlog=BACKLOG) as listener:
        token = secrets.token_hex(16)
        own_address = json.dumps([*listener.getsockname()[:2], token]).encode()
        addresses = [json.loads(data) for data in exchange(own_address)]
        sockets = _connect_to_all(rank, addresses, exchange, deadline, stack)  # others accept later
        sockets |= _accept_ranks(listener, token, range(rank + 1, size), deadline, timeout, stack)
        stack.pop_all()
    return Connections(sockets, sum(host == addresses[rank][0] for host, *_ in addresses))


def _connect_to_all(
    rank: int, addresses: Sequence[Any], exchange: Callable[[bytes], list[bytes]], deadline: float, stack: ExitStack
) -> dict[int, socket.socket]:
    """Connect to all lower ranks, and wait until every rank has done the same. `stack` closes the sockets."""
    sockets: dict[int, socket.socket] = {}
    own_error: GroupError | None = None
    try:
        for other in range(rank):
            sockets[other] = stack.enter_context(_connect_to(other, addresses[other], rank, deadline))
    except GroupError as error:
        own_error = error
    # This exchange fails immediately if a rank was killed or cannot connect. Waiting for a greeting would hang.
    reasons = exchange(b"" if own_error is None else str(own_error).encode())
    if own_error is not None:
        raise own_error
    for other, reason in enumerate(reasons):
        if reason:
            raise GroupError(reason.decode(), [other])
    return sockets


def _connect_to(other: int, address: tuple[str, int, str], rank: int, deadline: float) -> socket.socket:
    host, port, token = address
    try:
        connection = socket.create_connection((host, port), max(deadline - monotonic(), 0.1))
        connection.sendall(GREETING.pack(token.encode(), rank))
    except OSError as error:
        remedy = choose_remedy(error, "set GLOO_SOCKET_IFNAME to the network interface on which ranks reach each other")
        raise GroupError(
            f"rank {rank} cannot reach rank {other} at {host}:{port} ({error}): {remedy}", [other]
        ) from error
    return connection


def _accept_ranks(
    listener: socket.socket, token: str, ranks: Sequence[int], deadline: float, timeout: float, stack: ExitStack
) -> dict[int, socket.socket]:
    """Accept one connection from each of `ranks`, and add it to `stack`. Close and log all other connections.

    The kernel reports a connection as readable only when its greeting is complete, so silent connections delay no rank.
    """
    sockets: dict[int, socket.socket] = {}
    candidates: dict[socket.socket, str] = {}  # the hosts of connections that sent no greeting yet
    unknown_hosts: Counter[str] = Counter()

    def reject(connection: socket.socket) -> None:
        unknown_hosts[candidates.pop(connection)] += 1
        connection.close()

    listener.setblocking(False)
    while len(sockets) < len(ranks) and (remaining := deadline - monotonic()) > 0:
        ready = wait([listener, *candidates], remaining)  # uses poll(2), so it needs no file descriptor
        for connection in [connection for connection in candidates if connection in ready]:
            rank = _read_greeting(connection, token)
            if rank is None or rank not in ranks or rank in sockets:
                reject(connection)
            else:
                del candidates[connection]
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                sockets[rank] = connection
        if listener not in ready:
            continue
        try:
            connection, (host, *_) = listener.accept()
        except OSError as error:
            if error.errno not in RESOURCE_ERRORS:  # the connecting process has ended
                continue
            if not candidates:
                remedy = choose_remedy(error, "let this host have more memory")
                raise GroupError(f"cannot accept connections of other ranks ({error}); {remedy}") from error
            reject(next(iter(candidates)))  # the oldest connection: probably not a rank
            continue
        stack.enter_context(connection).setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, GREETING.size)
        candidates[connection] = host
        if len(candidates) > len(ranks) - len(sockets) + MAX_WAITING_CONNECTIONS:
            reject(next(iter(candidates)))
    unknown_hosts.update(candidates.values())
    unknown = _describe_unknown_hosts(unknown_hosts, listener)
    if missing := [rank for rank in ranks if rank not in sockets]:
        problem = f"ranks {missing} did not connect within {timeout:g} seconds"
        raise GroupError(f"{problem}; {unknown or 'see the logs of these ranks'}", missing)
    if unknown:
        logging.getLogger("tierbed").warning("while the ranks connected: %s", unknown)
    for connection in candidates:
        connection.close()
    return sockets


def _read_greeting(connection: socket.socket, token: str) -> int | None:
    """Return the rank in a connection's greeting; None if the greeting is incomplete or has the wrong token."""
    try:
        sent_token, rank = GREETING.unpack(connection.recv(GREETING.size))
    except (OSError, struct.error):
        return None
    return int(rank) if secrets.compare_digest(sent_token, token.encode()) else None


def _describe_unknown_hosts(unknown_hosts: Counter[str], listener: socket.socket) -> str:
    if not unknown_hosts:
        return ""
    host, port = listener.getsockname()[:2]
    hosts = ", ".join(f"{name} ({count})" for name, count in unknown_hosts.most_common(MAX_NAMES))
    return (
        f"{unknown_hosts.total()} unknown connections came to {host}:{port}, from {hosts}: a port scanner, a health "
        "check or another job; keep them away from the ranks' ports"
    )


def _find_own_address() -> str:
    """Return the address of Gloo's network interface, or of the interface that leads to torch's store."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            return socket.inet_ntoa(answer[20:24])
    try:
        target = os.environ.get("MASTER_ADDR") or socket.gethostname()
        for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # connecting a datagram socket sends nothing
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return "127.0.0.1"


class GroupAbortedError(Exception):
    """Another rank aborted the group. reasons: what is known about each unresponsive rank."""

    def __init__(self, rank: int, reasons: Mapping[int, str]) -> None:
        super().__init__(rank, reasons)
        self.rank, self.reasons = rank, dict(reasons)


class PeerMonitor:
    """This rank's connections to the others, and the thread that answers on these connections.

    When a process ends, its connections close, and the other ranks notice immediately. Before a rank exits, it reports
    the reason: other ranks did not answer, the user closed the world, or the script ended. A rank that reports nothing
    was killed. For a killed rank, the thread calls `on_lost_rank` with the rank and what is known about it.
    """

    def __init__(self, connections: Mapping[int, socket.socket], on_lost_rank: Callable[[int, str], None]) -> None:
        self.abort_error: GroupAbortedError | None = None  # set when another rank aborted the group
        self.last_call_number = 0  # number of the call that this rank began last
        self._connections = dict(connections)
        self._condition = Condition()
        self._reached_calls: dict[int, int] = {}  # by rank: the number of the call that the rank had reached
        self._exit_reasons: dict[int, str] = {}  # by rank: why the rank's connection ended
        self._final_calls: dict[int, int] = {}  # by rank: number of the rank's last call before it closed its world
        self._on_lost_rank, self._is_closed = on_lost_rank, False
        for connection in connections.values():
            connection.settimeout(ANSWER_SECONDS)
        Thread(target=self._listen, name="tierbed-peer-monitor", daemon=True).start()
        self._pid = os.getpid()
        # instead of `atexit`, because children forked by multiprocessing skip `atexit`
        self._finalizer = Finalize(None, self._close_at_exit, exitpriority=0)

    def find_unresponsive_ranks(self, call_number: int) -> dict[int, str]:
        """Return the ranks that delay this call, and what is known about each one. Raises `abort_error`.

        Returns the ranks that exited or are silent. If there are no such ranks, returns the ranks that have not reached
        the call. If all ranks have reached the call, returns the ranks that closed their world afterwards.
        """
        self._send({"call": call_number})
        others = self._connections.keys()
        with self._condition:
            self._condition.wait_for(
                lambda: self.abort_error or others <= {*self._reached_calls, *self._exit_reasons}, ANSWER_SECONDS
            )
            if self.abort_error is not None:
                raise self.abort_error
            silent = dict.fromkeys(others - self._reached_calls.keys() - self._exit_reasons.keys(), SILENT_REASON)
            lost = {r: why for r, why in self._exit_reasons.items() if self._final_calls.get(r, 0) < call_number}
            late = {rank: LATE_REASON for rank, number in self._reached_calls.items() if number < call_number}
            return silent | lost or late or dict(self._exit_reasons)

    def has_closed_before(self, call_number: int) -> bool:
        """True if a rank closed its world and will never reach this call."""
        return any(number < call_number for number in [*self._final_calls.values()])

    def broadcast_abort(self, rank: int, reasons: Mapping[int, str]) -> None:
        """Tell all ranks that `rank` aborted the group, and why.

        A rank forwards this message before it closes. Otherwise a third rank might notice the close first.
        """
        self._send({"left": rank, "why": [*reasons.items()]})

    def close(self, reason: str) -> None:
        """Tell the other ranks why this rank leaves, and close the connections."""
        self._finalizer.cancel()
        self._is_closed = True
        self._send({"closed": reason, "at": self.last_call_number})
        with self._condition:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the monitor thread

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:  # a forked child shares its parent's connections
            self.close(EXIT_REASON)

    def _send(self, message: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._condition:
            for rank in self._connections if ranks is None else ranks:
                with contextlib.suppress(OSError):  # the monitor thread notices the error too
                    self._connections[rank].sendall(line)

    def _listen(self) -> None:
        parts = dict.fromkeys(self._connections, b"")  # by rank: the beginning of the rank's next message
        while parts:
            ready = wait([self._connections[rank] for rank in parts])
            for rank in [rank for rank in parts if self._connections[rank] in ready]:
                try:
                    data = self._connections[rank].recv(1 << 16)
                except OSError:
                    data = b""
                *lines, parts[rank] = (parts[rank] + data).split(b"\n")
                with self._condition:
                    for line in lines:
                        self._handle_message(rank, json.loads(line))
                    is_lost = not data and rank not in self._exit_reasons and not self._is_closed
                    if not data:
                        del parts[rank]
                        self._connections[rank].close()
                        self._exit_reasons.setdefault(rank, EXIT_REASON)
                    self._condition.notify_all()
                if is_lost:
                    self._on_lost_rank(rank, EXIT_REASON)

    def _handle_message(self, rank: int, message: dict[str, Any]) -> None:
        match message:
            case {"call": _}:
                self._send({"here": self.last_call_number}, [rank])
            case {"here": last_call_number}:
                self._reached_calls[rank] = last_call_number
            case {"left": aborting_rank, "why": why}:
                self.abort_error = self.abort_error or GroupAbortedError(aborting_rank, dict(why))
            case {"closed": why, "at": last_call_number}:
                self._exit_reasons[rank], self._final_calls[rank] = why, last_call_number
