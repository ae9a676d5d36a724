"""Time `graph.save` of one embedding with 1,000 rows, and of two that are trained together.

    python benchmarks/small_save.py [--against CHECKOUT] [--folder FOLDER] [--turns N]

Each figure is the median over turns, in milliseconds. In a turn, each side trains every row once, then saves under a
new name; only the save is timed. A save waits for the disk under `--folder`, so choose a folder in memory to time only
tierbed's code. `--against` names another checkout that takes turns with this one in its own .venv.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import tierbed

ROWS, DIM, WARM_UP = 1000, 16, 3


class TrainedTogether(tierbed.Graph):
    """A graph that trains one or more embeddings."""

    def __init__(self, embeddings: int, folder: Path) -> None:
        super().__init__()
        store = tierbed.make_host_mem_store_options(persistent_path=str(folder))
        self.embeddings = nn.ModuleList(
            tierbed.MultiTableEmbedding(f"rows-{number}", DIM, torch.float32, torch.int64, None, store)
            for number in range(embeddings)
        )
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        loss = torch.stack([embedding(ids).square().mean() for embedding in self.embeddings]).sum()
        loss.backward()
        return loss

    def close(self) -> None:
        for embedding in self.embeddings:
            embedding.close()


def time_saves(embeddings: int, folder: Path) -> Iterator[float]:
    """Yield the seconds of each save. A step runs before each save; the latest two snapshots are kept."""
    torch.set_num_threads(1)
    ids = torch.arange(ROWS)
    with closing(TrainedTogether(embeddings, folder)) as graph:
        for number in count():
            graph(ids)
            checkpoint = folder / f"save-{number}"
            begin = time.perf_counter()
            graph.save(checkpoint)
            yield time.perf_counter() - begin
            graph.prune_snapshots(keep_last=2)
            shutil.rmtree(checkpoint)


class Side:
    """A process that saves once for each input line and prints the seconds."""

    def __init__(self, python: Path, embeddings: int, folder: Path) -> None:
        command = [python, "-P", __file__, "--serve", str(embeddings), "--folder", folder]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []

    def turn(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        self.seconds.append(float(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()

    def ms(self) -> float:
        return 1e3 * median(self.seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with closing(time_saves(options.serve, options.folder)) as seconds:
            for _ in sys.stdin:
                print(next(seconds), flush=True)
        return
    pythons = {"this checkout": Path(sys.executable)}
    if options.against is not None:
        pythons["the other"] = options.against.absolute() / ".venv/bin/python"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sides = {
            (embeddings, name): Side(python, embeddings, Path(folder, f"{name} {embeddings}"))
            for embeddings in (1, 2)
            for name, python in pythons.items()
        }
        for number in range(WARM_UP + options.turns):
            for side in list(sides.values())[:: 1 if number % 2 else -1]:
                side.turn()
        for side in sides.values():
            side.close()
    for embeddings, kind in ((1, "a lone embedding"), (2, "two trained together")):
        kind_sides = {name: sides[embeddings, name] for name in pythons}
        times = ", ".join(f"{name} {side.ms():.2f} ms" for name, side in kind_sides.items())
        if options.against is None:
            print(f"{kind}: {times}")
            continue
        own, other = (side.seconds[WARM_UP:] for side in kind_sides.values())
        print(f"{kind}: {times}, {median(b / a for a, b in zip(own, other, strict=True)):.2f}x as fast")


if __name__ == "__main__":
    main()
