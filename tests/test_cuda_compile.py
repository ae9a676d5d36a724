"""Every kernel and every optimizer's rule compiles for the GPUs that we promise, on a machine without one."""

from __future__ import annotations

import re

import pytest
from nvrtc import compile_cubin

from tierbed.engine.ops.cuda.program import FOLDERS, OPTIONS, Program
from tierbed.engine.ops.cuda.step import struct_name
from tierbed.engine.optim.kernel import declared

ARCHITECTURES = ("sm_80", "sm_90")
MOST_REGISTERS = 128  # two blocks of 256 threads share a processor's registers
RULES = {kernel.name: kernel for kernel in declared()}
FILES = sorted(path.name for path in FOLDERS[0].glob("*.cu"))


def macros(dim: int, width: int) -> tuple[tuple[str, str | int], ...]:
    line_bytes = (width * 4 + 8 + 15) // 16 * 16
    return ("TIERBED_DIM", dim), ("TIERBED_WIDTH", width), ("TIERBED_LINE_BYTES", line_bytes)


def check(program: Program, architecture: str) -> None:
    cubin, log = compile_cubin(program.source(), [*OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"])
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log, log
    used = dict(re.findall(r"Function properties for (\w+)\n.*?Used (\d+) registers", log, re.DOTALL))
    assert sorted(used) == sorted(program.kernels())
    for kernel, registers in used.items():
        assert int(registers) <= MOST_REGISTERS, (kernel, registers)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert spilled, log
    assert set(spilled) == {"0"}, log


def test_no_file_is_left_out() -> None:
    assert FILES == ["batch.cu", "cache.cu", "lines.cu", "staging.cu", "table.cu", "update.cu"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dim", [1, 17, 128])
@pytest.mark.parametrize("file", [file for file in FILES if file != "update.cu"])
def test_kernels_compile(file: str, dim: int, architecture: str) -> None:
    check(Program(file, macros(dim, 3 * dim)), architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("gradients", ["Float32", "Float16", "BFloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_compile(rule: str, gradients: str, architecture: str) -> None:
    kernel = RULES[rule]
    dim = 128 if gradients == "Float32" else 17
    width = dim * (1 + len(kernel.element_states)) + len(kernel.row_states)
    rule_macros = (("TIERBED_RULE", struct_name(rule)), ("TIERBED_GRADIENTS", gradients))
    check(Program("update.cu", macros(dim, width) + rule_macros), architecture)
