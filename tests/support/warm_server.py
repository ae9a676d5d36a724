"""The server of warm processes: it imports torch and tierbed once, and forks a child for each order.

It waits at a socket without a file. An order is one connection: the client sends descriptors, hears the number of the
child that was forked for it, and then how the child ended. A client that goes away first takes its child along.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import typing
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from support.places import TESTS

MAX_BYTES = 1 << 16  # of a message
MADV_COLLAPSE = 25
LONG = [
    "encodings.idna",
    "tierbed.engine.optim.adagrad",
    "tierbed.engine.optim.rmsprop",
    "tierbed.engine.optim.sgd",
    "tierbed.engine.processors.cpu",
    "tierbed.snapshots.files.rocksdb_child",
    "torch._inductor.fx_passes",
    "torch._subclasses.schema_check_mode",
    "torch.optim.adagrad",  # the first optimizer imports torch._dynamo
    "torch.utils.serialization.config",
]


def command(arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", f"from support import warm_server; warm_server.serve({arguments})"]


def serve(number: int, shims: Sequence[str] = (), built: str | None = None) -> None:
    """Serve at a listening socket until standard input ends; in a child, do its order."""
    if shims and number in select.select([sys.stdin, number], [], [])[0]:
        _start_again(number, shims)
    if built:
        shutil.rmtree(built)  # loaded
    if files := _Loop(number).run():
        _do(*files)


def _start_again(number: int, shims: Sequence[str]) -> None:
    """With the shims, which can only be loaded before all else."""
    folder = Path(tempfile.mkdtemp())
    for shim in shims:
        library = folder / f"{Path(shim).stem}.so"
        subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, shim, "-ldl"], check=True)
    libraries = [*filter(None, [os.environ.get("LD_PRELOAD")]), *map(str, folder.iterdir())]  # a sanitizer's is first
    preloaded = {"LD_PRELOAD": ":".join(libraries), "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, command(f"{number}, built={str(folder)!r}"), os.environ | preloaded)


def _do(order: int, *files: int) -> None:
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    with os.fdopen(order, "rb") as given:
        path, folder, variables = pickle.load(given)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        _import_from(path)
        task, arguments = pickle.load(given)
    task(*arguments, *files[3:])


def leave() -> NoReturn:
    """End in good order as Python does, but without freeing what it and torch hold, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        if (alive := finalizer.peek()) and str(getattr(alive[1], "__module__", None)).startswith("torch."):
            finalizer.detach()  # it would take each of torch's operators down
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Loop:
    """Of one thread, so that children may do anything. They are reaped when their client is gone, which may signal."""

    def __init__(self, number: int) -> None:
        self._listener, self._selector = socket.socket(fileno=number), selectors.DefaultSelector()
        self._orders: dict[int, tuple[int, int]] = {}  # by client, its child and the descriptor that reports its end
        self._watch(sys.stdin.fileno(), self._end)
        self._watch(number, self._take)

    def run(self) -> Sequence[int]:
        """Returns in a child, with the descriptors of its order, and in the server at its end, with none."""
        files: Sequence[int] | None = None
        while files is None:
            (key, _), *_ = self._selector.select()  # others are still ready then
            files = key.data()
        for file in set(self._selector.get_map()) - {sys.stdin.fileno()}:
            os.close(file)
        self._listener.detach()
        self._selector.close()
        return files

    def _watch(self, file: int, act: Callable[[], Sequence[int] | None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _end(self) -> Sequence[int]:
        for client in [*self._orders]:
            self._leave(client)
        return ()

    def _take(self) -> Sequence[int] | None:
        connection, _ = self._listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        message, files, *_ = socket.recv_fds(connection, MAX_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
        if not message or user != os.getuid():
            for file in [*files, connection.detach()]:
                os.close(file)
            return None
        _import(*pickle.loads(message))
        client, child = connection.detach(), os.fork()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, child)  # by both, as either may be first
        if child == 0:
            os.close(client)
            return files
        for file in files:
            os.close(file)
        ended = os.pidfd_open(child)
        self._orders[client] = child, ended
        self._watch(ended, partial(self._tell_end, client))
        self._watch(client, partial(self._leave, client))
        _tell(client, child)
        return None

    def _tell_end(self, client: int) -> None:
        child, ended = self._orders[client]
        self._selector.unregister(ended)
        end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert end is not None
        _tell(client, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def _leave(self, client: int) -> None:
        """The client is gone."""
        child, ended = self._orders.pop(client)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # until it is reaped, no other group has its number
        os.waitpid(child, 0)
        with contextlib.suppress(KeyError):  # it received
            self._selector.unregister(ended)
        self._selector.unregister(client)
        os.close(client)
        os.close(ended)


def _tell(client: int, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # a client that is gone is left
        os.write(client, b"%d" % number)


def _import_from(path: Sequence[str]) -> None:
    sys.path[:0] = [folder for folder in path if folder not in sys.path]


def _import(path: Sequence[str], modules: set[str]) -> None:
    """What an order needs, so that its child and all later ones have it."""
    if "tierbed" not in sys.modules:
        warm_up()
    before = sys.path[:]
    _import_from(path)
    for module in modules:
        with contextlib.suppress(BaseException):  # the child fails by it again
            importlib.import_module(module)
    sys.path[:] = before
    gc.freeze()  # children leave it alone, which is most of what they would do at their end


def _join_pages() -> None:
    """Ask for huge pages of memory, which newer kernels make: a child takes 5 ms to begin and to end instead of 18."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *name = line.split()
        if rights.startswith("rw") and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(number, 16) for number in place.split("-"))
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def warm_up() -> None:
    """Import what takes long, and let modules of tests explain their assertions."""
    import pytest
    import torch
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    import tierbed
    from tierbed import cli
    from tierbed.engine.optim.kernel import load_kernels

    install_importhook(get_config())
    names = {f"support.{file.stem}" for file in (TESTS / "support").glob("*.py")}
    pytest.register_assert_rewrite(*names.difference(sys.modules))
    for module in LONG:
        importlib.import_module(module)
    load_kernels()
    for name in tierbed.__all__:  # resolved at their first use
        getattr(tierbed, name)
    from support.ranked import Ranked, batch

    with torch.random.fork_rng(devices=[]):
        (graph := Ranked(None))(*batch(0, 0))  # a first one, for which torch fills its caches
    graph.users.close()
    graph.items.close()
    with contextlib.suppress(SystemExit), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        cli.main(["snapshot", "list", os.devnull])  # imports more
    for clear in typing._cleanups:  # type: ignore[attr-defined]
        clear()  # or each child does it at its end, which takes longer there
    _join_pages()
