"""A connection of this rank to each other one, beside the process group's own."""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any, NamedTuple

from ..engine.durable import remedy_for
from ..engine.errors import GroupError

SIOCGIFADDR = 0x8915  # netdevice(7)
ADDRESS = 256  # bytes at most of what a rank tells of its own
BACKLOG = 65535  # connections that wait until ranks have met, strangers among them; Linux has a lower limit of its own
MAX_SILENT = 16  # connections that have not greeted, beyond those of missing ranks
MOST_NAMED = 3  # hosts of unknown connections that a message names
HELLO = struct.Struct("32si")  # the listener's token, and the rank that connects
CANNOT_ACCEPT = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM  # no descriptor or memory is left


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
