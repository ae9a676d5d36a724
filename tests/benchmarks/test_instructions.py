"""benchmarks/instructions.py: when the gate on instructions fails, and what it says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from support.places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))
from instructions import BASELINE, CORE, FLAGS, LOOPS, RENEW, Counts, compare

COUNTS = Counts(
    compiler="GCC 12.2.0",
    flags="-O3",
    valgrind="valgrind-3.19.0",
    ids={"d16": 100, "d128": 100},
    instructions={"d16": {"gather": 10_000, "update": 20_000}, "d128": {"gather": 50_000}},
)


def counts_with(gather: int) -> Counts:
    return replace(COUNTS, instructions={**COUNTS.instructions, "d16": {"gather": gather, "update": 20_000}})


def test_the_same_counts_pass() -> None:
    assert compare(COUNTS, COUNTS) == ([], [])


def test_a_part_may_take_three_percent_more_and_no_instruction_above_that() -> None:
    assert compare(COUNTS, counts_with(10_300)) == ([], [])
    wrong, _ = compare(COUNTS, counts_with(10_301))
    assert wrong == ["d16, gather: 10,000 instructions before, 10,301 now, +3.0%"]


def test_a_part_that_takes_less_passes_and_names_the_command_that_renews_the_baseline() -> None:
    wrong, said = compare(COUNTS, counts_with(9_000))
    assert not wrong
    assert said == [f"d16, gather: -10.0%; the baseline can be renewed: {RENEW}"]


@pytest.mark.parametrize("other", [replace(COUNTS, compiler="GCC 13.1.0"), replace(COUNTS, flags="-O2")])
def test_another_compiler_or_other_flags_fail_with_the_command_that_renews_the_baseline(other: Counts) -> None:
    (wrong,), _ = compare(COUNTS, other)
    assert f"{other.compiler} {other.flags}" in wrong
    assert wrong.endswith(RENEW)


def test_another_valgrind_counts_the_same() -> None:
    assert compare(COUNTS, replace(COUNTS, valgrind="valgrind-3.24.0")) == ([], [])


def test_a_workload_that_only_one_side_has_fails() -> None:
    fewer = replace(COUNTS, instructions={"d16": COUNTS.instructions["d16"]})
    assert compare(COUNTS, fewer)[0] == [f"d128 has no gather in this count; if this is intended: {RENEW}"]
    assert compare(fewer, COUNTS)[0] == [f"d128 has no gather in the baseline; if this is intended: {RENEW}"]


def test_the_core_is_counted_with_the_flags_that_it_is_built_with() -> None:
    built = (ROOT / "CMakeLists.txt").read_text()
    assert f"target_compile_options(_core PRIVATE {CORE})" in built
    ours, of_all_loops = LOOPS.split(" --param")
    assert f'add_loops(avx2 "avx2" {ours})' in built
    assert f"--param{of_all_loops}>" in built
    for flag in ("-O3", "-ffp-contract=off", "-fno-math-errno"):
        assert flag in FLAGS.split()
        assert flag in built


def test_the_baseline_is_of_the_flags_that_are_counted_with() -> None:
    assert json.loads(BASELINE.read_text())["flags"] == f"{FLAGS}, {CORE}, loops {LOOPS}"
