"""The server of warm processes: it imports torch and tierbed once, and forks a child for each order.

It waits at a socket without a file. An order is one connection: the client sends descriptors, hears the number of the
child that was forked for it, and then how the child ended. A client that goes away first takes its child along.
"""

from __future__ import annotations

import atexit
import contextlib
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
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from support.places import TESTS

MAX_BYTES = 1 << 16  # of a message
LONG = [
    "encodings.idna",
    "tierbed.engine.optim.adagrad",
    "tierbed.engine.optim.rmsprop",
    "tierbed.engine.optim.sgd",
    "tierbed.engine.processors.cpu",
    "torch._inductor.fx_passes",
    "torch._subclasses.schema_check_mode",
    "torch.optim.adagrad",  # the first optimizer imports torch._dynamo
]


def command(arguments: str) -> list[str]:
    """Starts a server, by the arguments of `serve`."""
    return [sys.executable, "-W", "ignore", "-c", f"from support import warm_server; warm_server.serve({arguments})"]


def serve(number: int, shims: Sequence[str] = (), built: str | None = None) -> None:
    """Serve at a listening socket until standard input ends; in a child, do its order."""
    if shims and number in select.select([sys.stdin, number], [], [])[0]:
        _start_again(number, shims)
    if built:
        shutil.rmtree(built)  # loaded
    with socket.socket(fileno=number) as listener, _Loop(listener) as loop:
        files = loop.serve()
    if files:
        _do(*files)


def _start_again(number: int, shims: Sequence[str]) -> None:
    """With the shims, which can only be loaded before all else."""
    folder = Path(tempfile.mkdtemp())
    for shim in shims:
        library = folder / f"{Path(shim).stem}.so"
        subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, shim, "-ldl"], check=True)
    preloaded = {"LD_PRELOAD": ":".join(map(str, folder.iterdir())), "OMP_NUM_THREADS": "1"}
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


def _import_from(path: Sequence[str]) -> None:
    sys.path[:0] = [folder for folder in path if folder not in sys.path]


@dataclass(eq=False)
class _Order:
    connection: socket.socket
    child: int
    ended: int  # the descriptor that reports

    def close(self) -> None:
        self.connection.close()
        os.close(self.ended)


class _Loop:
    """Of one thread, so that children may do anything. They are reaped when their client is gone, which may signal."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._going, self._warm = listener, True, False
        self._orders: set[_Order] = set()
        self._selector = selectors.DefaultSelector()
        self._watch(sys.stdin.fileno(), self._end)
        self._watch(listener.fileno(), self._take)

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for order in self._orders:
            order.close()

    def serve(self) -> Sequence[int]:
        """Returns in a child, with the descriptors of its order, and in the server at its end, with none."""
        while self._going:
            (key, _), *_ = self._selector.select()  # others are still ready then
            if files := key.data():
                return files  # type: ignore[no-any-return]
        return ()

    def _watch(self, file: int, act: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _end(self) -> None:
        for order in [*self._orders]:
            self._leave(order)
        self._going = False

    def _take(self) -> Sequence[int]:
        connection, _ = self._listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        message, files = b"", []
        if user == os.getuid():
            message, files, *_ = socket.recv_fds(connection, MAX_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
        if not message:
            connection.close()
            return ()
        try:
            self._import(*pickle.loads(message))
            child = os.fork()
        except Exception:
            traceback.print_exc()
            for file in [*files, connection.detach()]:
                os.close(file)
            return ()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, child)  # by both, as either may be first
        if child == 0:
            connection.close()
            return files
        for file in files:
            os.close(file)
        self._add(_Order(connection, child, os.pidfd_open(child)))
        return ()

    def _add(self, order: _Order) -> None:
        self._orders.add(order)
        self._watch(order.ended, partial(self._send_end, order))
        self._watch(order.connection.fileno(), partial(self._leave, order))
        self._send(order, order.child)

    def _send_end(self, order: _Order) -> None:
        self._selector.unregister(order.ended)
        end = os.waitid(os.P_PID, order.child, os.WEXITED | os.WNOWAIT)
        assert end is not None
        self._send(order, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def _send(self, order: _Order, number: int) -> None:
        with contextlib.suppress(ConnectionError):  # a client that is gone is left
            order.connection.send(b"%d" % number)

    def _leave(self, order: _Order) -> None:
        """The client is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(order.child, signal.SIGKILL)  # until it is reaped, no other group has its number
        os.waitpid(order.child, 0)
        with contextlib.suppress(KeyError):  # it received
            self._selector.unregister(order.ended)
        self._selector.unregister(order.connection.fileno())
        self._orders.remove(order)
        order.close()

    def _import(self, path: Sequence[str], modules: set[str]) -> None:
        """What the order needs, so that its child and all later ones have it."""
        if not self._warm:
            warm_up()
            self._warm = True
        before = sys.path[:]
        _import_from(path)
        for module in modules:
            with contextlib.suppress(BaseException):  # the child fails by it again
                importlib.import_module(module)
        sys.path[:] = before
        gc.freeze()  # children leave it alone, which is most of what they would do at their end


def warm_up() -> None:
    """Import what takes long, and let modules of tests explain their assertions."""
    import pytest
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    import tierbed
    from tierbed import cli
    from tierbed.engine.optim.kernel import kernels

    install_importhook(get_config())
    names = {f"support.{file.stem}" for file in (TESTS / "support").glob("*.py")}
    pytest.register_assert_rewrite(*names.difference(sys.modules))
    for module in LONG:
        importlib.import_module(module)
    kernels()
    for name in tierbed.__all__:  # resolved at their first use
        getattr(tierbed, name)
    with contextlib.suppress(SystemExit), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        cli.main(["snapshot", "list", os.devnull])  # imports more
