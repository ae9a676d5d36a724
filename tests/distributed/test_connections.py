"""Ranks find each other though connections of others come to their ports."""

from __future__ import annotations

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tierbed.distributed.connections import ADDRESS, Connected, connect
from tierbed.engine import GroupError

RANKS = 3


def silent_stranger(opened: ExitStack, place: tuple[str, int, str]) -> None:
    opened.enter_context(socket.create_connection(place[:2]))


def stranger_that_leaves(opened: ExitStack, place: tuple[str, int, str]) -> None:
    socket.create_connection(place[:2]).close()


def stranger_that_talks(opened: ExitStack, place: tuple[str, int, str]) -> None:
    opened.enter_context(socket.create_connection(place[:2])).sendall(b"GET / HTTP/1.1" * 10)


STRANGERS = [silent_stranger, stranger_that_leaves, stranger_that_talks] * 2


def connect_all(opened: ExitStack, ranks: list[int], timeout: float) -> list[Connected | GroupError]:
    """What `connect` comes to on each of these ranks of RANKS, to whose ports strangers come first."""
    told: dict[int, bytes] = dict.fromkeys(range(RANKS), b"[]")
    met = threading.Barrier(len(ranks))

    def start(rank: int) -> Connected | GroupError:
        def tell(own: bytes) -> list[bytes]:
            if own.startswith(b"["):  # its address, before any rank has it
                for come in STRANGERS:
                    come(opened, tuple(json.loads(own)))
            met.wait()
            told[rank] = own.ljust(ADDRESS)
            met.wait()
            return [*told.values()] if own.strip() else [b""] * RANKS

        try:
            return connect(rank, RANKS, tell, timeout)
        except GroupError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(start, ranks)]


def test_strangers_delay_no_rank_and_the_log_names_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ExitStack() as opened, caplog.at_level(logging.WARNING, "tierbed"):
        found = connect_all(opened, [*range(RANKS)], 60)
        assert all(isinstance(one, Connected) for one in found), found
        for rank, one in enumerate(found):
            assert sorted(one.sockets) == [other for other in range(RANKS) if other != rank]
            for connection in one.sockets.values():
                opened.enter_context(connection)
        found[0].sockets[2].sendall(b"hello 2")
        found[2].sockets[0].setblocking(True)
        assert found[2].sockets[0].recv(7) == b"hello 2"
    assert all("unknown connections came to 127.0.0.1:" in line for line in caplog.messages)
    assert len(caplog.messages) == RANKS - 1  # the last rank waits for none


def test_a_rank_that_does_not_come_is_named_together_with_the_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ExitStack() as opened:
        (error,) = connect_all(opened, [0], 0.2)
    assert isinstance(error, GroupError)
    assert error.ranks == (1, 2)
    assert str(error).startswith("ranks [1, 2] did not connect in time; 6 unknown connections came to 127.0.0.1:")
