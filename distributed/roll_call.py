"""Which ranks still answer: told by a thread of each rank, whatever its other threads do."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from threading import Condition
from typing import Any

from ..engine.threads import Thread

BOUND = 3.0  # seconds for the answers to a roll call
ENDED = "its process ended"
LIVES = "it runs, but has not come to this call"


class Left(Exception):
    """A rank has ended the group. `why` says, of each rank that it missed, what is known."""

    def __init__(self, rank: int, why: Mapping[int, str]) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, dict(why)


class RollCall:
    """The connections of this rank to the others, and the thread that answers on them.

    A process that ends closes its connections, which tells the others at once. What a rank does with the group at its
    end, it says before: which ranks it missed, that it closed its world, or that its script ended. A rank that says
    nothing before was killed: `on_loss`, with the rank and what is known, is called by the thread that hears of it.
    """

    def __init__(self, connections: Mapping[int, socket.socket], on_loss: Callable[[int, str], None]) -> None:
        self.left: Left | None = None  # how another rank ended the group
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

    def missing(self, call: int) -> dict[int, str]:
        """The ranks that keep this one from ending its call, and what is known of each. Raises `left`.

        Where ranks are gone or silent, it is these; else those that have not come to the call. A rank that closed its
        world after the call is none of them, unless nobody else is.
        """
        self._tell({"call": call})
        others = self._connections.keys()
        with self._changed:
            self._changed.wait_for(lambda: self.left or others <= self._here.keys() | self._ended.keys(), BOUND)
            if self.left is not None:
                raise self.left
            silent = dict.fromkeys(others - self._here.keys() - self._ended.keys(), "no sign of it")
            gone = silent | {rank: why for rank, why in self._ended.items() if self._closed.get(rank, 0) < call}
            return gone or {rank: LIVES for rank, at in self._here.items() if at < call} or dict(self._ended)

    def closed_before(self, call: int) -> bool:
        """Whether a rank closed its world and will never come to this call."""
        return any(at < call for at in [*self._closed.values()])

    def leave(self, rank: int, why: Mapping[int, str]) -> None:
        """Tell all ranks that one of them, this or what this one was told of, has ended the group because of these.

        Who is told tells it on before it closes, since what a third rank hears first is by chance.
        """
        self._tell({"left": rank, "why": [*why.items()]})

    def close(self, why: str) -> None:
        """End the connections, and tell the others why."""
        self._at_end.cancel()
        self._is_closed = True
        self._tell({"closed": why, "at": self.at})
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # which the thread hears

    def _end_of_process(self) -> None:
        if os.getpid() == self._pid:  # a forked child has the connections of its parent
            self.close(ENDED)

    def _tell(self, message: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
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
                self._tell({"here": self.at}, [rank])
            case {"here": at}:
                self._here[rank] = at
            case {"left": by, "why": why}:
                self.left = self.left or Left(by, dict(why))
            case {"closed": why, "at": at}:
                self._ended[rank], self._closed[rank] = why, at
