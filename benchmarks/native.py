"""Compile and load the benchmarks' C++ sources."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")


@cache
def compile_library(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile a source with these flags into a shared library and load it. The file is deleted after loading."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        command = [os.environ.get("CXX", "c++"), *FLAGS]
        subprocess.run([*command, "-o", str(library), str(source), *flags], check=True)
        return ctypes.CDLL(str(library))
