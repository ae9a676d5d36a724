"""Launches a step's kernels for a batch whose lines are set: gather, pool, update, catch up, assign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...optim.kernel import struct_name
from .batch import SLOT_HASH, Batch, LookupSpan
from .device import THREADS, Argument, launch, struct_of, struct_type
from .layout import Layout
from .program import Program

LINES, LOOKUPS = "ops/cuda/lines.cu", "ops/cuda/lookups.cu"
WARP, SUM_BLOCK, MAX_SOURCES, MAX_HYPERS = 32, 256, 8, 504  # as in update.cu and sources.h
# per lookup: the gradient [output rows, dim], in one dtype; True if bags are averaged; pooling weights
Grads = tuple[Sequence[Tensor], Sequence[bool], Sequence[Tensor | None]]
_TYPES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}

_BAGS = struct_type("uint64 offsets length features", "uint32 columns batch")
_POOLED_IDS = struct_type("uint64 inverse weights count", "uint32 mean", ("bags", _BAGS))
_PART = struct_type("uint64 rows", "uint32 begin")
_SOURCES = struct_type(("parts", _PART, (MAX_SOURCES,)), "uint32 count", "uint64 rows offsets sources scales n")
_NUMBERS = struct_type(("hyper", "<f8", (MAX_HYPERS,)), "float32 scale", "uint32 step")


def gather(
    batch: Batch, layout: Layout, index: int, out: Tensor, mean: bool = False, weights: Tensor | None = None
) -> None:
    """Write a lookup's result to `out` [output rows, dim], float32, float16 or bfloat16. Pools bags, if any."""
    lookup = batch.lookups[index]
    program = _lookup_program(layout, out.dtype, batch)
    if lookup.pooled:
        ids = _pooled(batch, lookup, mean, weights)
        launch(layout.device, program, "pool", lookup.bags, layout.column_lanes, batch.views, ids, out)
    else:
        _gather(layout, program, batch, batch.inverse[lookup.begin :], lookup.size, out)


def weights_grad(batch: Batch, layout: Layout, index: int, grads: Tensor, out: Tensor, mean: bool = False) -> None:
    """Write each pooling weight's gradient to `out` [n], float32, 0 for padding. grads [bags, dim]: of the result."""
    lookup = batch.lookups[index]
    program, ids = _lookup_program(layout, grads.dtype, batch), _pooled(batch, lookup, mean, None)
    launch(layout.device, program, "weights_grad", lookup.bags, WARP, batch.views, ids, grads, out)


def write_hyper(layout: Layout, rule: str, hyper: Sequence[float], step: int, scale: float, numbers: Tensor) -> None:
    """Write an update's numbers, as in `Processor.set_hyper`, to memory from `new_hyper`, for kernels to read."""
    values = np.zeros((), _NUMBERS)
    values["hyper"][: len(hyper)], values["scale"], values["step"] = hyper, scale, step
    launch(layout.device, _update_program(layout, rule), "write_hyper", 1, WARP, values, numbers)


def update(
    layout: Layout, rule: str, batch: Batch, gradients: Grads, numbers: Tensor, written: Tensor, faults: Tensor
) -> None:
    """Update a batch's rows, unless a fault bit is set. `written` [tables], int64, counts first writes of rows."""
    program = _update_program(layout, rule, _dtype(gradients[0]))
    sources, sums, _owners = _sum_blocks(program, layout, batch, gradients)
    launch(
        layout.device, program, "update_rows", batch.size, WARP, sources, batch.lines, batch.tables, batch.count,
        numbers, sums, _row_memory(layout, batch), written, faults, _line_memory(layout, batch), batch.hashes,
        layout.seed, SLOT_HASH,
    )  # fmt: skip


def preview_catch_up(layout: Layout, rule: str, batch: Batch, numbers: Tensor) -> None:
    """Make lookups read caught-up copies: rows as of the beginning of the step. For rules that catch up."""
    memory = torch.empty(batch.size * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    batch.keep_alive(memory)
    views = batch.empty(torch.int64)
    catch_up(layout, rule, batch, numbers, memory, views)
    batch.views = views


def catch_up(
    layout: Layout, rule: str, batch: Batch, numbers: Tensor, memory: Tensor | None = None, views: Tensor | None = None
) -> None:
    """Apply the steps that rows missed to their embeddings and states. For rules that catch up.

    With `views` [size], the lines do not change. Rows that missed steps are copied to `memory` [size lines] and caught
    up there. `views` gets the address of each row's current line.
    """
    arguments = (batch.lines, batch.count, numbers, memory, views, _line_memory(layout, batch))
    launch(layout.device, _update_program(layout, rule), "catch_up_lines", batch.size, WARP, *arguments)


def sum_rows(layout: Layout, batch: Batch, gradients: Grads, positions: Tensor | None, out: Tensor) -> None:
    """Write row u's gradient to out[positions[u]], or to out[u] without positions. out: [*, dim]."""
    _reduce("sum_rows", layout, batch, gradients, positions, out)


def square_rows(layout: Layout, batch: Batch, gradients: Grads) -> Tensor:
    """Return each row's squared gradient norm, [size] float32. Elements after the unique rows are 0."""
    squares = torch.zeros(batch.size, dtype=torch.float32, device=batch.lines.device)
    _reduce("square_rows", layout, batch, gradients, _row_memory(layout, batch), squares)
    return squares


def new_hyper(device: torch.device) -> Tensor:
    """Allocate memory for an update's hyper-parameters. Captured launches read each step's values there."""
    return torch.zeros(_NUMBERS.itemsize, dtype=torch.uint8, device=device)


def assign(batch: Batch, layout: Layout, values: Tensor, step: int, written: Tensor, faults: Tensor) -> None:
    """Write values [size, dim], one per position, to rows. A row's last value wins. written, faults: see `update`."""
    groups = batch.groups
    launch(
        layout.device, layout.program(LINES), "assign_rows", batch.size, WARP, batch.lines, batch.tables,
        groups.offsets, groups.positions, batch.count, values, np.uint32(step), written, faults,
    )  # fmt: skip


def count_written(layout: Layout, batch: Batch, lines: Tensor) -> Tensor:
    """Count a batch's rows that were ever written, [tables]. lines [size]: the rows' lines; 0 for unwritten rows."""
    written = torch.zeros(layout.tables, dtype=torch.int64, device=lines.device)
    program = layout.program(LINES)
    launch(layout.device, program, "count_written", batch.size, 1, lines, batch.tables, batch.count, written)
    return written


def initialise_missing(batch: Batch, layout: Layout) -> None:
    """Give each row without a line a new line with initial values, in memory owned by the batch."""
    absent = batch.lines == 0
    batch.lines.copy_(torch.where(absent, new_lines(batch, layout, batch.size), batch.lines))
    initialise_lines(batch, layout, absent)


def new_lines(batch: Batch, layout: Layout, count: int) -> Tensor:
    """Allocate `count` lines in memory owned by the batch. Returns their addresses."""
    memory = torch.empty(count * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    return batch.keep_alive(memory) + layout.line_bytes * torch.arange(count, device=memory.device)


def initialise_lines(batch: Batch, layout: Layout, only: Tensor) -> None:
    """Write initial values to lines flagged in `only` [size], bool. Skips rows without a line."""
    launch(
        layout.device, layout.program(LINES), "initialise_lines", batch.size, WARP, batch.hashes, batch.tables,
        batch.count, batch.lines, only, layout.initial, SLOT_HASH,
    )  # fmt: skip


def copy_lines(layout: Layout, source: Tensor, to: Tensor) -> None:
    """Copy lines between addresses [n]. Skips a pair of addresses if one is 0."""
    n = len(source)
    launch(layout.device, layout.program(LINES), "copy_lines", n, layout.copy_lanes, source, to, np.uint64(n))


def wide_lines(batch: Batch, layout: Layout, positions: Tensor, owner: Batch) -> Tensor:
    """Return the lines at positions [n]. Narrow lines are copied to float32, in memory owned by `owner`."""
    inverse = batch.inverse[positions]
    if not layout.is_narrow:
        return batch.views[inverse.to(torch.int64)]
    rows = torch.empty((len(inverse), layout.dim), dtype=torch.float32, device=batch.lines.device)
    _gather(layout, _lookup_program(layout, torch.float32), batch, inverse, len(inverse), rows)
    return owner.keep_alive(rows) + 4 * layout.dim * torch.arange(len(inverse), device=rows.device)


def copy_rows(batch: Batch, layout: Layout) -> None:
    """Give each row a new line in memory owned by the batch. Copies the row's present line, if there is one."""
    copies = new_lines(batch, layout, batch.size)
    copy_lines(layout, batch.lines, copies)
    batch.lines.copy_(copies)


def _pooled(batch: Batch, lookup: LookupSpan, mean: bool, weights: Tensor | None) -> np.ndarray:
    columns = 0 if lookup.features is None else len(lookup.features)
    bags = struct_of(
        _BAGS, offsets=lookup.begins, length=lookup.length, features=lookup.features, columns=columns,
        batch=lookup.bags // columns if columns else 0,
    )  # fmt: skip
    inverse = batch.inverse.data_ptr() + 4 * lookup.begin
    return struct_of(_POOLED_IDS, inverse=inverse, weights=weights, count=lookup.bags, mean=mean, bags=bags)


def _update_program(layout: Layout, rule: str, dtype: torch.dtype = torch.float32) -> Program:
    macros = {"TIERBED_RULE": struct_name(rule), "TIERBED_GRADIENTS": _TYPES[dtype]}
    return layout.program("ops/cuda/update.cu", **macros)


def _dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return grads[0].dtype if grads else torch.float32


def _reduce(kernel: str, layout: Layout, batch: Batch, gradients: Grads, *arguments: Argument) -> None:
    program = layout.program("ops/cuda/sums.cu", TIERBED_GRADIENTS=_TYPES[_dtype(gradients[0])])
    sources, sums, _owners = _sum_blocks(program, layout, batch, gradients)
    launch(layout.device, program, kernel, batch.size, WARP, sources, batch.count, sums, *arguments)


def _sum_blocks(
    program: Program, layout: Layout, batch: Batch, gradients: Grads
) -> tuple[np.ndarray, Tensor, list[Any]]:
    """Launch `sum_blocks`. Returns (the `Sources` argument, the blocks' sums, objects to keep alive)."""
    groups, (grads, means, weights) = batch.groups, gradients
    scales = _scales(_lookup_program(layout, _dtype(grads)), batch, means, weights)
    if len(grads) > MAX_SOURCES:
        grads = [torch.cat(list(grads))]
    grads = [grad if grad.data_ptr() % 16 == 0 else grad.clone() for grad in grads]  # lanes read up to 16 bytes
    sources = struct_of(
        _SOURCES, count=len(grads), n=batch.size, rows=groups.rows, offsets=groups.offsets, sources=groups.sources,
        scales=scales,
    )  # fmt: skip
    for index, (grad, lookup) in enumerate(zip(grads, batch.lookups, strict=False)):
        sources["parts"][index] = (grad.data_ptr(), lookup.source)
    slots = batch.size // SUM_BLOCK + 1
    sums = torch.empty(slots * layout.dim, dtype=torch.float32, device=batch.lines.device)
    launch(layout.device, program, "sum_blocks", slots if batch.size > SUM_BLOCK else 0, WARP, sources, sums)
    return sources, sums, [grads, groups, scales]


def _lookup_program(layout: Layout, dtype: torch.dtype, batch: Batch | None = None) -> Program:
    """Return the program for lookups with this output dtype. batch: needed if its lines may be wide."""
    row = "Float32" if batch is not None and batch.has_wide_lines else layout.type
    return layout.program(LOOKUPS, TIERBED_GRADIENTS=_TYPES[dtype], TIERBED_ROW=row)


def _gather(layout: Layout, program: Program, batch: Batch, inverse: Tensor, n: int, out: Tensor) -> None:
    launch(layout.device, program, "gather", n, layout.copy_lanes, batch.views, inverse, np.uint64(n), out)


def _row_memory(layout: Layout, batch: Batch) -> Tensor:
    """Allocate one float32 row per warp."""
    return torch.empty(_warps(layout, batch) * layout.dim, dtype=torch.float32, device=batch.lines.device)


def _line_memory(layout: Layout, batch: Batch) -> Tensor:
    """Allocate one float32 line per warp if lines are narrow."""
    size = _warps(layout, batch) * layout.wide_bytes if layout.is_narrow else 0
    return torch.empty(size, dtype=torch.uint8, device=batch.lines.device)


def _warps(layout: Layout, batch: Batch) -> int:
    return min(-(-batch.size * WARP // THREADS), layout.device.blocks) * THREADS // WARP


def _scales(program: Program, batch: Batch, means: Sequence[bool], weights: Sequence[Tensor | None]) -> Tensor | None:
    """Return the factors by which occurrences' gradients are multiplied, or None if all are 1."""
    if not any(means) and all(tensor is None for tensor in weights):
        return None
    scales = batch.empty(torch.float32)
    for lookup, mean, tensor in zip(batch.lookups, means, weights, strict=True):
        ids, part = _pooled(batch, lookup, mean, tensor), scales[lookup.begin :]
        launch(batch.device, program, "scale_positions", lookup.bags, 1, ids, part)
    return scales[batch.groups.order]
