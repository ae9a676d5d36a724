"""Processes forked from a warm one, which has imported torch and tierbed once for a whole run of pytest.

Each process that runs tests orders children of the run's server, which is `warm_server`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from support.places import TESTS, environment
from support.warm_server import MAX_BYTES, command

SERVER = "TIERBED_TESTS_SERVER"  # environment variable with its address
SHIMS = [TESTS / "support" / "failing_io.cpp", TESTS / "crash" / "crash_io.cpp"]  # idle until a child calls them


class Server:
    """Forks children until it is closed or its maker ends. It preloads SHIMS.

    It starts cold, and imports when the first order comes.
    """

    def __init__(self) -> None:
        self.address = f"tierbed-tests-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + self.address)
            listener.listen(100)
            number = listener.fileno()
            self._process = subprocess.Popen(
                command(f"{number}, {[*map(str, SHIMS)]}"),
                env=environment() | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # a process that asks CUDA may not fork
                stdin=subprocess.PIPE,  # its end is that of this process, or what `close` does
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def close(self) -> None:
        """Children that run are killed."""
        self._process.communicate()


@contextlib.contextmanager
def running_server() -> Iterator[None]:
    """The server of this process and of those that it starts, while the block runs."""
    server = Server()
    os.environ[SERVER] = server.address
    try:
        yield
    finally:
        server.close()


class Child:
    """A process that calls `task(*arguments, *files)`, with copies of the open `files`, and ends as any other.

    It has the working folder and the environment of this process, and imports from the folders of `path` first.
    """

    def __init__(
        self,
        task: Callable[..., Any],
        *arguments: Any,
        files: Sequence[int] = (),
        stdout: int = 1,
        stderr: int = 2,
        path: Sequence[str] | None = None,
    ) -> None:
        path = sys.path if path is None else path
        modules = {part.__module__ for part in (task, *arguments) if callable(part)}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile() as order, open(os.devnull) as stdin:
            pickle.dump((path, os.getcwd(), dict(os.environ)), order)
            pickle.dump((task, arguments), order)
            order.seek(0)
            self._server.connect("\0" + os.environ[SERVER])
            files = [order.fileno(), stdin.fileno(), stdout, stderr, *files]
            socket.send_fds(self._server, [pickle.dumps((path, modules))], files)
            self.pid = self._hear()

    def wait(self) -> int:
        """Its exit code, or below zero the signal that ended it. Until then `pid` is the child's, running or not."""
        code = self._hear()
        self.close()
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        code = self.wait()
        assert code == -signal.SIGKILL, code

    def close(self) -> None:
        """What is left of its process group is killed."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # though a fork of this process may have it as well
        self._server.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hear(self) -> int:
        heard = self._server.recv(MAX_BYTES)
        assert heard, "the server of warm processes ended"
        return int(heard)
