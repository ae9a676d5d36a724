"""Count the instructions of the native core in fixed workloads, and gate them against a committed baseline.

    python benchmarks/instructions.py [--renew]      exits with 1 where a part of a workload takes 3 % more than there

Compiles the core's own sources with `instructions.cpp`, without Python, and runs that under callgrind: one thread, the
loops for AVX2. No load of the machine moves the counts. See README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = Path(__file__).with_suffix(".json")
BUILD = ROOT / "build" / "instructions"
RENEW = "make instructions RENEW=1"
MAX_RISE = 0.03
# as CMakeLists.txt builds the core
FLAGS = "-std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno"
CORE = "-march=x86-64-v2 -mtune=generic"
LOOPS = "-march=x86-64-v3 -mprfchw -mtune=generic --param=max-completely-peel-times=4"
FOLDERS = ("ops", "store", "cache")
WITH_PYTHON_OR_ROCKSDB = re.compile(r"(bind|rocksdb)_")


@dataclass(frozen=True)
class Counts:
    """instructions: of each part of a step, by the name of the workload; ids: that a workload counted."""

    compiler: str
    flags: str
    valgrind: str
    ids: dict[str, int]
    instructions: dict[str, dict[str, int]]


def compare(baseline: Counts, now: Counts) -> tuple[list[str], list[str]]:
    """What is wrong with `now`, and what is worth saying."""
    if (baseline.compiler, baseline.flags) != (now.compiler, now.flags):
        return [
            f"the baseline was counted with {baseline.compiler} {baseline.flags}, this with {now.compiler} "
            f"{now.flags}: counts do not compare. Renew it where your change is not in yet: {RENEW}"
        ], []
    wrong, said = [], []
    for work, part in sorted(set(_parts(baseline)) | set(_parts(now))):
        before, after = (counts.instructions.get(work, {}).get(part) for counts in (baseline, now))
        if before is None or after is None:
            where = "the baseline" if before is None else "this count"
            wrong.append(f"{work} has no {part} in {where}; where that is meant: {RENEW}")
        elif after > before * (1 + MAX_RISE):
            wrong.append(f"{work}, {part}: {before:,} instructions before, {after:,} now, {after / before - 1:+.1%}")
        elif after < before * (1 - MAX_RISE):
            said.append(f"{work}, {part}: {after / before - 1:+.1%}; the baseline can be renewed: {RENEW}")
    return wrong, said


def _parts(counts: Counts) -> Iterator[tuple[str, str]]:
    return ((work, part) for work, parts in counts.instructions.items() for part in parts)


def counted() -> Counts:
    """Compile and run the workloads."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    compiler = os.environ.get("CXX", "c++")
    program = _compiled(compiler)
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=callgrind", str(program)]
    environment = os.environ | {"TIERBED_HASH_SEED": "1"}  # counts differ with the slots of rows
    run = subprocess.run(command, cwd=BUILD, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    ids = {work: int(number) for work, number in (line.split() for line in run.stdout.splitlines())}
    return Counts(
        _version_of(compiler), f"{FLAGS}, {CORE}, loops {LOOPS}", _output("valgrind", "--version"), ids, _dumped()
    )


def _compiled(compiler: str) -> Path:
    subprocess.run([sys.executable, ROOT / "engine/optim/kernel.py", BUILD / "rules.h"], check=True)
    sources = [path for folder in FOLDERS for path in sorted((ROOT / "engine" / folder / "native").glob("*.cpp"))]
    sources = [path for path in sources if not WITH_PYTHON_OR_ROCKSDB.match(path.name)]

    def compile_one(source: Path) -> Path:
        result = BUILD / f"{source.stem}.o"
        loops = [*LOOPS.split(), "-DTIERBED_LOOPS=baseline_loops", '-DTIERBED_ISA="avx2"']
        flags = [*FLAGS.split(), *(loops if source.stem == "loops" else CORE.split())]
        command = [compiler, *flags, f"-I{ROOT / 'engine'}", f"-I{BUILD}", "-c", str(source), "-o", str(result)]
        subprocess.run(command, check=True)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, [*sources, Path(__file__).with_suffix(".cpp")]))
    program = BUILD / "instructions"
    subprocess.run([compiler, *map(str, objects), "-pthread", "-o", str(program)], check=True)
    return program


def _dumped() -> dict[str, dict[str, int]]:
    """The sums of callgrind's dumps, by workload and part, which name the files from here on."""
    counts: dict[str, dict[str, int]] = {}
    for number, dump in enumerate(sorted(BUILD.glob("callgrind.*"))):
        text = dump.read_text()
        named = re.search(r"^desc: Trigger: Client Request: (\S+) (.+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
        if named is None or total is None:  # the one at the end of the program
            continue
        parts = counts.setdefault(named[1], {})
        parts[named[2]] = parts.get(named[2], 0) + int(total[1])
        dump.rename(BUILD / f"{named[1]}.{named[2]}.{number}")
    return {work: dict(sorted(counts[work].items())) for work in sorted(counts)}


def _version_of(compiler: str) -> str:
    """As "GCC 12.2.0": without what a distribution adds to it."""
    macros = _output(compiler, "-dM", "-E", "-x", "c++", os.devnull)
    kind = "Clang" if "__clang_version__" in macros else "GCC"
    return f"{kind} {_output(compiler, '-dumpfullversion' if kind == 'GCC' else '-dumpversion')}"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _shown(counts: Counts) -> str:
    """Instructions an id."""
    lines = []
    for work, parts in counts.instructions.items():
        each = ", ".join(f"{part} {number / counts.ids[work]:.0f}" for part, number in parts.items())
        lines.append(f"{work:14}{sum(parts.values()) / counts.ids[work]:6.0f} instructions an id: {each}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write the counts as the baseline")
    arguments = parser.parse_args()
    if platform.machine() not in ("x86_64", "AMD64"):
        print("instructions: counted on x86-64 alone")
        return 0
    if shutil.which("valgrind") is None:
        print("instructions: there is no valgrind; `make install` brings it where the system has apt, else install it")
        return 1
    now = counted()
    print(_shown(now))
    if arguments.renew:
        BASELINE.write_text(json.dumps(asdict(now), indent=2) + "\n")
        return 0
    wrong, said = compare(Counts(**json.loads(BASELINE.read_text())), now)
    print(*said, sep="\n", end="\n" if said else "")
    if wrong:
        files = f"{BUILD.relative_to(ROOT)}/WORKLOAD.PART.NUMBER"
        print(*wrong, f"by function: callgrind_annotate --threshold=100 {files}; where it is meant: {RENEW}", sep="\n")
    else:
        print(f"instructions: no part of a workload takes {MAX_RISE:.0%} more than {BASELINE.name}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
