"""Kill training runs on MovieLens, resume each on another store, and check that the losses do not change.

    python examples/killed.py --data ml-100k --plot killed.svg

`kill -9` ends each process at a random moment. The next process resumes from the last checkpoint. Some steps run twice.
All losses must equal the losses of a reference run bit for bit. The reference run is never killed, and stores its rows
in device memory. Without --data, the runs train on a synthetic click log. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from movielens import STORES, DeepFM, TrainGraph, batches, make_embedding
from movielens_data import read_log, split
from movielens_synthetic import synthetic_log

BATCH, EVERY, SMOOTH = 256, 40, 20  # ratings per step, steps between checkpoints, steps averaged per plotted point
Losses = dict[int, float]  # {step: loss}
COLORS = {"device": "tab:blue", "host": "tab:orange", "cached_host": "tab:green", "ssd": "tab:red"}


def train(args: argparse.Namespace, folder: Path) -> None:
    """Train from the last checkpoint in `folder`. Prints each step's number and loss."""
    log = read_log(args.data) if args.data else synthetic_log()
    rows = split(len(log.labels))[0]
    rows = torch.cat([rows] * (1 + args.steps * BATCH // len(rows)))
    torch.manual_seed(0)
    with make_embedding(STORES[args.store](str(folder / "store"), 0.25), 16) as embedding:
        graph = TrainGraph(embedding, DeepFM(16), 0.05)
        if (folder / "checkpoint").exists():
            graph.load(folder / "checkpoint")
        done = embedding.metrics()["table"]["step"]
        loader = batches(log, rows[done * BATCH : args.steps * BATCH], BATCH)
        for step, loss in enumerate(graph.run(loader), done + 1):
            print(step, loss.item().hex(), flush=True)
            if step % EVERY == 0:
                graph.save(folder / "checkpoint", overwrite=True)


def losses(args: argparse.Namespace, store: str, folder: Path, steps: int | None = None) -> Losses:
    """Train in a process on this store, kill it after `steps` steps, and return its losses."""
    command = [sys.executable, __file__, "--store", store, "--steps", str(args.steps), "--folder", str(folder)]
    command += ["--data", str(args.data)] if args.data else []
    seen: Losses = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            number, loss = line.split()
            seen[int(number)] = float.fromhex(loss)
            if len(seen) == steps:
                process.kill()
                break
    if steps != len(seen) and process.returncode:
        raise SystemExit(f"training on {store} ended with {process.returncode}")
    return seen


def lives(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Losses]]:
    """Yield (store, losses) of one process after another, until all steps are done. The last process is not killed."""
    rng, last = random.Random(args.seed), 0
    for store in cycle(("ssd", "host", "cached_host", "device")):
        seen = losses(args, store, folder, rng.randrange(EVERY, args.steps // 3))
        yield store, seen
        last = max(last, *seen)
        if last == args.steps:
            return


def plot(straight: Losses, killed: list[tuple[str, Losses]], path: Path) -> None:
    """Draw both runs' losses on top of each other, and below them a line for each process."""
    from matplotlib.figure import Figure

    figure = Figure((8, 3.6), layout="constrained")
    loss, line = figure.subplots(2, sharex=True, height_ratios=(3, 1.4))
    loss.plot(*_smooth(straight), color="0.82", linewidth=6, label="never killed, in device memory")
    curves, all_losses = {}, Losses()
    for number, (store, seen) in enumerate(killed):
        all_losses |= seen
        first, last = min(seen), max(seen)
        (curves[store],) = loss.plot(*_smooth(all_losses, first), color=COLORS[store], linewidth=1.2)
        line.plot([first, last], [number, number], color=COLORS[store], linewidth=3)
        if last < max(straight):
            line.plot(last, number, "x", color="black", markersize=5)
    for store, curve in curves.items():
        curve.set_label(f"a process on {store}")
    loss.legend(frameon=False, ncols=2)
    loss.set(ylabel=f"loss, mean of {SMOOTH} steps")
    line.set(xlabel="step", ylabel="processes,\nx: kill -9", yticks=[])
    line.invert_yaxis()
    for axes in (loss, line):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _smooth(seen: Losses, first: int = 1) -> tuple[list[int], list[float]]:
    """Return a curve's (steps, losses). Each loss is a mean over SMOOTH steps. The curve starts near step `first`."""
    ends = [end for end in seen if end % SMOOTH == 0 and end >= first - 1]
    return ends, [sum(seen[step] for step in range(end - SMOOTH + 1, end + 1)) / SMOOTH for end in ends]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with u.data, ratings.dat or one *.inter file")
    parser.add_argument("--steps", type=int, default=2000, help="at least 150")
    parser.add_argument("--seed", type=int, default=0, help="determines when processes are killed")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # set for the processes that train
    parser.add_argument("--store", choices=STORES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 150:
        parser.error(f"--steps is {args.steps}: give at least 150, so that processes can be killed")
    if (args.folder is None) != (args.store is None):
        parser.error("--folder and --store are internal; leave them out")
    if args.folder:
        train(args, args.folder)
        return
    with tempfile.TemporaryDirectory(prefix="killed-") as temporary:
        straight = losses(args, "device", Path(temporary, "straight"))
        killed = []
        for store, seen in lives(args, Path(temporary, "killed")):
            killed.append((store, seen))
            print(f"{store:11} steps {min(seen):5} to {max(seen):5}" + ", killed" * (max(seen) < args.steps))
            if differ := [step for step, loss in seen.items() if loss != straight[step]]:
                sys.exit(f"error: the loss of step {differ[0]} on {store} differs from the run that was not killed")
    print(f"{sum(len(seen) for _, seen in killed)} losses of {len(killed)} processes equal those of a run never killed")
    if args.plot:
        plot(straight, killed, args.plot)


if __name__ == "__main__":
    main()
