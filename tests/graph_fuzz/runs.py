"""A program run by a graph on a store, and by eager torch over a dense table; and that both agree."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import tierbed
from support.embeddings import contents
from support.stores import options
from tierbed import Graph, MultiTableEmbedding
from tierbed.engine.optim import CatchUpAdam, RowWiseAdagrad

from .blocks import BLOCKS, IDS, TABLES, WIDTH, Batch, Rows
from .programs import FLOAT32, Program

_names = itertools.count()
# where rounding moves a gradient near zero, a step moves by little
_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1, weight_decay=0.1),
    "rowwise": lambda p: RowWiseAdagrad(p, lr=0.02, initial_accumulator_value=0.1),
    "catch-up": lambda p: CatchUpAdam(p, lr=0.01, eps=0.1),
    "catch-up decay": lambda p: CatchUpAdam(p, lr=0.01, eps=0.1, weight_decay=0.1),
}


@dataclass
class Result:
    """losses: of each call and evaluation, in their order. rows: [TABLES, IDS, WIDTH]. bits: all that is stored."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    rows: Tensor
    bits: bytes = b""
    shared: int = 0  # dynamic-shape steps that were made


class DenseRows(nn.Module):
    """The lookups of an embedding, of torch's own ops over one parameter."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows.flatten(0, 1).clone())

    def forward(self, ids: Tensor, table: int, offsets: Any = None, pooling: Any = None, weights: Any = None) -> Tensor:
        found = self.weight[ids + table * IDS]
        if pooling is None:
            return found
        if weights is not None:
            found = found * weights[..., None]
        if offsets is None:
            return found.sum(-2) / (ids.shape[-1] if pooling == "mean" else 1)
        lengths = offsets.diff()
        bags = torch.arange(len(lengths)).repeat_interleave(lengths)
        sums = torch.zeros(len(lengths), WIDTH).index_add(0, bags, found)
        return sums / lengths.clamp(min=1)[:, None] if pooling == "mean" else sums


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.residual = program.residual
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in program.blocks)

    def forward(self, batch: Batch, rows: Rows) -> Tensor:
        h = (self.first(batch.x) + rows(batch.ids[:, 0], 0)).tanh()
        for block in self.blocks:
            found = block(h, batch, rows).tanh()
            h = h + 0.5 * found if self.residual else found
        return nn.functional.mse_loss(self.head(h).squeeze(1), batch.y)


class Fuzzed(Graph):
    """`rows` is an embedding; for eager torch, `build` is called as it is, over a dense table."""

    def __init__(self, program: Program, rows: nn.Module) -> None:
        super().__init__()
        self.rows, self.model = rows, Model(program)
        self.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2) if program.scaled else None
        self.optimizers = {
            "rows": _OPTIMIZERS[program.row_optimizer](rows.parameters()),
            "dense": _OPTIMIZERS[program.dense_optimizer](self.model.parameters()),
        }
        self.schedules = {name: StepLR(o, 2, 0.7) for name, o in self.optimizers.items()} if program.schedule else {}

    def build(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.model(Batch(*batch), self.rows)
        if self.training:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss


def _rows(name: str, store: Any, types: tuple[torch.dtype, torch.dtype] = FLOAT32) -> MultiTableEmbedding:
    tables = [tierbed.make_table_options(tierbed.make_uniform_initializer(-0.5, 0.5))] * TABLES
    return MultiTableEmbedding(name, WIDTH, types[0], torch.int64, tables, store, seed=0, state_dtype=types[1])


def _all(rows: MultiTableEmbedding) -> Tensor:
    return torch.stack([rows.get(torch.arange(IDS), table) for table in range(TABLES)])


def run_graph(program: Program, store: str, path: Path, types: tuple[torch.dtype, torch.dtype] = FLOAT32) -> Result:
    kept = options(store, path / store if "ssd" in store else None)
    with (
        _rows(f"fuzzed{next(_names)}", kept, types) as rows,
        patch("tierbed.graph.run.step_cache.MAX_STATIC_SHAPES", program.own),
        _loud() as logged,
    ):
        graph = Fuzzed(program, rows)
        for kind, optimizer in graph.optimizers.items():
            graph.add_optimizer(optimizer, graph.schedules.get(kind))
        graph.clip_grad_norm(program.max_norm)
        graph.clip_grad_value(program.clip_value)
        graph.accumulate_grads(program.accumulated)
        graph.set_grad_scaler(graph.scaler)
        losses: list[Tensor] = []
        for batches in _stretches(program, graph, losses, graph):
            if program.ahead is None:
                losses += [graph(*batch) for batch in batches]
            else:
                losses += graph.run([tuple(batch) for batch in batches], ahead=program.ahead)
        graph.drop_grads()
        state = {key: value.clone() for key, value in graph.model.state_dict().items()}
        assert not [line for line in logged if "failed" in line], logged
        shared = sum("further sizes share a" in line for line in logged)
        return Result(losses, state, _all(rows), contents(rows).tobytes(), shared)


def run_eager(program: Program, rows: Tensor) -> Result:
    """rows: as they are before the first step."""
    graph = Fuzzed(program, DenseRows(rows))
    optimizers: list[Optimizer] = list(graph.optimizers.values())
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    losses: list[Tensor] = []
    calls = 0
    for batches in _stretches(program, graph, losses, torch.no_grad()(graph.build)):
        for batch in batches:
            losses.append(graph.build(*batch).detach())
            calls += 1
            if calls % program.accumulated == 0:
                _step(program, graph.scaler, optimizers, parameters)
                for schedule in graph.schedules.values():
                    schedule.step()
    return Result(losses, graph.model.state_dict(), graph.rows.weight.detach().view(TABLES, IDS, WIDTH))


def _step(program: Program, scaler: GradScaler | None, optimizers: list[Optimizer], parameters: list[Tensor]) -> None:
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    if program.max_norm is not None:
        nn.utils.clip_grad_norm_(parameters, program.max_norm)
    if program.clip_value is not None:
        nn.utils.clip_grad_value_(parameters, program.clip_value)
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad()
    if scaler is not None:
        scaler.update()


def _stretches(
    program: Program, graph: Fuzzed, losses: list[Tensor], evaluate: Callable[..., Tensor]
) -> Iterator[list[Batch]]:
    """The batches from one event to the next, which happens before them; the losses of evaluations."""
    ends = [*(call for call in program.events if call), len(program.sizes)]
    batches = program.batches()
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        event = program.events.get(begin)
        if event and event.kind == "evaluate":
            graph.eval()
            losses.append(evaluate(*batches[begin]))
            graph.train()
        elif event:
            for parameter in graph.model.blocks[event.block].parameters():
                parameter.requires_grad_(event.kind == "thaw")
        torch.manual_seed(program.seed + begin)
        yield batches[begin:end]


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _loud() -> Iterator[list[str]]:
    """What the logger says meanwhile."""
    handler, logger = _Keep(), logging.getLogger("tierbed")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def check(program: Program, path: Path) -> Result:
    """AssertionError where a graph and eager torch differ by more than rounding, or two stores by a bit.

    Stores are compared with rows of the program's types, the device's of float32 with eager torch. It is one as well
    if no dynamic-shape step was made although one can be.
    """
    with _rows("initial", options("device")) as rows:
        expected = run_eager(program, _all(rows))
    found = run_graph(program, "device", path)
    assert found.shared or not program.shares, "no dynamic-shape step was made"
    for number, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=number: f"loss {n}: {m}")
    torch.testing.assert_close(found.state, expected.state, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found.rows, expected.rows, rtol=1e-4, atol=2e-5)
    if program.other_store is None:
        return found
    if program.types != FLOAT32:
        found = run_graph(program, "device", path, program.types)
    other = run_graph(program, program.other_store, path, program.types)
    assert all(map(torch.equal, found.losses, other.losses))
    assert found.bits == other.bits
    assert all(torch.equal(value, other.state[name]) for name, value in found.state.items())
    return found
