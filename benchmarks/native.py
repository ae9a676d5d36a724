"""C++ of the benchmarks as libraries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path


@cache
def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    """The library that the compiler makes of a source with these flags; it stays loaded without its file."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        command = [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O3",
            "-Wall",
            "-Wextra",
            "-shared",
            "-fPIC",
            "-pthread",
        ]
        subprocess.run([*command, "-o", str(library), str(source), *flags], check=True)
        return ctypes.CDLL(str(library))
