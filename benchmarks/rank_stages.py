"""Where the time of a step over ranks goes: what it computes, what it waits for, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist
from rank_contenders import Embedding
from rank_steps import Steps, drawn
from tier_report import Figure
from torch import Tensor

from tierbed.distributed import World

COMPUTED = {
    "batch": "rows of ids, here and as owner",
    "by_owner": "order by owner",
    "gather": "gather, as owner and of the lookup",
    "set_lines": "lines of rows",
    "sum_gradients": "sums of gradients",
    "update": "update",
}
WAITED = {"ids of": "ids", "rows of": "rows", "gradients of": "gradients", "vote of": "vote"}  # of headers are others


class Timed(World):
    """Adds up the seconds that this rank waits for others, and those of functions that are `watched`, by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        super().__init__()

    def start(self, op: str, out: Tensor, given: Tensor, out_sizes: Sequence[int], given_sizes: Sequence[int]) -> Any:
        exchange = super().start(op, out, given, out_sizes, given_sizes)
        kind = next((kind for begin, kind in WAITED.items() if op.startswith(begin)), "headers")
        exchange.wait = self.watched(f"waits for {kind}", exchange.wait)  # type: ignore[method-assign]
        return exchange

    def watched(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - begin

        return timed


def stages(steps: Steps) -> list[Figure]:
    """Milliseconds of rank 0 in each stage of a step, the median over steps."""
    with closing(Timed()) as world:
        batches = drawn(steps.work)
        sharded = Embedding("stages", steps.work, batches, world)
        sharded.step(0)  # opens the embedding
        table = sharded.embedding.opened().own_table
        assert table.stack is not None
        watched = [(table.processor, name, stage) for name, stage in COMPUTED.items()]
        for owner, name, stage in [*watched, (table.stack.top, "pin", "places of rows")]:
            setattr(owner, name, world.watched(stage, getattr(owner, name)))
        found: list[dict[str, float]] = []
        for turn in range(len(batches) + steps.turns):
            dist.barrier()
            world.seconds.clear()
            begin = perf_counter()
            out = sharded.step(turn % len(batches))
            whole = perf_counter() - begin
            found.append({**world.seconds, "the rest": whole - sum(world.seconds.values()), "a step": whole})
            del out
        sharded.embedding.close()
        warm = found[len(batches) :]
        figures = [
            Figure("stages", name, 1e3 * median(one.get(name, 0.0) for one in warm), "ms", notes=steps.name)
            for name in warm[0]
        ]
        return sorted(figures, key=lambda figure: -figure.value)
