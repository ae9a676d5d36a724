"""The sources of kernels: a .cu file with its headers in one text, and the macros that it is specialised by.

A compiler's cache tells programs apart by their text, so the content of the headers is part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
        # the build makes rules.h of the rules' Python files; here it is made anew
        text = header() if path.name == "rules.h" else path.read_text(encoding="utf-8")
        text = text.replace("#pragma once\n", "")
        # a header of the same folder goes by its name, any other by its path from engine/
        return _INCLUDE.sub(lambda match: expand((ENGINE if "/" in match[1] else path.parent) / match[1]), text)

    return expand(ENGINE / file)
