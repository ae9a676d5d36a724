"""NVIDIA's runtime compiler by its C interface. It needs no GPU and no driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib.metadata import files


def compile_cubin(source: str, options: Sequence[str]) -> tuple[bytes, str]:
    """The machine code of `source`, and what the compiler and its assembler said. AssertionError with that where it
    does not compile."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
        assert result == 0, log
        return _read(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, result: int) -> None:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    assert result == 0, nvrtc.nvrtcGetErrorString(result).decode()


def _nvrtc() -> ctypes.CDLL:
    wheel = files("nvidia-cuda-nvrtc")
    assert wheel is not None
    library = next(file for file in wheel if file.name.startswith("libnvrtc.so"))
    return ctypes.CDLL(os.fspath(library.locate()))
