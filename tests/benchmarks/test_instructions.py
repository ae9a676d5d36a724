"""benchmarks/instructions.py: when the gate on instructions fails, and what it says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from support.places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))
from instructions import BASELINE, CORE, FLAGS, LOOPS, RENEW, Counts, compare

OF_D16, OF_D128 = {"gather": 10_000, "update": 20_000}, {"gather": 50_000}
COUNTS = Counts(
    compiler="GCC 12.2.0",
    flags="-O3",
    valgrind="valgrind-3.19.0",
    ids={"d16": 100, "d128": 100},
    instructions={"d16": OF_D16, "d128": OF_D128},
)
FEWER = replace(COUNTS, instructions={"d16": OF_D16})


def gathers(count: int) -> Counts:
    return replace(COUNTS, instructions={"d16": {**OF_D16, "gather": count}, "d128": OF_D128})


@pytest.mark.parametrize(
    ("before", "now", "wrong", "said"),
    [
        (COUNTS, COUNTS, [], []),
        (COUNTS, replace(COUNTS, valgrind="valgrind-3.24.0"), [], []),
        (COUNTS, gathers(10_300), [], []),
        (COUNTS, gathers(10_301), ["d16, gather: 10,000 instructions before, 10,301 now, +3.0%"], []),
        (COUNTS, gathers(9_000), [], [f"d16, gather: -10.0%; the baseline can be renewed: {RENEW}"]),
        (COUNTS, FEWER, [f"d128 has no gather in this count; if this is intended: {RENEW}"], []),
        (FEWER, COUNTS, [f"d128 has no gather in the baseline; if this is intended: {RENEW}"], []),
    ],
)
def test_a_part_may_take_three_percent_more(before: Counts, now: Counts, wrong: list[str], said: list[str]) -> None:
    assert compare(before, now) == (wrong, said)


@pytest.mark.parametrize("other", [replace(COUNTS, compiler="GCC 13.1.0"), replace(COUNTS, flags="-O2")])
def test_another_compiler_or_other_flags_fail_with_the_command_that_renews_the_baseline(other: Counts) -> None:
    (wrong,), _ = compare(COUNTS, other)
    assert f"{other.compiler} {other.flags}" in wrong
    assert wrong.endswith(RENEW)


def test_the_core_and_the_baseline_are_counted_with_the_flags_that_it_is_built_with() -> None:
    assert json.loads(BASELINE.read_text())["flags"] == f"{FLAGS}, {CORE}, loops {LOOPS}"
    ours, of_all_loops = LOOPS.split(" --param")
    parts = [f"target_compile_options(${{target}} PRIVATE {CORE})", f'add_loops(avx2 "avx2" {ours})']
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno"]
    built = (ROOT / "CMakeLists.txt").read_text()
    assert [part for part in [*parts, f"--param{of_all_loops}>", *flags] if part not in built] == []
    assert set(flags) <= set(FLAGS.split())
