"""Measure saves, loads and restarts of `cached_ssd` over the number of rows, in a limited memory.

    python benchmarks/scale.py --folder FOLDER [--rows 10000000 40000000] [--memory-mb 2048] [--index-mb 256]
        [--operations fill open] [--plot scale.svg]

One embedding (16 columns, Adagrad, a cache of 256 MiB) grows to each number of rows. Each operation runs in a process
of its own. `--memory-mb` limits the process's memory, including its page cache, in a new memory cgroup; 0 sets no
limit. An operation's seconds do not include the process's start. `anonymous` is the largest anonymous memory while
the process lives. `read` and `written` count bytes on the disk. `reads_of_disk` is the rate at which training reads
rows, divided by the rate of the disk's random reads. What an operation leaves is removed before the next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from disk import floor
from disk.memory_limit import memory_limit
from torch import Tensor, nn

import tierbed
import tierbed.cli
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files.reader import MAX_CHAIN, list_snapshots

DIM, BATCH, STEPS, TRAIN_STEPS, CACHE_MB = 16, 8192, 50, 1000, 256
PUT_ROWS = 1 << 18
MIB = float(1 << 20)
COMMON = "seconds", "anonymous", "read", "written"  # the figures of every operation


class Trained(tierbed.Graph):
    """A graph that trains one embedding in a folder."""

    def __init__(self, folder: Path, rows: int, index_mb: int | None = None) -> None:
        super().__init__()
        options = tierbed.make_cached_ssd_store_options(CACHE_MB, str(folder / "store"), index_mb=index_mb)
        self.rows = tierbed.MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, None, options)
        self.layer = nn.Linear(DIM, 1)
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))
        self.num_rows, self.random = rows, torch.Generator().manual_seed(int(time.time()))

    def build(self, ids: Tensor) -> Tensor:
        loss = self.layer(self.rows(ids)).square().mean()
        loss.backward()
        return loss

    def train(self, steps: int = STEPS) -> None:
        """Train with ids from a power law."""
        for _ in range(steps):
            self(self.draw_ids())

    def draw_ids(self) -> Tensor:
        return (torch.rand(BATCH, generator=self.random, dtype=torch.float64) ** 4 * self.num_rows).long()


def fill(graph: Trained, folder: Path) -> Callable[[], object]:
    graph(torch.arange(BATCH))

    def put() -> None:
        for begin in range(0, graph.num_rows, PUT_ROWS):
            ids = torch.arange(begin, min(graph.num_rows, begin + PUT_ROWS))
            graph.rows.put(ids, torch.zeros(len(ids), DIM))

    return put


def save(graph: Trained, folder: Path, kind: str) -> Callable[[], object]:
    graph.train()
    return lambda: graph.rows.save_snapshot(f"{kind}-{time.time_ns()}", kind=kind)


def save_again(graph: Trained, folder: Path) -> Callable[[], object]:
    save(graph, folder, "incremental")()
    return save(graph, folder, "incremental")


def find_last_snapshot(graph: Trained) -> str:
    graph.rows.size()  # opens the store
    name = graph.rows.last_snapshot
    assert name is not None
    return name


def verify(graph: Trained, folder: Path) -> Callable[[], object]:
    return Snapshot.open(folder / "store" / "rows" / "snapshots" / find_last_snapshot(graph)).chain[0].verify


def load(graph: Trained, folder: Path) -> Callable[[], object]:
    name = find_last_snapshot(graph)
    return lambda: graph.rows.load_snapshot(name)


def load_increment(graph: Trained, folder: Path) -> Callable[[], object]:
    """An increment of 0.1 % of the rows, onto its parent."""
    graph.rows.size()  # opens the store
    graph.rows.save_snapshot(parent := f"parent-{time.time_ns()}", kind="incremental")
    count = max(1, graph.num_rows // 1000)
    graph.rows.put(torch.arange(count), torch.ones(count, DIM))
    graph.rows.save_snapshot(f"small-{time.time_ns()}", kind="incremental")
    name = find_last_snapshot(graph)
    graph.rows.load_snapshot(parent)
    return lambda: graph.rows.load_snapshot(name)


def load_chain(graph: Trained, folder: Path) -> Callable[[], object]:
    """A full snapshot and increments, each of 1 % of the rows, as long as a chain may be."""
    graph.rows.save_snapshot(f"base-{time.time_ns()}")
    for _ in range(MAX_CHAIN - 1):
        graph.train(max(1, graph.num_rows // 100 // BATCH))
        graph.rows.save_snapshot(f"link-{time.time_ns()}", kind="incremental")
    return load(graph, folder)


def save_beside_steps(graph: Trained, folder: Path) -> Callable[[], object]:
    """An increment of 1 % of the rows, in the background. Steps go on until the save has ended."""
    step_seconds = time_steps(graph, 50, lambda: False)
    graph.rows.save_snapshot(f"parent-{time.time_ns()}", kind="checkpoint")
    graph.train(max(1, graph.num_rows // 100 // BATCH))

    def run() -> dict[str, float]:
        begin = time.perf_counter()
        save = graph.rows.save_snapshot(f"beside-{time.time_ns()}", kind="incremental", background=True)
        call_seconds = time.perf_counter() - begin
        assert save is not None
        longest = max(time_steps(graph, 10_000, lambda: save.done))
        before = {"step": sorted(step_seconds)[25], "longest_step_before": max(step_seconds)}
        return {"call": call_seconds, "longest_step": longest, **before}

    return run


def time_steps(graph: Trained, count: int, is_done: Callable[[], bool]) -> list[float]:
    """Return the seconds of each of `count` steps, or of the steps until `is_done()`."""
    seconds = []
    while len(seconds) < count and not (seconds and is_done()):
        begin = time.perf_counter()
        graph.train(1)
        seconds.append(time.perf_counter() - begin)
    return seconds


def save_graph(graph: Trained, folder: Path, kind: str | None, background: bool = False) -> Callable[[], object]:
    graph.train()

    def run() -> dict[str, float]:
        begin = time.perf_counter()
        save = graph.save(folder / "graph", overwrite=True, kind=kind, background=background)
        call_seconds = time.perf_counter() - begin
        if save is not None:
            save.wait()
        return {"call": call_seconds}

    return run


def train(graph: Trained, folder: Path) -> Callable[[], object]:
    """Train with `graph.run`. Compares the rows that it reads from the disk with the disk's random reads."""
    graph.train()

    def run() -> dict[str, float]:
        before, begin = graph.rows.metrics()["ssd"]["hits"], time.perf_counter()
        for _ in graph.run(graph.draw_ids() for _ in range(TRAIN_STEPS)):
            pass
        seconds = time.perf_counter() - begin
        reads = graph.rows.metrics()["ssd"]["hits"] - before
        disk = floor.measure(list((folder / "store").rglob("*.sst")), 2.0)
        return {"seconds": seconds, "reads_of_disk": reads / seconds / disk.reads_per_second}

    return run


def run_command(words: str) -> Callable[[Trained, Path], Callable[[], object]]:
    """Return an operation that runs `tierbed snapshot`. STORE and FILE in `words` become paths, LAST a name."""

    def prepare(graph: Trained, folder: Path) -> Callable[[], object]:
        store = folder / "store" / "rows"
        last = list_snapshots(store / "snapshots").snapshots[-1].name
        values = {"STORE": str(store), "LAST": last, "FILE": str(folder / "rows.parquet")}
        command = ["snapshot", *(values.get(word, word) for word in words.split())]

        def run() -> None:
            try:
                tierbed.cli.main(command)
            except SystemExit as end:
                if end.code:
                    raise

        return run

    return prepare


def open_rows(graph: Trained, folder: Path) -> Callable[[], object]:
    return graph.rows.size


OPERATIONS: dict[str, tuple[Callable[[Trained, Path], Callable[[], object]], bool]] = {  # True: the process is killed
    "fill": (fill, False),
    "checkpoint": (lambda graph, folder: save(graph, folder, "checkpoint"), False),
    "open": (open_rows, False),
    "first incremental": (lambda graph, folder: save(graph, folder, "incremental"), False),
    "later incremental": (save_again, False),
    "verify parent": (verify, False),
    "checkpoint, then a kill": (lambda graph, folder: save(graph, folder, "checkpoint"), True),
    "open after the kill": (open_rows, False),
    "full": (lambda graph, folder: save(graph, folder, "full"), False),
    "load full": (load, False),
    "graph.save, full": (lambda graph, folder: save_graph(graph, folder, "full"), False),
    "graph.save": (lambda graph, folder: save_graph(graph, folder, None), False),
    "graph.save in background": (lambda graph, folder: save_graph(graph, folder, None, background=True), False),
    "incremental beside steps": (save_beside_steps, False),
    "load 0.1 % onto parent": (load_increment, False),
    "merge": (run_command("merge STORE LAST merged"), False),
    "diff": (run_command("diff STORE LAST merged"), False),
    "export": (run_command("export STORE LAST FILE"), False),
    "prune": (run_command("prune STORE --keep-last 1"), False),
    "import": (run_command("import STORE imported FILE"), False),
    "inspect": (run_command("inspect STORE imported"), False),
    "train": (train, False),
    "load chain of 100": (load_chain, False),
}


def read_anonymous_memory() -> int:
    """Return this process's anonymous memory in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def read_disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from the disk, and the bytes that it has written."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def run_child(operation: str, folder: Path, rows: int, index_mb: int | None) -> None:
    """Run an operation in this process, and print what it took as JSON."""
    peak, ended = [0], Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], read_anonymous_memory())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        prepare, is_killed = OPERATIONS[operation]
        graph = Trained(folder, rows, index_mb)
        call = prepare(graph, folder)
        before, begin = read_disk_bytes(), time.perf_counter()
        others = call()
        seconds, after = time.perf_counter() - begin, read_disk_bytes()
    finally:
        ended.set()
        watcher.join()
    figures = {"seconds": seconds, "anonymous": peak[0], "read": after[0] - before[0], "written": after[1] - before[1]}
    print(json.dumps(figures | (others if isinstance(others, dict) else {})), flush=True)
    if is_killed:
        graph.train(1)
        os.kill(os.getpid(), signal.SIGKILL)
    graph.rows.close()


def measure(operation: str, folder: Path, rows: int, memory_mb: int, index_mb: int | None) -> dict[str, Any]:
    """Run an operation in a process of its own. Returns its figures, or an empty dict if it failed."""
    command = [sys.executable, __file__, "--child", operation, "--folder", str(folder), "--rows", str(rows)]
    command += [] if index_mb is None else ["--index-mb", str(index_mb)]
    with memory_limit(memory_mb << 20 or None) as limit:
        child = subprocess.run(command, preexec_fn=limit, stdout=subprocess.PIPE, text=True)
    line = child.stdout.strip().rpartition("\n")[2]
    return dict(json.loads(line)) if line.startswith("{") else {}


def plot(results: dict[str, dict[int, dict[str, Any]]], file: Path) -> None:
    """Draw each operation's seconds over the number of rows."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 6))
    for operation, by_rows in results.items():
        axes.plot(list(by_rows), [figures["seconds"] for figures in by_rows.values()], marker="o", label=operation)
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="seconds")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000_000, 40_000_000])
    parser.add_argument("--memory-mb", type=int, default=2048)
    parser.add_argument("--index-mb", type=int)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", choices=OPERATIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child, arguments.folder, arguments.rows[0], arguments.index_mb)
        return
    results: dict[str, dict[int, dict[str, Any]]] = {}
    print(f"{'operation':26}{'rows':>12}{'seconds':>10}{'anonymous MiB':>16}{'read MiB':>10}{'written MiB':>13}")
    for rows in arguments.rows:
        folder = arguments.folder / f"rows-{rows}"
        shutil.rmtree(folder, ignore_errors=True)
        for operation in arguments.operations:
            if figures := measure(operation, folder, rows, arguments.memory_mb, arguments.index_mb):
                results.setdefault(operation, {})[rows] = figures
                sizes = [figures[name] / MIB for name in COMMON[1:]]
                line = f"{figures['seconds']:10.2f}{sizes[0]:16.0f}{sizes[1]:10.0f}{sizes[2]:13.0f}"
                others = [f"{name} {value:.3f}" for name, value in figures.items() if name not in COMMON]
                print(f"{operation:26}{rows:12,}{line}  {', '.join(others)}", flush=True)
            else:
                print(f"{operation:26}{rows:12,}    failed")
        shutil.rmtree(folder)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
