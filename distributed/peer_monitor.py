"""A failure detector: a thread of each rank answers the others, whatever its other threads do.

The ranks are connected by sockets in addition to those of the process group.
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

from ..engine.durable import remedy_for
from ..engine.errors import GroupError
from ..engine.threads import Thread

SIOCGIFADDR = 0x8915  # netdevice(7)
BACKLOG = 65535  # connections that wait to be accepted, strangers among them; Linux has its own lower limit
MAX_SILENT = 16  # connections that have not greeted, beyond those of missing ranks
MAX_NAMES = 3  # of hosts of unknown connections in a message
HELLO = struct.Struct("32si")  # the listener's token, and the rank that connects
CANNOT_ACCEPT = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM  # no descriptor or memory is left
ANSWER_SECONDS = 3.0  # for the answers of the other ranks
ENDED = "its process ended"
LIVES = "it runs, but has not reached this call"


class Connected(NamedTuple):
    """A socket to each other rank, and how many ranks have this one's host, itself included."""

    sockets: dict[int, socket.socket]
    on_host: int


def connect(rank: int, size: int, exchange: Callable[[bytes], list[bytes]], timeout: float) -> Connected:
    """Connect this rank to each other one, within `timeout` seconds.

    exchange: sends bytes to every rank, and returns those of each.

    Raises:
        GroupError: the address of a rank cannot be reached from here, or a rank did not connect.
    """
    end = monotonic() + timeout
    host = _own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as opened, socket.create_server((host, 0), family=family, backlog=BACKLOG) as listener:
        token = secrets.token_hex(16)
        own = json.dumps([*listener.getsockname()[:2], token]).encode()
        addresses = [json.loads(data) for data in exchange(own)]
        # connections wait in a queue until they are accepted
        found = _connect_to_all(rank, addresses, exchange, end, opened)
        found |= _accept_ranks(listener, token, range(rank + 1, size), end, opened)
        opened.pop_all()
    return Connected(found, sum(host == addresses[rank][0] for host, *_ in addresses))


def _connect_to_all(
    rank: int, addresses: Sequence[Any], exchange: Callable[[bytes], list[bytes]], end: float, opened: ExitStack
) -> dict[int, socket.socket]:
    """Connections to the ranks before this one, which `opened` closes, once every rank has its own."""
    found: dict[int, socket.socket] = {}
    failed: GroupError | None = None
    try:
        for other in range(rank):
            found[other] = opened.enter_context(_connect_to(other, addresses[other], rank, end))
    except GroupError as error:
        failed = error
    # notices at once a rank that is killed here, or cannot connect, which a wait for its greeting would not
    failures = exchange(b"" if failed is None else str(failed).encode())
    if failed is not None:
        raise failed
    for other, why in enumerate(failures):
        if why:
            raise GroupError(why.decode(), [other])
    return found


def _connect_to(other: int, address: tuple[str, int, str], rank: int, end: float) -> socket.socket:
    host, port, token = address
    try:
        connection = socket.create_connection((host, port), max(end - monotonic(), 0.1))
        connection.sendall(HELLO.pack(token.encode(), rank))
    except OSError as error:
        remedy = remedy_for(error, "set GLOO_SOCKET_IFNAME to the network interface by which ranks reach each other")
        raise GroupError(
            f"rank {rank} cannot reach rank {other} at {host}:{port} ({error}): {remedy}", [other]
        ) from error
    return connection


def _accept_ranks(
    listener: socket.socket, token: str, ranks: Sequence[int], end: float, opened: ExitStack
) -> dict[int, socket.socket]:
    """The connections of these ranks, which `opened` closes. Other connections are closed, and the log names them.

    The kernel calls a connection ready once its greeting is complete, so a silent one delays no rank.
    """
    found: dict[int, socket.socket] = {}
    guests: dict[socket.socket, str] = {}  # the hosts of connections that have not greeted
    strangers: Counter[str] = Counter()

    def send_away(guest: socket.socket) -> None:
        strangers[guests.pop(guest)] += 1
        guest.close()

    listener.setblocking(False)
    while len(found) < len(ranks) and (left := end - monotonic()) > 0:
        ready = wait([listener, *guests], left)  # polls, which needs no descriptor
        for connection in [guest for guest in guests if guest in ready]:
            rank = _rank_of(connection, token)
            if rank is None or rank not in ranks or rank in found:
                send_away(connection)
            else:
                del guests[connection]
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                found[rank] = connection
        if listener not in ready:
            continue
        try:
            connection, (host, *_) = listener.accept()
        except OSError as error:
            if error.errno not in CANNOT_ACCEPT:  # the connection has left
                continue
            if not guests:
                remedy = remedy_for(error, "let this host have more memory")
                raise GroupError(f"connections of other ranks cannot be accepted ({error}); {remedy}") from error
            send_away(next(iter(guests)))  # the oldest, likely a stranger's
            continue
        opened.enter_context(connection).setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELLO.size)
        guests[connection] = host
        if len(guests) > len(ranks) - len(found) + MAX_SILENT:
            send_away(next(iter(guests)))
    strangers.update(guests.values())
    unknown = _describe(strangers, listener)
    if missing := [rank for rank in ranks if rank not in found]:
        remedy = unknown or "see the logs of these ranks"
        raise GroupError(f"ranks {missing} did not connect in time; {remedy}", missing)
    if unknown:
        logging.getLogger("tierbed").warning("start of the world: %s", unknown)
    for connection in guests:
        connection.close()
    return found


def _rank_of(connection: socket.socket, token: str) -> int | None:
    """The rank that greets by a connection, or None if its greeting is cut short or does not know the token."""
    try:
        known, rank = HELLO.unpack(connection.recv(HELLO.size))
    except (OSError, struct.error):
        return None
    return int(rank) if secrets.compare_digest(known, token.encode()) else None


def _describe(strangers: Counter[str], listener: socket.socket) -> str:
    if not strangers:
        return ""
    host, port = listener.getsockname()[:2]
    of = ", ".join(f"{stranger} ({count})" for stranger, count in strangers.most_common(MAX_NAMES))
    return (
        f"{strangers.total()} unknown connections came to {host}:{port}, from {of}: a port scanner, a health check or "
        "another job; keep them from the ports of ranks"
    )


def _own_address() -> str:
    """Of the interface that Gloo is set to use, or of the one by which the host of torch's store is reached."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            return socket.inet_ntoa(answer[20:24])
    try:
        to = os.environ.get("MASTER_ADDR") or socket.gethostname()
        for family, kind, _, _, address in socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # of a datagram socket, which sends nothing
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return "127.0.0.1"


class GroupAborted(Exception):
    """A rank has aborted the group. `why` has, by unresponsive rank, what is known of it."""

    def __init__(self, rank: int, why: Mapping[int, str]) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, dict(why)


class PeerMonitor:
    """The connections of this rank to the others, and the thread that answers on them.

    A process that ends closes its connections, which the others notice at once. Before that a rank reports why it
    leaves: which ranks did not answer, that it closed its world, or that its script ended. A rank that reports nothing
    was killed: the thread that notices it calls `on_loss` with the rank and what is known.
    """

    def __init__(self, connections: Mapping[int, socket.socket], on_loss: Callable[[int, str], None]) -> None:
        self.aborted: GroupAborted | None = None  # how another rank aborted the group
        self.at = 0  # the number of the last call that this rank began
        self._connections = dict(connections)
        self._changed = Condition()
        self._here: dict[int, int] = {}  # the call of each rank that answered
        self._ended: dict[int, str] = {}  # how the connection to a rank ended
        self._closed: dict[int, int] = {}  # the last call of each rank that closed its world
        self._on_loss, self._is_closed = on_loss, False
        for connection in connections.values():
            connection.settimeout(ANSWER_SECONDS)
        Thread(target=self._listen, name="tierbed-peer-monitor", daemon=True).start()
        self._pid = os.getpid()
        # not by atexit, which children that multiprocessing forks do not run
        self._at_end = Finalize(None, self._end_of_process, exitpriority=0)

    def unresponsive(self, call: int) -> dict[int, str]:
        """The ranks that keep this one from ending its call, and what is known of each. Raises `aborted`.

        They are those that exited or are silent, else those that have not reached the call. A rank that closed its
        world after the call is among them only if no other is.
        """
        self._send({"call": call})
        others = self._connections.keys()
        with self._changed:
            self._changed.wait_for(
                lambda: self.aborted or others <= self._here.keys() | self._ended.keys(), ANSWER_SECONDS
            )
            if self.aborted is not None:
                raise self.aborted
            silent = dict.fromkeys(others - self._here.keys() - self._ended.keys(), "no sign of it")
            gone = silent | {rank: why for rank, why in self._ended.items() if self._closed.get(rank, 0) < call}
            return gone or {rank: LIVES for rank, at in self._here.items() if at < call} or dict(self._ended)

    def closed_before(self, call: int) -> bool:
        """Whether a rank closed its world and will never reach this call."""
        return any(at < call for at in [*self._closed.values()])

    def broadcast_abort(self, rank: int, why: Mapping[int, str]) -> None:
        """Send all ranks that `rank` has aborted the group because of these.

        A rank that receives it forwards it before it closes, since what a third rank receives first is by chance.
        """
        self._send({"left": rank, "why": [*why.items()]})

    def close(self, why: str) -> None:
        """Send the others why, and end the connections."""
        self._at_end.cancel()
        self._is_closed = True
        self._send({"closed": why, "at": self.at})
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # which the thread notices

    def _end_of_process(self) -> None:
        if os.getpid() == self._pid:  # a forked child has the connections of its parent
            self.close(ENDED)

    def _send(self, message: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._changed:
            for rank in self._connections if ranks is None else ranks:
                with contextlib.suppress(OSError):  # the thread notices it
                    self._connections[rank].sendall(line)

    def _listen(self) -> None:
        parts = dict.fromkeys(self._connections, b"")  # the beginning of each rank's next message
        while parts:
            ready = wait([self._connections[rank] for rank in parts])
            for rank in [rank for rank in parts if self._connections[rank] in ready]:
                try:
                    data = self._connections[rank].recv(1 << 16)
                except OSError:
                    data = b""
                *lines, parts[rank] = (parts[rank] + data).split(b"\n")
                with self._changed:
                    for line in lines:
                        self._hear(rank, json.loads(line))
                    is_lost = not data and rank not in self._ended and not self._is_closed
                    if not data:
                        del parts[rank]
                        self._connections[rank].close()
                        self._ended.setdefault(rank, ENDED)
                    self._changed.notify_all()
                if is_lost:
                    self._on_loss(rank, ENDED)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        match message:
            case {"call": _}:
                self._send({"here": self.at}, [rank])
            case {"here": at}:
                self._here[rank] = at
            case {"left": by, "why": why}:
                self.aborted = self.aborted or GroupAborted(by, dict(why))
            case {"closed": why, "at": at}:
                self._ended[rank], self._closed[rank] = why, at
