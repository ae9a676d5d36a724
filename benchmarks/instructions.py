"""Count the native core's instructions in fixed workloads and compare them with a committed baseline.

    python benchmarks/instructions.py [--renew]      exits with 1 if a part takes over 3 % more than the baseline

Runs `instructions.cpp` under callgrind. Other load on the machine does not affect the counts.
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
# the core's flags in CMakeLists.txt
FLAGS = "-std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno"
CORE = "-march=x86-64-v2 -mtune=generic"
LOOPS = "-march=x86-64-v3 -mprfchw -mtune=generic --param=max-completely-peel-times=4"
FOLDERS = ("ops", "store", "cache")
WITH_PYTHON_OR_ROCKSDB = re.compile(r"(bind|rocksdb)_")


@dataclass(frozen=True)
class Counts:
    """ids: number of ids counted, by workload. instructions: by workload, then by part of a step."""

    compiler: str
    flags: str
    valgrind: str
    ids: dict[str, int]
    instructions: dict[str, dict[str, int]]


def compare(baseline: Counts, now: Counts) -> tuple[list[str], list[str]]:
    """Compare counts with the baseline. Returns errors, and messages about parts that got cheaper."""
    if (baseline.compiler, baseline.flags) != (now.compiler, now.flags):
        return [
            f"the baseline was counted with {baseline.compiler} {baseline.flags}, this run with {now.compiler} "
            f"{now.flags}: they cannot be compared. Renew the baseline without your change first: {RENEW}"
        ], []
    errors, messages = [], []
    for work, part in sorted(set(_parts(baseline)) | set(_parts(now))):
        before, after = (counts.instructions.get(work, {}).get(part) for counts in (baseline, now))
        if before is None or after is None:
            where = "the baseline" if before is None else "this count"
            errors.append(f"{work} has no {part} in {where}; if this is intended: {RENEW}")
        elif after > before * (1 + MAX_RISE):
            errors.append(f"{work}, {part}: {before:,} instructions before, {after:,} now, {after / before - 1:+.1%}")
        elif after < before * (1 - MAX_RISE):
            messages.append(f"{work}, {part}: {after / before - 1:+.1%}; the baseline can be renewed: {RENEW}")
    return errors, messages


def _parts(counts: Counts) -> Iterator[tuple[str, str]]:
    return ((work, part) for work, parts in counts.instructions.items() for part in parts)


def count() -> Counts:
    """Compile the workloads, run them under callgrind and return the counts."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    compiler = os.environ.get("CXX", "c++")
    program = _compile(compiler)
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=callgrind", str(program)]
    environment = os.environ | {"TIERBED_HASH_SEED": "1"}  # counts depend on the rows' slots
    run = subprocess.run(command, cwd=BUILD, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    ids = {work: int(number) for work, number in (line.split() for line in run.stdout.splitlines())}
    return Counts(
        _read_version(compiler), f"{FLAGS}, {CORE}, loops {LOOPS}", _output("valgrind", "--version"), ids, _read_dumps()
    )


def _compile(compiler: str) -> Path:
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


def _read_dumps() -> dict[str, dict[str, int]]:
    """Sum callgrind's dumps by workload and part, and rename each file to WORKLOAD.PART.NUMBER."""
    counts: dict[str, dict[str, int]] = {}
    for number, dump in enumerate(sorted(BUILD.glob("callgrind.*"))):
        text = dump.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (\S+) (.+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
        if name is None or total is None:  # the dump at the end of the program
            continue
        parts = counts.setdefault(name[1], {})
        parts[name[2]] = parts.get(name[2], 0) + int(total[1])
        dump.rename(BUILD / f"{name[1]}.{name[2]}.{number}")
    return {work: dict(sorted(counts[work].items())) for work in sorted(counts)}


def _read_version(compiler: str) -> str:
    """Return for example "GCC 12.2.0", without the distribution's suffix."""
    macros = _output(compiler, "-dM", "-E", "-x", "c++", os.devnull)
    kind = "Clang" if "__clang_version__" in macros else "GCC"
    return f"{kind} {_output(compiler, '-dumpfullversion' if kind == 'GCC' else '-dumpversion')}"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _table(counts: Counts) -> str:
    """Format the instructions per id."""
    lines = []
    for work, parts in counts.instructions.items():
        each = ", ".join(f"{part} {number / counts.ids[work]:.0f}" for part, number in parts.items())
        lines.append(f"{work:14}{sum(parts.values()) / counts.ids[work]:6.0f} instructions per id: {each}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write the counts to the baseline file")
    arguments = parser.parse_args()
    if platform.machine() not in ("x86_64", "AMD64"):
        print("instructions: skipped, counts are for x86-64 only")
        return 0
    if shutil.which("valgrind") is None:
        print("instructions: valgrind is missing. `make install` installs it by apt; without apt, install it yourself")
        return 1
    now = count()
    print(_table(now))
    if arguments.renew:
        BASELINE.write_text(json.dumps(asdict(now), indent=2) + "\n")
        return 0
    errors, messages = compare(Counts(**json.loads(BASELINE.read_text())), now)
    print(*messages, sep="\n", end="\n" if messages else "")
    if errors:
        files = f"{BUILD.relative_to(ROOT)}/WORKLOAD.PART.NUMBER"
        print(*errors, f"by function: callgrind_annotate --threshold=100 {files}; if intended: {RENEW}", sep="\n")
    else:
        print(f"instructions: no part takes over {MAX_RISE:.0%} more than in {BASELINE.name}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
