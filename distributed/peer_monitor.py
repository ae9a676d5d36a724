"""Which ranks still answer: a thread of each rank says so, whatever its other threads do.

The ranks are connected by sockets besides those of the process group.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import selectors
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.util import Finalize
from threading import Condition
from time import monotonic
from typing import Any, NamedTuple

from ..engine.durable import remedy_for
from ..engine.errors import GroupError
from ..engine.threads import Thread

SIOCGIFADDR = 0x8915  # netdevice(7)
ADDRESS = 256  # bytes at most of what a rank tells of its own
BACKLOG = 65535  # connections that wait until ranks have met, strangers among them; Linux has a lower limit of its own
MAX_SILENT = 16  # connections that have not greeted, beyond those of missing ranks
MOST_NAMED = 3  # hosts of unknown connections that a message names
HELLO = struct.Struct("32si")  # the listener's token, and the rank that connects
CANNOT_ACCEPT = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM  # no descriptor or memory is left
BOUND = 3.0  # seconds for the answers to a roll call
ENDED = "its process ended"
LIVES = "it runs, but has not come to this call"


class Connected(NamedTuple):
    """A socket to each other rank, and how many ranks have this one's host, itself included."""

    sockets: dict[int, socket.socket]
    on_host: int


def connect(rank: int, size: int, tell: Callable[[bytes], list[bytes]], timeout: float) -> Connected:
    """Connect this rank to each other one, within `timeout` seconds.

    tell: gives ADDRESS bytes to every rank, filled up with blanks, and has those of each.

    Raises:
        GroupError: an address that a rank told cannot be reached from here, or a rank did not connect.
    """
    end = monotonic() + timeout
    with ExitStack() as opened, _listener() as listener:
        token = secrets.token_hex(16)
        own = json.dumps([*listener.getsockname()[:2], token]).encode()
        places = [json.loads(data) for data in tell(own)]
        found = _reached_all(rank, places, tell, end, opened)  # connections wait in a queue until they are accepted
        found |= _greeted(listener, token, range(rank + 1, size), end, opened)
        opened.pop_all()
    return Connected(found, sum(host == places[rank][0] for host, *_ in places))


def _reached_all(
    rank: int, places: Sequence[Any], tell: Callable[[bytes], list[bytes]], end: float, opened: ExitStack
) -> dict[int, socket.socket]:
    """Connections to the ranks before this one, which `opened` closes, once every rank has its own."""
    found: dict[int, socket.socket] = {}
    failed: GroupError | None = None
    try:
        for other in range(rank):
            found[other] = opened.enter_context(_reached(other, places[other], rank, end))
    except GroupError as error:
        failed = error
    # hears at once of a rank that is killed here, or cannot connect, where a wait for its greeting would not
    said = tell(b"" if failed is None else str(failed).encode()[:ADDRESS])
    if failed is not None:
        raise failed
    for other, why in enumerate(said):
        if why.strip():
            raise GroupError(why.decode(errors="replace").strip(), [other])
    return found


def _reached(other: int, place: tuple[str, int, str], rank: int, end: float) -> socket.socket:
    host, port, token = place
    try:
        connection = socket.create_connection((host, port), max(end - monotonic(), 0.1))
        connection.sendall(HELLO.pack(token.encode(), rank))
    except OSError as error:
        remedy = remedy_for(error, "set GLOO_SOCKET_IFNAME to the network interface by which ranks reach each other")
        raise GroupError(
            f"rank {rank} cannot reach rank {other} at {host}:{port} ({error}): {remedy}", [other]
        ) from error
    return connection


class _Guest(NamedTuple):
    """A connection that has not said yet which rank it is."""

    host: str
    hello: bytearray


def _greeted(
    listener: socket.socket, token: str, ranks: Sequence[int], end: float, opened: ExitStack
) -> dict[int, socket.socket]:
    """The connections of these ranks, which `opened` closes. Other connections are closed, and the log names them.

    The greetings of all that come are read at once, so one that says nothing delays no rank.
    """
    found: dict[int, socket.socket] = {}
    guests: dict[socket.socket, _Guest] = {}
    strangers: Counter[str] = Counter()
    listener.setblocking(False)
    with selectors.PollSelector() as selector:  # which takes no descriptor

        def send_away(guest: socket.socket) -> None:
            selector.unregister(guest)
            strangers[guests.pop(guest).host] += 1
            guest.close()

        selector.register(listener, selectors.EVENT_READ)
        while len(found) < len(ranks) and (left := end - monotonic()) > 0:
            ready = {key.fileobj for key, _ in selector.select(left)}
            for connection in [guest for guest in guests if guest in ready]:
                hello = guests[connection].hello
                if not _hear(connection, hello):
                    continue
                rank = _rank_in(hello, token)
                if rank is None or rank not in ranks or rank in found:
                    send_away(connection)
                else:
                    selector.unregister(connection)
                    del guests[connection]
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
            selector.register(connection, selectors.EVENT_READ)
            guests[connection] = _Guest(host, bytearray())
            if len(guests) > len(ranks) - len(found) + MAX_SILENT:
                send_away(next(iter(guests)))
    strangers.update(guest.host for guest in guests.values())
    unknown = _named(strangers, listener)
    if missing := [rank for rank in ranks if rank not in found]:
        raise GroupError(f"ranks {missing} did not connect in time{unknown and '; ' + unknown}", missing)
    if unknown:
        logging.getLogger("tierbed").warning("start of the world: %s", unknown)
    for connection in guests:
        connection.close()
    return found


def _hear(connection: socket.socket, hello: bytearray) -> bool:
    """Add to a greeting what has come of it. True if it is whole, or no more will come."""
    try:
        data = connection.recv(HELLO.size - len(hello))
    except OSError:
        return True
    hello += data
    return not data or len(hello) == HELLO.size


def _rank_in(hello: bytearray, token: str) -> int | None:
    """The rank that a greeting names, or None if it is not of one that knows the token."""
    if len(hello) < HELLO.size:
        return None
    known, rank = HELLO.unpack(hello)
    return int(rank) if secrets.compare_digest(known, token.encode()) else None


def _named(strangers: Counter[str], listener: socket.socket) -> str:
    if not strangers:
        return ""
    host, port = listener.getsockname()[:2]
    of = ", ".join(f"{stranger} ({count})" for stranger, count in strangers.most_common(MOST_NAMED))
    return (
        f"{strangers.total()} unknown connections came to {host}:{port}, from {of}: a port scanner, a health check or "
        "another job; keep them from the ports of ranks"
    )


def _listener() -> socket.socket:
    host = _own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def _own_address() -> str:
    """Of the interface that Gloo is told to use, or of the one by which the host of torch's store is reached."""
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
    """A rank has ended the group. `why` says, of each rank that it missed, what is known."""

    def __init__(self, rank: int, why: Mapping[int, str]) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, dict(why)


class PeerMonitor:
    """The connections of this rank to the others, and the thread that answers on them.

    A process that ends closes its connections, which tells the others at once. What a rank does with the group at its
    end, it says before: which ranks it missed, that it closed its world, or that its script ended. A rank that says
    nothing before was killed: `on_loss`, with the rank and what is known, is called by the thread that hears of it.
    """

    def __init__(self, connections: Mapping[int, socket.socket], on_loss: Callable[[int, str], None]) -> None:
        self.aborted: GroupAborted | None = None  # how another rank ended the group
        self.at = 0  # the number of the last call that this rank began
        self._connections = dict(connections)
        self._changed = Condition()
        self._here: dict[int, int] = {}  # the call at which a rank is, of those that answered the roll call
        self._ended: dict[int, str] = {}  # how the connection to a rank ended
        self._closed: dict[int, int] = {}  # the last call of each rank that closed its world
        self._on_loss, self._is_closed = on_loss, False
        self._selector = selectors.DefaultSelector()
        for rank, connection in connections.items():
            connection.settimeout(BOUND)
            self._selector.register(connection, selectors.EVENT_READ, (rank, bytearray()))
        Thread(target=self._listen, name="tierbed-roll-call", daemon=True).start()
        self._pid = os.getpid()
        # not by atexit, which children that multiprocessing forks do not run
        self._at_end = Finalize(None, self._end_of_process, exitpriority=0)

    def unresponsive(self, call: int) -> dict[int, str]:
        """The ranks that keep this one from ending its call, and what is known of each. Raises `aborted`.

        Where ranks are gone or silent, it is these; else those that have not come to the call. A rank that closed its
        world after the call is none of them, unless nobody else is.
        """
        self._send({"call": call})
        others = self._connections.keys()
        with self._changed:
            self._changed.wait_for(lambda: self.aborted or others <= self._here.keys() | self._ended.keys(), BOUND)
            if self.aborted is not None:
                raise self.aborted
            silent = dict.fromkeys(others - self._here.keys() - self._ended.keys(), "no sign of it")
            gone = silent | {rank: why for rank, why in self._ended.items() if self._closed.get(rank, 0) < call}
            return gone or {rank: LIVES for rank, at in self._here.items() if at < call} or dict(self._ended)

    def closed_before(self, call: int) -> bool:
        """Whether a rank closed its world and will never come to this call."""
        return any(at < call for at in [*self._closed.values()])

    def broadcast_abort(self, rank: int, why: Mapping[int, str]) -> None:
        """Tell all ranks that one of them, this or what this one was told of, has ended the group because of these.

        Who is told tells it on before it closes, since what a third rank hears first is by chance.
        """
        self._send({"left": rank, "why": [*why.items()]})

    def close(self, why: str) -> None:
        """End the connections, and tell the others why."""
        self._at_end.cancel()
        self._is_closed = True
        self._send({"closed": why, "at": self.at})
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # which the thread hears

    def _end_of_process(self) -> None:
        if os.getpid() == self._pid:  # a forked child has the connections of its parent
            self.close(ENDED)

    def _send(self, message: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._changed:
            for rank in self._connections if ranks is None else ranks:
                with contextlib.suppress(OSError):  # the thread hears of it
                    self._connections[rank].sendall(line)

    def _listen(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                rank, before = key.data
                try:
                    data = self._connections[rank].recv(1 << 16)
                except OSError:
                    data = b""
                before += data
                *lines, rest = before.split(b"\n")
                before[:] = rest
                with self._changed:
                    for line in lines:
                        self._hear(rank, json.loads(line))
                    if not data:
                        self._selector.unregister(key.fileobj)
                        self._connections[rank].close()
                    is_lost = not data and rank not in self._ended and not self._is_closed
                    if not data:
                        self._ended.setdefault(rank, ENDED)
                    self._changed.notify_all()
                if is_lost:
                    self._on_loss(rank, ENDED)
        self._selector.close()

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
