"""Every kernel and every optimizer's rule compiles for the GPUs that we promise, on a machine without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from support import nvrtc
from support.cells import rotated
from tierbed.engine.errors import StoreError
from tierbed.engine.ops.cuda.program import ENGINE, OPTIONS, Program, compile_program
from tierbed.engine.optim.kernel import find_kernels, make_struct_name
from tierbed.engine.row_format import compute_line_bytes, count_words

pytestmark = pytest.mark.op

MAX_REGISTERS = 128  # two blocks of 256 threads share a processor's registers
# This one lets a single block run on a processor. A limit of 128 compiles it too, but spills 32 bytes a thread; only a
# measurement on a GPU can choose between them.
MORE_REGISTERS = {("update_rows", "catch_up_adamw", 128, "sm_90"): 134}
RULES = {kernel.name: kernel for kernel in find_kernels()}
SOME_RULES = [  # a third of them, the others slow: `make check WHAT=optimizer NAME=...` compiles a new one
    pytest.param(rule, marks=() if number % 3 == 0 or rule == "catch_up_adamw" else pytest.mark.slow)
    for number, rule in enumerate(RULES)
]
Target = tuple[int, str, tuple[str, str]]  # dim, architecture, types of embedding and states
WIDE, HALF, NARROW = ("Float32", "Float32"), ("BFloat16", "Float32"), ("Float16", "BFloat16")
TARGETS: list[Target] = [  # each dim, and each type of rows, for each architecture
    (128, "sm_80", WIDE),
    (17, "sm_90", HALF),
    (1, "sm_80", NARROW),
    (128, "sm_90", NARROW),
    (17, "sm_80", HALF),
    (1, "sm_90", WIDE),
]
GRADIENTS = ["Float32", "Float16", "BFloat16"]
OF_GRADIENTS = ["ops/cuda/lookups.cu", "ops/cuda/sums.cu", "ops/cuda/update.cu"]
FILES = sorted(str(path.relative_to(ENGINE)) for path in ENGINE.rglob("*.cu"))


def macros(dim: int, states: int, types: tuple[str, str] = WIDE, numbers: int = 0) -> tuple[tuple[str, str | int], ...]:
    """Of rows with states that elements have, and numbers that rows have. types: of embedding and states."""
    embedding, of_states = types
    width = count_words(embedding.lower(), dim) + states * count_words(of_states.lower(), dim) + numbers
    return (
        ("TIERBED_DIM", dim),
        ("TIERBED_WIDTH", width),
        ("TIERBED_LINE_BYTES", compute_line_bytes(width)),
        ("TIERBED_EMBEDDING", embedding),
        ("TIERBED_STATES", of_states if states else "Float32"),
        ("TIERBED_NUM_16BIT_STATES", states if of_states != "Float32" else 0),
        ("TIERBED_ROW", embedding),
    )


def check(program: Program, architecture: str, more: Mapping[str, int] = MappingProxyType({})) -> None:
    """It compiles without warnings, and no kernel takes too many registers or spills any.

    more: kernels that may take more registers than others.
    """
    options = [*OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    handle = nvrtc.createProgram(program.read_source(), program.file, (), ())
    try:
        nvrtc.compileProgram(handle, options)
        cubin = nvrtc.getCUBIN(handle)
    finally:
        log = nvrtc.getProgramLog(handle)
        print(log)  # shown where it fails
        nvrtc.destroyProgram(handle)
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log
    used = dict(re.findall(r"Function properties for (\w+)\n.*?Used (\d+) registers", log, re.DOTALL))
    assert sorted(used) == sorted(program.list_kernels())
    for kernel, registers in used.items():
        assert int(registers) <= more.get(kernel, MAX_REGISTERS), kernel
    assert set(re.findall(r"(\d+) bytes spill (?:stores|loads)", log)) == {"0"}


def joined(target: object) -> str:
    return "-".join(map(joined, target)) if isinstance(target, tuple) else str(target)


@rotated("target")
@pytest.mark.parametrize("target", TARGETS, ids=joined)
@pytest.mark.parametrize("file", [file for file in FILES if file not in OF_GRADIENTS])
def test_kernels_compile(file: str, target: Target) -> None:
    dim, architecture, rows = target
    check(Program(file, macros(dim, 2, rows)), architecture)


@rotated("target")
@pytest.mark.parametrize("target", list(zip(GRADIENTS + GRADIENTS[::-1], TARGETS, strict=True)), ids=joined)
@pytest.mark.parametrize("rule", SOME_RULES)
def test_rules_compile(rule: str, target: tuple[str, Target]) -> None:
    gradients, (dim, architecture, rows) = target
    kernel = RULES[rule]
    line = macros(dim, len(kernel.element_states), rows, len(kernel.row_states))
    rule_macros = (("TIERBED_RULE", make_struct_name(rule)), ("TIERBED_GRADIENTS", gradients))
    this = [rule, dim, architecture]
    more = {name: registers for (name, *where), registers in MORE_REGISTERS.items() if where == this}
    check(Program("ops/cuda/update.cu", line + rule_macros), architecture, more)


@rotated("target")
@pytest.mark.parametrize("target", list(zip(GRADIENTS, TARGETS, strict=False)), ids=joined)
@pytest.mark.parametrize("file", OF_GRADIENTS[:2])
def test_lookups_and_sums_compile(file: str, target: tuple[str, Target]) -> None:
    gradients, (dim, architecture, rows) = target
    check(Program(file, (*macros(dim, 2, rows), ("TIERBED_GRADIENTS", gradients))), architecture)


def test_what_was_compiled_once_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    narrow, wide = (Program("ops/cuda/staging.cu", macros(dim, 0)) for dim in (4, 8))
    path = compile_program(nvrtc, narrow, "sm_90")
    assert path.read_bytes().startswith(b"\x7fELF")
    path.write_bytes(b"kept")
    assert compile_program(nvrtc, narrow, "sm_90").read_bytes() == b"kept"
    assert len({path, compile_program(nvrtc, narrow, "sm_80"), compile_program(nvrtc, wide, "sm_90")}) == 3


def test_what_does_not_compile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    with pytest.raises(StoreError, match="TIERBED_DIM"):
        compile_program(nvrtc, Program("store/cuda/full_table.cu"), "sm_90")
    assert not list(tmp_path.iterdir())
