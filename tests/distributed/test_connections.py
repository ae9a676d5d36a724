"""Ranks find each other though connections of others come to their ports, and nothing of a start before."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from support.limits import descriptors
from tierbed import GroupError
from tierbed.distributed import peer_monitor
from tierbed.distributed.peer_monitor import GREETING, MAX_WAITING_CONNECTIONS, Connections, connect
from tierbed.distributed.world import make_prefix_store

RANKS = 3


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def strangers(opened: ExitStack, address: tuple[str, int]) -> None:
    """Of each kind two: silent, gone at once, and one that talks."""
    for _ in range(2):
        opened.enter_context(socket.create_connection(address))
        socket.create_connection(address).close()
        opened.enter_context(socket.create_connection(address)).sendall(b"GET / HTTP/1.1" * 10)


def crowd(opened: ExitStack, address: tuple[str, int]) -> None:
    """More than Python's own queue of a listener holds."""
    for _ in range(130):
        stranger = opened.enter_context(socket.socket())
        stranger.setblocking(False)
        stranger.connect_ex(address)


def connect_all(opened: ExitStack, come: Callable[[ExitStack, tuple[str, int]], None]) -> list[Connections]:
    """What `connect` comes to on each of RANKS, to whose ports strangers come first."""
    places: dict[int, bytes] = {}
    met = threading.Barrier(RANKS)

    def start(rank: int) -> Connections:
        def exchange(own: bytes) -> list[bytes]:
            if own.startswith(b"["):  # its address, before any rank has it
                come(opened, tuple(json.loads(own)[:2]))
            met.wait()
            places[rank] = own
            met.wait()
            return [places[rank] for rank in range(RANKS)]

        one = connect(rank, RANKS, exchange, 60)
        for connection in one.sockets.values():
            opened.enter_context(connection)
        return one

    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(start, range(RANKS))]


def test_strangers_delay_no_rank_and_the_log_names_them(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as opened, caplog.at_level(logging.WARNING, "tierbed"):
        found = connect_all(opened, strangers)
        for rank, one in enumerate(found):
            assert sorted(one.sockets) == [other for other in range(RANKS) if other != rank]
        found[0].sockets[2].sendall(b"hello 2")
        found[2].sockets[0].setblocking(True)
        assert found[2].sockets[0].recv(7) == b"hello 2"
    assert all("unknown connections came to 127.0.0.1:" in line for line in caplog.messages)
    assert len(caplog.messages) == RANKS - 1  # the last rank waits for none


def test_a_crowd_of_strangers_keeps_no_rank_out_before_all_have_met() -> None:
    with ExitStack() as opened:
        assert len(connect_all(opened, crowd)) == RANKS


class Start:
    """Rank 0 of 2 that waits for rank 1, by a clock that the test sets."""

    def __init__(self, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peer_monitor, "monotonic", lambda: self.now)
        self.now = 0.0
        place: Future[tuple[str, int, str]] = Future()

        def exchange(own: bytes) -> list[bytes]:
            if own:
                place.set_result(json.loads(own))
            return [own] * 2

        self.outcome = pool.submit(connect, 0, 2, exchange, 60)
        host, port, token = place.result(60)
        self.address, self.hello = (host, port), GREETING.pack(token.encode(), 1)

    def send_a_stranger(self) -> None:
        """Returns once it is sent away: whoever connected before it was heard."""
        with socket.create_connection(self.address, 60) as stranger:
            stranger.sendall(bytes(GREETING.size))
            assert stranger.recv(1) == b""

    def end(self) -> None:
        """Let the time be over, and wake what waits."""
        self.now = 61.0
        with suppress(OSError), socket.create_connection(self.address):
            pass

    def has_connected(self) -> bool:
        ((rank, connection),) = self.outcome.result(60).sockets.items()
        connection.close()
        return rank == 1


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with ThreadPoolExecutor(1) as pool:
        start = Start(pool, monkeypatch)
        try:
            start.send_a_stranger()
            yield start
        finally:
            start.end()


def test_a_rank_that_does_not_come_is_named_together_with_the_strangers(start: Start) -> None:
    with ExitStack() as opened:
        strangers(opened, start.address)
        start.send_a_stranger()
        start.end()
        said = r"ranks \[1\] did not connect within .+ seconds; [89] unknown connections came to"  # 9: with `end`'s
        with pytest.raises(GroupError, match=said) as error:
            start.outcome.result(60)
    assert error.value.ranks == (1,)


def test_silent_strangers_beyond_a_few_are_sent_away_and_the_oldest_first(start: Start) -> None:
    with ExitStack() as opened:
        *silent, rank = [opened.enter_context(socket.socket()) for _ in range(2 * MAX_WAITING_CONNECTIONS)]
        for stranger in silent:
            stranger.connect(start.address)
        start.send_a_stranger()
        for stranger in silent:
            stranger.setblocking(False)
        gone = len(silent) - MAX_WAITING_CONNECTIONS  # the one that was sent last had the place of the missing rank
        assert [stranger.recv(1) for stranger in silent[:gone]] == [b""] * gone
        for stranger in silent[gone:]:
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
        rank.connect(start.address)
        rank.sendall(start.hello)
        assert start.has_connected()


def test_a_rank_has_the_whole_time_for_its_greeting(start: Start) -> None:
    with socket.create_connection(start.address) as slow:
        slow.sendall(start.hello[:9])
        start.send_a_stranger()
        start.now = 59.0
        start.send_a_stranger()
        slow.sendall(start.hello[9:])
        assert start.has_connected()


def test_strangers_give_their_descriptors_to_a_rank_where_there_are_no_more(start: Start) -> None:
    with ExitStack() as opened:
        *silent, rank = [opened.enter_context(socket.socket()) for _ in range(6)]
        with descriptors(2):
            for stranger in silent:
                stranger.connect(start.address)
            rank.connect(start.address)
            rank.sendall(start.hello)
            assert start.has_connected()


def test_a_rank_without_a_descriptor_for_another_says_so_at_once(start: Start) -> None:
    with socket.socket() as rank, descriptors(0):
        rank.connect(start.address)
        with pytest.raises(GroupError, match=r"cannot accept .*\(.*Too many open files\); .*\(ulimit -n\)"):
            start.outcome.result(60)


def test_a_rank_without_a_descriptor_to_reach_another_says_so() -> None:
    "".encode("idna")  # the socket's codec is imported before there are no descriptors for its file
    with descriptors(1), pytest.raises(GroupError, match=r"cannot reach rank 0 .*Too many open files\).*\(ulimit -n\)"):
        connect(1, 2, lambda own: [own] * 2, 60)


def test_an_interrupt_ends_the_wait_for_a_rank_and_closes_the_port() -> None:
    addresses: list[tuple[str, int]] = []

    def exchange(own: bytes) -> list[bytes]:
        if own:
            addresses.append(tuple(json.loads(own)[:2]))
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        return [own] * 2

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            connect(0, 2, exchange, 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0])


RANKS = 3
LONG = timedelta(seconds=60)


def clients() -> list[Store]:
    """A store that several processes would have, as each of them has it."""
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(1, RANKS))]


def sent(store: Store) -> list[bytes]:
    """What ranks have sent under the name of the last start."""
    start = store.get("tierbed/start").decode()
    return [store.get(f"{start}/{rank}") for rank in range(1, RANKS)]


@pytest.mark.parametrize("last", range(RANKS))
def test_a_rank_that_is_early_waits_for_those_of_its_start(last: int) -> None:
    stores = clients()
    with ThreadPoolExecutor(RANKS) as ranks:

        def begin(rank: int) -> Future[Store]:
            return ranks.submit(make_prefix_store, stores[rank], rank, RANKS, LONG)

        for number in range(3):
            before = sent(stores[last]) if number else []
            early = {rank: begin(rank) for rank in range(RANKS) if rank != last}
            while number and last == 0 and any(map(bytes.__eq__, before, sent(stores[0]))):
                pass  # until they have met the start before
            assert not any(one.done() for one in early.values())
            found = {rank: one.result() for rank, one in (early | {last: begin(last)}).items()}
            assert not any(store.check(["address"]) for store in found.values())
            found[0].set("address", str(number))
            assert {store.get("address") for store in found.values()} == {str(number).encode()}


def test_a_start_without_rank_0_ends() -> None:
    store = HashStore()
    store.set("tierbed/start", "tierbed/start/old")
    with pytest.raises(GroupError, match=r"rank 1 waited .* for rank 0, so the job did not start; check"):
        make_prefix_store(store, 1, 2, timedelta(seconds=0.2))
