"""Measure publishes beside training, and processes that follow them.

    python benchmarks/serving_loop.py --folder FOLDER [--rows 10000000] [--operations publish memory]

One table of `--rows` rows (D=64, plain SGD, `host_mem`) is published as int8. Each operation prints its figures with
their bars. The exit status is 1 if a figure misses its bar. CPU time is of all threads of the publishing process, which
does nothing else. Written bytes are what the process passed to `write`. Readers are processes of their own.

- `publish`: a publish of 1 % of the rows, compared with one of all rows.
- `visible`: from the call of `graph.publish`, with 0.1 % changed rows, until another process has the version. That
  process calls `refresh` every 5 ms, and training goes on. `dd` writes as many bytes as the largest of these publishes.
- `lookups`: a process looks up 256 random ids at a time, and a thread in it calls `refresh` every second. First nobody
  publishes, then this process publishes 0.1 % of the rows every 3 seconds.
- `steps`: training steps of 1,024 ids from a power law with a dense network, while `graph.publish` runs every 10
  seconds, and without. The phases take turns; a phase ends once its publishes have ended.
- `written`: bytes that 1,000 publishes write, in a table of at most 200,000 rows. The optimum is the lowest that a base
  and cumulative deltas can reach: a cycle of n publishes writes all rows, and n deltas with all rows changed since.
- `memory`: the memory of 8 processes that serve the table, after each has looked up all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's waiting threads leave their cores to the publisher

import torch
from torch import Tensor, nn

import tierbed
from tierbed.serving import ServingFolder, Version, open_served
from tierbed.serving.row_file import count_row_bytes

DIM, PUT_ROWS, LEARNING_RATE = 64, 1 << 18, 0.01
VISIBLE_PUBLISHES, POLL_SECONDS = 30, 0.005
LOOKUP_IDS, LOOKUP_SECONDS, PUBLISH_EVERY = 256, 15.0, 3.0
STEP_IDS, PHASES, PHASE_SECONDS, PUBLISH_TIMES = 1024, 4, 20.0, (5.0, 15.0)
WRITTEN_ROWS, WRITTEN_PUBLISHES, WRITTEN_SHARES = 200_000, 1000, (0.0001, 0.01)
PROCESSES = 8
EXTRA_RECORD_BYTES, DELTA_MARK_BYTES, LINE_BYTES_PER_ROW = 8, 4, 4  # hash; mark in deltas; a line for 16 rows
MB = 1e6


class Trained(tierbed.Graph):
    """A graph that trains one embedding and a dense network of this width."""

    def __init__(self, num_rows: int, width: int = 256) -> None:
        super().__init__()
        store, relu = tierbed.make_host_mem_store_options(), nn.ReLU()
        self.rows = tierbed.MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, None, store)
        self.layers = nn.Sequential(nn.Linear(DIM, width), relu, nn.Linear(width, width), relu, nn.Linear(width, 1))
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=LEARNING_RATE))
        self.num_rows, self.random = num_rows, np.random.default_rng(0)
        self(torch.arange(2))  # now the rows have an optimizer
        for begin in range(0, num_rows, PUT_ROWS):
            self.put(torch.arange(begin, min(begin + PUT_ROWS, num_rows)))

    def build(self, ids: Tensor) -> Tensor:
        loss = self.layers(self.rows(ids)).square().mean()
        loss.backward()
        return loss

    def draw(self, share: float) -> Tensor:
        """Returns random distinct ids: this share of all."""
        count = max(10, round(self.num_rows * share))
        return torch.from_numpy(self.random.choice(self.num_rows, count, replace=False, shuffle=False))

    def put(self, ids: Tensor) -> None:
        self.rows.put(ids, torch.randn(len(ids), DIM))

    def publish_and_wait(self, folder: Path) -> Version:
        version = self.publish(folder).wait()
        assert version is not None
        return version


class Bench:
    """The folder, and the trained graph, which operations share."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        self.folder, self.served, self.num_rows, self.is_met = folder, folder / "served", num_rows, True
        self._graph: Trained | None = None

    @property
    def graph(self) -> Trained:
        if self._graph is None:
            self._graph = Trained(self.num_rows)
        return self._graph

    def ensure_published(self) -> Trained:
        if not self.served.exists():
            self.graph.publish_and_wait(self.served)
        return self.graph

    def report(self, text: str, value: float, bar: float, is_lowest: bool = False) -> None:
        is_met = value >= bar if is_lowest else value <= bar
        self.is_met &= is_met
        side, end = "least" if is_lowest else "most", "" if is_met else ", MISSED"
        print(f"{text}: {value:.3g}, bar at {side} {bar:.3g}{end}", flush=True)

    def start(self, child: str) -> Any:
        """Start a process that runs one of CHILDREN."""
        command = [sys.executable, __file__, "--child", child, "--folder", self.served, "--rows", str(self.num_rows)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: Any) -> Any:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a child ended with {process.wait()}")
    return json.loads(line)


def write_line(value: Any) -> None:
    print(json.dumps(value), flush=True)


def find_percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def read_written_bytes() -> int:
    """Returns how many bytes this process has passed to `write`."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def publish(bench: Bench) -> None:
    def measure() -> list[float]:
        begin = time.monotonic(), time.process_time(), read_written_bytes() / MB
        bench.graph.publish_and_wait(bench.served)
        end = time.monotonic(), time.process_time(), read_written_bytes() / MB
        return [after - before for after, before in zip(end, begin, strict=True)]

    alls, parts = [], []
    for _ in range(2):
        shutil.rmtree(bench.served, ignore_errors=True)
        alls.append(measure())
        bench.graph.put(bench.graph.draw(0.01))
        parts.append(measure())
    for number, unit in enumerate(("s", "s of CPU time", "MB")):
        whole, part = (min(run[number] for run in runs) for runs in (alls, parts))
        bench.report(f"publish of 1 % of the rows ({part:.3g} {unit}), of all ({whole:.3g})", part / whole, 0.05)


def measure_dd(folder: Path, size: int) -> float:
    """Returns the seconds that dd needs for this many bytes: the median of 5 runs."""
    seconds, file = [], folder / "dd"
    for _ in range(5):
        begin = time.monotonic()
        command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={size}", "iflag=count_bytes", "conv=fdatasync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        seconds.append(time.monotonic() - begin)
        file.unlink()
    return median(seconds)


def visible(bench: Bench) -> None:
    graph, begins, largest = bench.ensure_published(), {}, 0
    with bench.start("follow") as follower:
        read_line(follower)
        next_ids = graph.draw(0.001).chunk(10)
        for ids in next_ids:
            graph(ids)
        for _ in range(VISIBLE_PUBLISHES):
            next_ids, written, number = graph.draw(0.001).chunk(10), read_written_bytes(), 0
            begin = time.monotonic()
            handle = graph.publish(bench.served)
            while number < len(next_ids) or not handle.done:  # these rows change for the next publish
                graph(next_ids[number % len(next_ids)])
                number += 1
            version = handle.wait()
            assert version is not None
            begins[version.version], largest = begin, max(largest, read_written_bytes() - written)
        follower.stdin.close()
        seen = {int(version): seconds for version, seconds in read_line(follower).items()}
    seconds = [min(seen[later] for later in seen if later >= version) - begin for version, begin in begins.items()]
    dd, p99 = measure_dd(bench.folder, largest), find_percentile(seconds, 99)
    label = f"p50 {median(seconds):.3f} s; dd of {largest / MB:.1f} MB {dd:.3f} s"
    bench.report(f"publish of 0.1 % until visible ({label}), p99 in seconds", p99, 1.0 + 2.0 * dd)


def follow(folder: Path, num_rows: int) -> None:
    """The child of `visible`: refresh until the input ends. Prints when it saw each version."""
    with open_served(folder) as served:
        write_line("open")
        seen, has_ended = {}, False
        while not has_ended:
            has_ended = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])
            if served.refresh():
                seen[served.version] = time.monotonic()
    write_line(seen)


def lookups(bench: Bench) -> None:
    graph = bench.ensure_published()
    with bench.start("look_up") as reader:
        quiet = read_line(reader)
        while not select.select([reader.stdout], [], [], PUBLISH_EVERY)[0]:
            graph.put(graph.draw(0.001))
            graph.publish_and_wait(bench.served)
        busy = read_line(reader)
    print(f"lookups of {LOOKUP_IDS} ids without publishes: p50 {quiet['p50']:.1f}, p99 {quiet['p99']:.1f} us")
    label = f"p50 {busy['p50']:.1f} us, {busy['refreshes']} refreshes"
    bench.report(f"lookups beside publishes ({label}), p99 of p50", busy["p99"] / busy["p50"], 5.0)


def look_up(folder: Path, num_rows: int) -> None:
    """The child of `lookups`: print the times of lookups in two phases."""
    torch.set_num_threads(1)
    pool = [torch.randint(num_rows, (LOOKUP_IDS,)) for _ in range(4096)]
    with open_served(folder) as served:
        ended = Event()

        def refresh() -> None:
            while not ended.wait(1.0):
                served.refresh()

        def measure(seconds: float) -> dict[str, float]:
            times, refreshes, end = [], served.metrics()["refreshes"], time.monotonic() + seconds
            while time.monotonic() < end:
                ids = pool[len(times) % len(pool)]
                begin = time.perf_counter_ns()
                served["rows"](ids)
                times.append((time.perf_counter_ns() - begin) / 1e3)
            refreshes = served.metrics()["refreshes"] - refreshes
            return {"p50": median(times), "p99": find_percentile(times, 99), "refreshes": refreshes}

        touch_all(served, num_rows)
        thread = Thread(target=refresh)
        thread.start()
        for _ in range(2):
            write_line(measure(LOOKUP_SECONDS))
        ended.set()
        thread.join()


def touch_all(served: Any, num_rows: int) -> None:
    for begin in range(0, num_rows, 4096):
        served["rows"](torch.arange(begin, min(begin + 4096, num_rows)))


def steps(bench: Bench) -> None:
    graph = bench.ensure_published()

    def train(seconds: float, times: tuple[float, ...] = ()) -> tuple[float, float]:
        """Train, and publish at these times. Returns the steps per second, and all CPU time per step."""
        begin, cpu, number, handles = time.monotonic(), time.process_time(), 0, []
        while (elapsed := time.monotonic() - begin) < seconds or not all(handle.done for handle in handles):
            if len(handles) < len(times) and elapsed >= times[len(handles)]:
                handles.append(graph.publish(bench.served))
            graph((torch.rand(STEP_IDS, dtype=torch.float64) ** 4 * graph.num_rows).long())
            number += 1
        for handle in handles:
            handle.wait()
        return number / (time.monotonic() - begin), (time.process_time() - cpu) / number

    rates = []
    for _ in range(PHASES):
        without = train(PHASE_SECONDS)
        graph.publish_and_wait(bench.served)
        train(PUBLISH_TIMES[0])  # so each publish has the changes of 10 seconds
        rates.append((without, train(PHASE_SECONDS, PUBLISH_TIMES)))
    without, beside = np.array(rates).transpose(1, 2, 0)  # each [steps per second and CPU time, phases]
    ratios = ", ".join(f"{ratio:.3f}" for ratio in beside[0] / without[0])
    label = f"{without[0].mean():.1f} steps/s without; of pairs of phases {ratios}; CPU time of a step "
    label += f"{beside[1].sum() / without[1].sum():.3f}"
    ratio = beside[0].sum() / without[0].sum()
    bench.report(f"steps beside publishes ({label}), of steps without", ratio, 0.95, is_lowest=True)


def compute_optimum(num_rows: int, count: int) -> float:
    """Returns the bytes that publishes of `count` random rows write at least, on average."""
    row_bytes = count_row_bytes("int8", DIM) + EXTRA_RECORD_BYTES + LINE_BYTES_PER_ROW
    publishes = np.arange(1, 100_000)
    deltas = num_rows * (1.0 - (1.0 - count / num_rows) ** publishes) * (row_bytes + DELTA_MARK_BYTES)
    return float(((num_rows * row_bytes + deltas.cumsum()) / publishes).min())


def written(bench: Bench) -> None:
    graph, folder = Trained(min(bench.num_rows, WRITTEN_ROWS), width=1), bench.folder / "written"
    for share in WRITTEN_SHARES:
        shutil.rmtree(folder, ignore_errors=True)
        graph.publish_and_wait(folder)
        before, begin, count = read_written_bytes(), time.monotonic(), len(graph.draw(share))
        for _ in range(WRITTEN_PUBLISHES):
            graph.put(graph.draw(share))
            graph.publish_and_wait(folder)
        size = (read_written_bytes() - before) / WRITTEN_PUBLISHES
        seconds = (time.monotonic() - begin) / WRITTEN_PUBLISHES
        optimum, changed = compute_optimum(graph.num_rows, count), count * count_row_bytes("int8", DIM)
        label = (
            f"{size / changed:.1f} bytes per changed byte, at best {optimum / changed:.1f}, {seconds * 1e3:.0f} ms each"
        )
        bench.report(f"{WRITTEN_PUBLISHES:,} publishes of {share:.2%} ({label}), of the best", size / optimum, 1.2)
    shutil.rmtree(folder)
    graph.rows.close()


def memory(bench: Bench) -> None:
    bench.ensure_published()
    with ExitStack() as stack:
        processes = [stack.enter_context(bench.start("serve")) for _ in range(PROCESSES)]
        growths = [read_line(process) for process in processes]
        shared = sum(read_mapped_bytes(process.pid, bench.served) for process in processes)
        for process in processes:
            process.stdin.close()
    folder = ServingFolder(bench.served)
    size = sum(file.bytes for file in folder.read_version(folder.read_current().version).files)
    bench.report(f"mapped files of {PROCESSES} processes ({shared / MB:.1f} MB), of their size", shared / size, 1.1)
    bench.report(
        f"growth of a process's own memory (median {median(growths) / MB:.1f} MB), MB", max(growths) / MB, 20.0
    )


def serve(folder: Path, num_rows: int) -> None:
    """The child of `memory`: open the folder, touch all rows, print the growth of anonymous memory, and wait."""
    torch.set_num_threads(1)
    torch.arange(2)
    before = read_anonymous_bytes()
    with open_served(folder) as served:
        touch_all(served, num_rows)
        write_line(read_anonymous_bytes() - before)
        sys.stdin.read()


def read_anonymous_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Anonymous:")).split()[1]) * 1024


def read_mapped_bytes(pid: int, folder: Path) -> int:
    """Returns a process's share (PSS) of mapped files in a folder."""
    total, is_inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):  # begins a mapping
            is_inside = str(folder) in line
        elif is_inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


OPERATIONS: dict[str, Callable[[Bench], None]] = {
    operation.__name__: operation for operation in (publish, visible, lookups, steps, memory, written)
}
CHILDREN: dict[str, Callable[[Path, int], None]] = {child.__name__: child for child in (follow, look_up, serve)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write the files, about 400 bytes a row")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        CHILDREN[arguments.child](arguments.folder, arguments.rows)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), arguments.rows)
        for operation in arguments.operations:
            begin = time.monotonic()
            OPERATIONS[operation](bench)
            print(f"    ({operation} took {time.monotonic() - begin:.0f} s)", flush=True)
    return not bench.is_met


if __name__ == "__main__":
    sys.exit(main())
