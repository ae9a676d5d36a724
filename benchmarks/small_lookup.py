"""Time a lookup of 64 ids by `tierbed.Embedding`, `MultiTableEmbedding` and `nn.Embedding` in one thread.

    python benchmarks/small_lookup.py [DIM]

Prints microseconds per call: a lookup without and with autograd, and a whole SGD step.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from timing import time_in_turns
from torch import nn

import tierbed as tb

ROWS, IDS, CALLS = 100_000, 64, 300


def main() -> None:
    torch.set_num_threads(1)
    dim = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    table = tb.make_table_options(tb.make_normal_initializer(0.0, 1.0), ids=ROWS)
    plain = nn.Embedding(ROWS, dim, sparse=True)
    single = tb.Embedding(ROWS, dim, _weight=plain.weight.detach())
    multi = tb.MultiTableEmbedding(
        "many", dim, torch.float32, torch.int64, [table], tb.make_host_mem_store_options()
    )  # fmt: skip
    multi.load_dense({0: plain.weight.detach()})
    modules = {"nn.Embedding": plain, "tierbed.Embedding": single, "MultiTableEmbedding": multi}
    optimizers = {name: torch.optim.SGD(module.parameters(), lr=0.1) for name, module in modules.items()}
    optimizers |= {name: tb.EagerOptimizer(optimizers[name], modules[name]) for name in list(modules)[1:]}
    ids = torch.randint(0, ROWS, (IDS,))

    def step(name: str) -> None:
        modules[name](ids).sum().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def look_up(name: str, autograd: bool) -> None:
        with torch.set_grad_enabled(autograd):
            for _ in range(CALLS):
                modules[name](ids)

    calls_by_kind = {
        "lookup": lambda name, _: look_up(name, False),
        "lookup with autograd": lambda name, _: look_up(name, True),
        "step": lambda name, _: [step(name) for _ in range(CALLS)],
    }
    for kind, run in calls_by_kind.items():
        times = time_in_turns({name: partial(run, name) for name in modules}, turns=15, warm_up=2)
        calls = ", ".join(f"{name} {1e3 * times.ms(name) / CALLS:.1f} us" for name in modules)
        against = f"{times.ratio('tierbed.Embedding', 'nn.Embedding'):.2f}x nn.Embedding's time"
        base = f"{times.ratio('tierbed.Embedding', 'MultiTableEmbedding'):.3f}x MultiTableEmbedding's"
        print(f"{kind}: {calls}; tierbed.Embedding {against}, {base}")


if __name__ == "__main__":
    main()
