"""A connection of this rank to each other one, beside the process group's own."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from typing import NamedTuple

from ..engine.errors import GroupError

SIOCGIFADDR = 0x8915  # netdevice(7)
ADDRESS = 256  # bytes at most of what a rank tells of its own
HELLO = struct.Struct("32si")  # the listener's token, and the rank that connects


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
    with ExitStack() as opened, _listener(size) as listener:
        host, port = listener.getsockname()[:2]
        token = secrets.token_hex(16)
        told = [json.loads(data) for data in tell(json.dumps([host, port, token]).encode())]
        found: dict[int, socket.socket] = {}
        failed: GroupError | None = None
        try:
            for other in range(rank):
                found[other] = opened.enter_context(_reached(other, told[other], rank, end))
        except GroupError as error:
            failed = error
        # hears at once of a rank that is killed here, or cannot connect, where accept would wait for it
        said = tell(b"" if failed is None else str(failed).encode()[:ADDRESS])
        if failed is not None:
            raise failed
        for other, why in enumerate(said):
            if why.strip():
                raise GroupError(why.decode(errors="replace").strip(), [other])
        while missing := [other for other in range(rank + 1, size) if other not in found]:
            other, connection = _accepted(listener, token, missing, end)
            found[other] = opened.enter_context(connection)
        opened.pop_all()
    return Connected(found, sum(where == host for where, *_ in told))


def _reached(other: int, place: tuple[str, int, str], rank: int, end: float) -> socket.socket:
    host, port, token = place
    try:
        connection = socket.create_connection((host, port), max(end - monotonic(), 0.1))
        connection.sendall(HELLO.pack(token.encode(), rank))
    except OSError as error:
        raise GroupError(
            f"rank {rank} cannot reach rank {other} at {host}:{port} ({error}): set GLOO_SOCKET_IFNAME to the network "
            "interface by which ranks reach each other",
            [other],
        ) from error
    return connection


def _accepted(listener: socket.socket, token: str, missing: list[int], end: float) -> tuple[int, socket.socket]:
    """The next of the missing ranks that connects. Who does not know the token is sent away."""
    while (left := end - monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
            connection.settimeout(left)
            hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
        except OSError:
            continue
        if len(hello) == HELLO.size:
            known, other = HELLO.unpack(hello)
            if secrets.compare_digest(known, token.encode()) and other in missing:
                return other, connection
        connection.close()
    raise GroupError(f"ranks {missing} did not connect in time", missing)


def _listener(size: int) -> socket.socket:
    host = _own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=size)


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
