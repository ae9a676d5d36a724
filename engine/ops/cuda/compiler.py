"""Programs to machine code: compiled once for each GPU's architecture and kept in CuPy's folder for such files.

They are compiled by CuPy's interface to NVRTC. RawModule's `code` would add `-ftz=true`: rows would lose denormal
numbers, and with them the bits that the CPU gives them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from ...errors import StoreError
from .program import OPTIONS, Program


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
