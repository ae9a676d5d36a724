"""Two hosts with a link between them, as network namespaces, and ranks on them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from support.forked import in_process, own_namespaces, system
from support.ranks import answer, be_rank

CLONE_NEWNET = 0x40000000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "wire0"  # what each host calls its end


class Hosts:
    """This process, which has one thread, is on the first host from here on. On either it starts others."""

    def __init__(self) -> None:
        own_namespaces(CLONE_NEWNET)
        self._second = self.start(0, lambda: (system("unshare", CLONE_NEWNET), signal.pause()))
        while os.path.samefile(f"/proc/{self._second}/ns/net", "/proc/self/ns/net"):
            os.sched_yield()
        _ip("link", "add", "name", LINK, "type", "veth", "peer", "name", LINK, "netns", str(self._second))
        for host, address in enumerate(ADDRESSES):
            self.do(host, _ip, "link", "set", "lo", "up")
            self.do(host, _ip, "address", "add", f"{address}/24", "dev", LINK)
            self.do(host, _ip, "link", "set", LINK, "up")

    def start(self, host: int, task: Callable[..., object], *arguments: Any) -> int:
        """A process on a host that ends when `task` returns. Returns its number."""
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                if host:
                    with open(f"/proc/{self._second}/ns/net") as there:
                        system("setns", there.fileno(), CLONE_NEWNET)
                task(*arguments)
                os._exit(0)
            os._exit(1)
        return child

    def do(self, host: int, task: Callable[..., object], *arguments: Any) -> None:
        _, status = os.waitpid(self.start(host, task, *arguments), 0)
        assert status == 0, f"{task.__name__}{arguments} on host {host} came to {status}"

    def cut(self, host: int) -> None:
        self.do(host, _ip, "link", "set", LINK, "down")


def run_on_hosts(function: Callable[..., Any], ranks: int, cut: int, timeout: float) -> list[Any]:
    """What `function(world, ready)` returns on ranks of which each host has half.

    When all have written to the descriptor `ready`, the link is cut at a host's end. Skips where users may have no
    network of their own.
    """
    found = in_process(_ranks_on_hosts, function, ranks, cut, timeout)
    if found is None:
        pytest.skip("this system lets no user have network namespaces with a link between them")
    return list(found)


def _ranks_on_hosts(function: Callable[..., Any], ranks: int, cut: int, timeout: float) -> list[Any] | None:
    try:
        hosts = Hosts()
    except (OSError, AssertionError, subprocess.CalledProcessError):
        return None
    reports, ready = os.pipe()
    place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": LINK}  # rank 0 has the store
    pipes = []
    for rank in range(ranks):
        ours, theirs = Pipe()
        hosts.start(2 * rank // ranks, be_rank, rank, ranks, place, timeout, function, (ready,), theirs)
        theirs.close()
        pipes.append(ours)
    os.close(ready)
    for _ in range(ranks):
        assert os.read(reports, 1), "the ranks ended before the link was cut"
    hosts.cut(cut)
    return [answer(pipe) for pipe in pipes]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stderr=subprocess.DEVNULL)
