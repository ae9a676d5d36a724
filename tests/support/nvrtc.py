"""NVIDIA's runtime compiler from its wheel, with the functions of `cupy.cuda.nvrtc`. It needs no GPU and no driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import files
from typing import Any


class NVRTCError(RuntimeError):
    pass


def getVersion() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("Version", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def createProgram(source: str, name: str, headers: Sequence[str], include_names: Sequence[str]) -> int:
    program = ctypes.c_void_p()
    _call("CreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    assert program.value is not None
    return program.value


def compileProgram(program: int, options: Sequence[str]) -> None:
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _call("CompileProgram", ctypes.c_void_p(program), len(options), given)


def getCUBIN(program: int) -> bytes:
    return _read(program, "CUBIN")


def getProgramLog(program: int) -> str:
    return _read(program, "ProgramLog").rstrip(b"\0").decode()


def destroyProgram(program: int) -> None:
    _call("DestroyProgram", ctypes.byref(ctypes.c_void_p(program)))


def _read(program: int, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"Get{what}Size", ctypes.c_void_p(program), ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"Get{what}", ctypes.c_void_p(program), buffer)
    return buffer.raw


def _call(name: str, *arguments: Any) -> None:
    if result := getattr(_library(), f"nvrtc{name}")(*arguments):
        raise NVRTCError(_library().nvrtcGetErrorString(result).decode())


@cache
def _library() -> ctypes.CDLL:
    wheel = files("nvidia-cuda-nvrtc")
    assert wheel is not None
    found = [os.fspath(file.locate()) for file in wheel if ".so" in file.name]
    # NVRTC asks the loader for its builtins, which finds them if they are loaded
    ctypes.CDLL(next(path for path in found if "libnvrtc-builtins.so" in path))
    library = ctypes.CDLL(next(path for path in found if "libnvrtc.so" in path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library
