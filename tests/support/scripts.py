"""Scripts in interpreters of their own.

`run_script` forks its interpreters from one that has imported torch and tierbed: seconds less for each. They end as any
other, with what the script left to its end. What depends on how Python starts, on what is imported or on what is
preloaded takes `run_cold` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from support.places import environment


def run_script(script: str | Path, *arguments: object, cwd: Path | None = None, warnings: str = "ignore") -> Any:
    """A script's text or file, run by Python with these arguments and `-W warnings`: a CompletedProcess of text."""
    given = {"file": os.fspath(script)} if isinstance(script, Path) else {"text": script}
    return _server().run(given | {"arguments": list(map(str, arguments)), "warnings": warnings}, cwd or Path.cwd())


def run_cold(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script's text, run by a Python that starts for it and imports what tests do."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def run_python(script: str, *arguments: Path) -> str:
    """What a script prints that `run_cold` runs to a good end."""
    done = run_cold(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from support import scripts; scripts.serve()"],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, order: dict[str, Any], cwd: Path) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            places = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            order |= {"places": places, "cwd": str(cwd), "environment": dict(os.environ)}
            try:
                print(json.dumps(order), file=self._process.stdin, flush=True)
                code = int(self._process.stdout.readline())
            except BaseException:  # the limit of the test
                self.close()
                _server.cache_clear()
                raise
            return subprocess.CompletedProcess([], code, *(_text(file) for file in (out, err)))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _text(file: Any) -> str:
    file.seek(0)
    text: str = file.read()
    return text


@cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def serve() -> None:
    """Fork a child for each order on standard input, and print how it ended."""

    import tierbed

    for name in tierbed.__all__:  # each is imported at its first use
        getattr(tierbed, name)
    gc.freeze()  # children leave it alone, which is most of what they would do at their end

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(order: dict[str, Any]) -> None:
    for number, place in enumerate(["/dev/null", *order["places"]]):
        os.dup2(os.open(place, os.O_RDWR | os.O_APPEND), number)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    warnings.simplefilter(order["warnings"])
    if file := order.get("file"):
        sys.argv = [file, *order["arguments"]]
        sys.path[0] = str(Path(file).parent)
        runpy.run_path(file, run_name="__main__")
    else:
        sys.argv = ["-c", *order["arguments"]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(order["text"], "<script>", "exec"), main.__dict__)
