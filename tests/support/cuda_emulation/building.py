"""Builds the emulation and kernels by g++, once for each text and compiler, for all checkouts of a user."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import threading
import time
from functools import cache
from pathlib import Path

HEADER = Path(__file__).with_name("emulation.h")
BUILT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierbed" / "cuda_emulation"
KEPT_SECONDS = 30 * 24 * 3600  # after the last use
# _FORTIFY_SOURCE, which some systems turn on, takes a switch to another stack for a mistake
COMPILE = (
    "g++", "-std=c++17", "-ffp-contract=off", "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE", "-w", "-pipe", "-shared",
)  # fmt: skip
# not optimised: compiling would take longer than the kernels run. What kernels call is already in the process
KERNELS = ("-O0", "-fno-exceptions", "-fno-math-errno", "-nostdlib")


def library(kernels: str) -> ctypes.CDLL:
    """The library of a text of kernels, which may use all of emulation.h."""
    _runtime()
    return ctypes.CDLL(str(_compiled(kernels, *KERNELS)))


@cache
def _runtime() -> ctypes.CDLL:
    """What runs the lanes of all libraries."""
    text = HEADER.with_suffix(".cpp").read_text().replace('#include "emulation.h"\n', "")
    return ctypes.CDLL(str(_compiled(text, "-O1")), ctypes.RTLD_GLOBAL)


def _compiled(text: str, *options: str) -> Path:
    """The library of emulation.h and the text. It gets its name when it is whole, since others may make the same."""
    text, command = HEADER.read_text() + text, [*COMPILE, *options, "-x", "c++", "-", "-o"]
    content = "\0".join([_compiler(), *command, text])
    path = _folder() / (hashlib.sha256(content.encode()).hexdigest()[:32] + ".so")
    if path.exists():
        path.touch()
    else:
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        subprocess.run([*command, temporary], input=text, text=True, check=True)
        temporary.replace(path)
    return path


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
