"""Scripts in interpreters of their own.

`run_script` forks its interpreters from one that has imported torch and tierbed: seconds less for each. What depends on
how Python starts, on what is imported or on what is preloaded takes `run_cold` instead.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

from support.places import environment
from support.warm import Child
from support.warm_server import leave


def run_script(
    script: str | Path, *arguments: object, cwd: Path | None = None, warnings: str = "ignore", whole: bool = False
) -> Any:
    """A script's text or file, run by Python with these arguments and `-W warnings`: a CompletedProcess of text.

    Where it comes to a good end, Python's own is cut short by `leave`, unless it is to be the `whole` one.
    """
    text = None if isinstance(script, Path) else script
    words = [str(word) for word in (script if text is None else "-c", *arguments)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = {"stdout": out.fileno(), "stderr": err.fileno()}
        with Child(_run, text, words, str(cwd or Path.cwd()), warnings, whole, path=[], **files) as child:
            code = child.wait()
        return subprocess.CompletedProcess(words, code, *(_text(file) for file in (out, err)))


def _run(text: str | None, words: list[str], folder: str, filters: Any, whole: bool) -> None:
    os.chdir(folder)
    warnings.simplefilter(filters)
    sys.argv = words
    if text is None:
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<script>", "exec"), main.__dict__)
    if not whole:
        leave()


def _text(file: Any) -> str:
    file.seek(0)
    text: str = file.read()
    return text


def run_cold(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script's text, run by a Python that starts for it and imports what tests do."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def run_python(script: str, *arguments: Path) -> str:
    """What a script prints that `run_cold` runs to a good end."""
    done = run_cold(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
