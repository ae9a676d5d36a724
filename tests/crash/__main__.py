"""`make crash N=200`: rounds of the crash harness, and a summary. A failing round is repeated alone by its seed."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from support import warm

from .model_rounds import ModelRankRounds, ModelRounds
from .plan import draw_model_round, draw_rank_round, draw_round, draw_serving_round
from .rounds import RankRounds, Result, Rounds
from .serving_rounds import ServingRounds

console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="rounds")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next one's is one more")
    parser.add_argument("--ranks", type=int, help="rounds of that many ranks")
    parser.add_argument("--model", action="store_true", help="rounds of embeddings that are trained together")
    parser.add_argument("--serving", action="store_true", help="rounds of a publisher and a reader")
    parser.add_argument("--folder", type=Path, help="where stores are made; a temporary folder by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder, ranks = Path(tempfile.mkdtemp(prefix="crash-", dir=arguments.folder)), arguments.ranks
    rounds: Rounds
    draw: Callable[[int], Any]
    if arguments.serving:
        rounds, draw = ServingRounds(folder), draw_serving_round
    elif arguments.model:
        rounds, draw = ModelRounds(folder) if ranks is None else ModelRankRounds(folder, ranks), draw_model_round
    else:
        rounds, draw = (Rounds if ranks is None else RankRounds)(folder), draw_round
    results, failed = list[Result](), list[int]()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    with warm.running_server(), contextlib.suppress(KeyboardInterrupt):  # the summary is of the rounds so far
        for seed in track(range(arguments.seed, arguments.seed + arguments.n), "rounds", console=console):
            plan: Any = draw(seed) if draw is not draw_round or ranks is None else draw_rank_round(seed, ranks)
            try:
                results.append(rounds.run(plan))
            except Exception as error:
                failed.append(seed)
                console.print(f"[red]seed {seed} failed[/]: {type(error).__name__}: {error}, in {folder}/round-{seed}")
                for part in (*plan.sessions, replace(plan, sessions=[])):
                    console.print(f"  {part}", markup=False)
            else:
                shutil.rmtree(folder / f"round-{seed}")
    summary(results, failed)
    if failed:
        sys.exit(1)
    shutil.rmtree(folder)


def summary(results: list[Result], failed: list[int]) -> None:
    kills, saves = sum((r.kills for r in results), Counter()), sum((r.saves for r in results), Counter())
    ways = sorted({way for _, way in kills})
    table = Table("killed in", *(Column(way, justify="right") for way in ways), box=None)
    for operation in sorted({operation for operation, _ in kills}):
        table.add_row(operation, *(str(kills[operation, way] or "") for way in ways))
    console.print(table)
    figures = {
        "rounds": len(results) + len(failed),
        "failed": ", ".join(f"seed {seed}" for seed in failed) or 0,
        "kills": kills.total(),
        "operations that returned": ", ".join(f"{count} {kind}" for kind, count in sorted(saves.items())),
        "snapshots or versions compared": sum(r.snapshots_checked for r in results),
        "answers that readers compared": sum(r.answers for r in results),
        "restarts that went back to a snapshot": sum(r.recovered for r in results),
        "changes lost in power cuts": sum(r.lost_in_cuts for r in results),
        "median round": f"{statistics.median([r.seconds for r in results] or [0.0]):.2f} s",
    }
    for name, figure in figures.items():
        console.print(f"{name}: {figure}")


if __name__ == "__main__":
    main()
