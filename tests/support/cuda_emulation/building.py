"""Builds the emulation and kernels by g++, once for each text and compiler, for all checkouts of a user."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

HEADER = Path(__file__).with_name("emulation.h")
RUNTIME = Path(__file__).with_name("emulation.cpp")
BUILT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierbed" / "cuda_emulation"
KEPT_SECONDS = 30 * 24 * 3600  # after the last use
# _FORTIFY_SOURCE, which some systems turn on, takes a switch to another stack for a mistake
COMPILE = (
    "g++", "-std=c++17", "-ffp-contract=off", "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE", "-w", "-pipe", "-shared",
)  # fmt: skip
# a text takes longer to optimise than its kernels run; what they call is in the process
KERNELS = ("-O0", "-fno-exceptions", "-fno-math-errno", "-nostdlib")


def library(kernels: str) -> ctypes.CDLL:
    """The library of a text of kernels, which may use all of emulation.h."""
    _runtime()
    return ctypes.CDLL(str(_compiled(kernels, *KERNELS)))


@cache
def _runtime() -> ctypes.CDLL:
    """What runs the lanes of all libraries."""
    text = RUNTIME.read_text().replace('#include "emulation.h"\n', "")
    return ctypes.CDLL(str(_compiled(text, "-O1")), ctypes.RTLD_GLOBAL)


def _compiled(text: str, *options: str) -> Path:
    """The library that the compiler makes of emulation.h and the text."""
    text = HEADER.read_text() + text
    content = "\0".join([_compiler(), *COMPILE, *options, text])
    path = _folder() / (hashlib.sha256(content.encode()).hexdigest()[:32] + ".so")
    command = [*COMPILE, *options, "-x", "c++", "-", "-o"]
    _make(path, lambda to: subprocess.run([*command, to], input=text, text=True, check=True))
    return path


def _make(path: Path, make: Callable[[Path], object]) -> None:
    """Make a missing file. It gets its name when it is whole, since others may make the same."""
    if path.exists():
        path.touch()
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    make(temporary)
    temporary.replace(path)


@cache
def _compiler() -> str:
    return subprocess.run([COMPILE[0], "--version"], capture_output=True, text=True, check=True).stdout


@cache
def _folder() -> Path:
    """Where builds are, without those that nobody used for long."""
    BUILT.mkdir(parents=True, exist_ok=True)
    for file in BUILT.iterdir():
        if file.stat().st_mtime < time.time() - KEPT_SECONDS:
            file.unlink(missing_ok=True)
    return BUILT
