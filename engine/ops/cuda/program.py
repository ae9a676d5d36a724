"""Kernels: a .cu file with its headers as one text, the macros that specialise it, and its machine code.

The code is compiled once for each GPU's architecture and kept in CuPy's folder for such files. The file's name is a
hash of the program's text, so the text contains the headers. Programs are compiled by CuPy's interface to NVRTC, since
RawModule's `code` would add `-ftz=true`: rows would lose denormal numbers, and differ from those of the CPU.
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
from ...optim.kernel import header

ENGINE = Path(__file__).parents[2]
# of NVRTC: rows have the bits that the CPU gives them; generic lambdas are device code before CUDA 13.2 as well; a file
# need not use every constant of its headers (177), and some rules have none (186)
OPTIONS = (
    "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true",
    "--device-as-default-execution-space", "--diag-suppress=177", "--diag-suppress=186",
)  # fmt: skip
_INCLUDE = re.compile(r'#include "([\w./]+)"\n')


@dataclass(frozen=True)
class Program:
    """The kernels of one file. `macros`: values by name."""

    file: str  # its path from engine/
    macros: tuple[tuple[str, str | int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.file, self.macros))

    def source(self) -> str:
        """The whole text of the program."""
        defines = "".join(f"#define {name} {value}\n" for name, value in self.macros)
        return defines + _text(self.file)

    def kernels(self) -> list[str]:
        """The names of the program's entry points."""
        return re.findall(r'extern "C" __global__ void (\w+)\(', _text(self.file))


@cache
def _text(file: str) -> str:
    included: set[Path] = set()

    def expand(path: Path) -> str:
        if path in included:
            return ""
        included.add(path)
        # the build makes rules.h from the rules' Python files; here it is made at run time
        text = header() if path.name == "rules.h" else path.read_text(encoding="utf-8")
        text = text.replace("#pragma once\n", "")
        # a header of the same folder is included by its name, any other by its path from engine/
        return _INCLUDE.sub(lambda match: expand((ENGINE if "/" in match[1] else path.parent) / match[1]), text)

    return expand(ENGINE / file)


def compiled(nvrtc: Any, program: Program, architecture: str) -> Path:
    """A file of the program's machine code for `architecture`, such as "sm_90". Raises StoreError.

    nvrtc: the module `cupy.cuda.nvrtc`.
    """
    source, options = program.source(), (*OPTIONS, f"--gpu-architecture={architecture}")
    content = "\0".join([source, *options, str(nvrtc.getVersion())])
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    path = folder / f"tierbed-{hashlib.sha256(content.encode()).hexdigest()[:40]}.cubin"
    if not path.exists():
        code = _compile(nvrtc, source, program.file, options)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(code)
        temporary.replace(path)  # other processes may do the same
    return path


def _compile(nvrtc: Any, source: str, name: str, options: tuple[str, ...]) -> bytes:
    handle = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(handle, options)
        code: bytes = nvrtc.getCUBIN(handle)
        return code
    except nvrtc.NVRTCError as error:
        raise StoreError(f"{name} does not compile for this GPU ({error}): {nvrtc.getProgramLog(handle)}") from error
    finally:
        nvrtc.destroyProgram(handle)
