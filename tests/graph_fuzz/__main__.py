"""`PYTHONPATH=tests python -P -m graph_fuzz --seed 7 -n 100`: programs of these seeds, and the ones that fail."""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import torch

from .programs import draw_program
from .runs import check


def main() -> None:
    parser = argparse.ArgumentParser(prog="graph_fuzz", description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="programs")
    parser.add_argument("--seed", type=int, default=1, help="of the first one; the next one's is one more")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed: list[int] = []
    shared: Counter[int] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.n):
        program = draw_program(seed)
        try:
            with tempfile.TemporaryDirectory() as folder:
                shared[check(program, Path(folder)).shared] += 1
        except Exception:
            failed.append(seed)
            print(f"{program}\n{traceback.format_exc(limit=-6)}", flush=True)
    print(f"{arguments.n} programs, dynamic-shape steps {dict(shared)}, failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
