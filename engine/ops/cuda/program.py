"""Compiles CUDA programs: a .cu file with its headers inlined, specialised by macros.

Machine code is compiled once per GPU architecture and kept in CuPy's kernel cache folder. The file's name is a hash of
the program's text. The hash covers the headers too, because they are inlined. NVRTC compiles programs directly. CuPy's
RawModule would add `-ftz=true`: denormal numbers would become zero, and rows would differ from rows on a CPU.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ...errors import StoreError
from ...optim.kernel import generate_header

ENGINE = Path(__file__).parents[2]
# NVRTC's options. Floating-point results are the same as on a CPU. Generic lambdas compile to device code, even before
# CUDA 13.2. Warnings are off for unused constants in headers (177) and for loops that never run (186).
OPTIONS = (
    "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true",
    "--device-as-default-execution-space", "--diag-suppress=177", "--diag-suppress=186",
)  # fmt: skip
_INCLUDE = re.compile(r'#include "([\w./]+)"\n')


@dataclass(frozen=True)
class Program:
    """A .cu file's kernels."""

    file: str  # path relative to engine/
    macros: tuple[tuple[str, str | int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.file, self.macros))

    def read_source(self) -> str:
        return "".join(f"#define {name} {value}\n" for name, value in self.macros) + _read_text(self.file)

    def list_kernels(self) -> list[str]:
        return re.findall(r'extern "C" __global__ void (\w+)\(', _read_text(self.file))


@cache
def _read_text(file: str) -> str:
    included: set[Path] = set()

    def expand(path: Path) -> str:
        if path in included:
            return ""
        included.add(path)
        # rules.h is generated from Python files. The build generates it for the CPU; this line generates it for a GPU
        text = generate_header() if path.name == "rules.h" else path.read_text(encoding="utf-8")
        text = text.replace("#pragma once\n", "")
        # an include names a header in the same folder, or gives a path relative to engine/
        return _INCLUDE.sub(lambda match: expand((ENGINE if "/" in match[1] else path.parent) / match[1]), text)

    return expand(ENGINE / file)


def compile_program(nvrtc: Any, program: Program, architecture: str) -> Path:
    """Return the path of a program's cubin for `architecture` ("sm_90"). Compiles a new cubin. Raises StoreError."""
    source, options = program.read_source(), (*OPTIONS, f"--gpu-architecture={architecture}")
    content = "\0".join([source, *options, str(nvrtc.getVersion())])
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    path = folder / f"tierbed-{hashlib.sha256(content.encode()).hexdigest()[:40]}.cubin"
    if not path.exists():
        code = _compile(nvrtc, source, program.file, options)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(code)
        temporary.replace(path)  # atomic: other processes may write the same file
    return path


def _compile(nvrtc: Any, source: str, name: str, options: tuple[str, ...]) -> bytes:
    handle = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(handle, options)
        return nvrtc.getCUBIN(handle)
    except nvrtc.NVRTCError as error:
        raise StoreError(f"{name} does not compile for this GPU ({error}): {nvrtc.getProgramLog(handle)}") from error
    finally:
        nvrtc.destroyProgram(handle)
