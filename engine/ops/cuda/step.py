"""The kernels of a step, launched for a batch whose lines are set."""

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
# of each lookup: the gradient [rows of the lookup, dim], of one dtype, whether bags are means, its pooling weights
Given = tuple[Sequence[Tensor], Sequence[bool], Sequence[Tensor | None]]
_TYPES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}

_BAGS = struct_type("uint64 offsets length features", "uint32 columns batch")
_POOLED_IDS = struct_type("uint64 inverse weights count", "uint32 mean", ("bags", _BAGS))
_PART = struct_type("uint64 rows", "uint32 begin")
_SOURCES = struct_type(("parts", _PART, (MAX_SOURCES,)), "uint32 count", "uint64 rows offsets sources scales n")
_NUMBERS = struct_type(("hyper", "<f8", (MAX_HYPERS,)), "float32 scale", "uint32 step")


def gather(
    batch: Batch, layout: Layout, index: int, out: Tensor, mean: bool = False, weights: Tensor | None = None
) -> None:
    """out [rows of lookup `index`, dim], float32, float16 or bfloat16; pooled if the lookup has bags."""
    lookup = batch.lookups[index]
    program = _lookups(layout, out.dtype, batch)
    if lookup.pooled:
        ids = _pooled(batch, lookup, mean, weights)
        launch(layout.device, program, "pool", lookup.bags, layout.column_lanes, batch.views, ids, out)
    else:
        _gather(layout, program, batch, batch.inverse[lookup.begin :], lookup.size, out)


def weights_grad(batch: Batch, layout: Layout, index: int, grads: Tensor, out: Tensor, mean: bool = False) -> None:
    """grads [bags, dim] as gathered -> out [n] float32, the gradient of each weight, 0 for padding."""
    lookup = batch.lookups[index]
    program, ids = _lookups(layout, grads.dtype, batch), _pooled(batch, lookup, mean, None)
    launch(layout.device, program, "weights_grad", lookup.bags, WARP, batch.views, ids, grads, out)


def write_numbers(layout: Layout, rule: str, hyper: Sequence[float], step: int, scale: float, numbers: Tensor) -> None:
    """Write the numbers of an update to `numbers`, memory of `new_numbers`, which the functions below take.

    hyper: the rule's numbers, as from `RowOptimizer.hyper`. scale: multiplies the summed gradient of a row.
    """
    given = np.zeros((), _NUMBERS)
    given["hyper"][: len(hyper)], given["scale"], given["step"] = hyper, scale, step
    launch(layout.device, _program_of(layout, rule), "write_numbers", 1, WARP, given, numbers)


def update(
    layout: Layout, rule: str, batch: Batch, given: Given, numbers: Tensor, written: Tensor, faults: Tensor
) -> None:
    """Apply the rule to the rows of a batch. After a fault nothing is written.

    `written` [tables] int64 grows by the rows that are written for the first time.
    """
    program = _program_of(layout, rule, _dtype(given[0]))
    sources, sums, _kept = _sum_blocks(program, layout, batch, given)
    launch(
        layout.device, program, "update_rows", batch.size, WARP, sources, batch.lines, batch.tables, batch.count,
        numbers, sums, _whole(layout, batch), written, faults, _wide(layout, batch), batch.hashes, layout.seed,
        SLOT_HASH,
    )  # fmt: skip


def preview_catch_up(layout: Layout, rule: str, batch: Batch, numbers: Tensor) -> None:
    """Let lookups read rows as of the beginning of the step, for a rule that catches up."""
    memory = torch.empty(batch.size * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    batch.own(memory)
    views = batch.empty(torch.int64)
    catch_up(layout, rule, batch, numbers, memory, views)
    batch.views = views


def catch_up(
    layout: Layout, rule: str, batch: Batch, numbers: Tensor, memory: Tensor | None = None, views: Tensor | None = None
) -> None:
    """Apply missed steps to the rows' embeddings and states, for a rule that catches up.

    views [size]: the lines stay as they are; it gets the addresses of caught-up rows, in `memory` for as many lines.
    """
    arguments = (batch.lines, batch.count, numbers, memory, views, _wide(layout, batch))
    launch(layout.device, _program_of(layout, rule), "catch_up_lines", batch.size, WARP, *arguments)


def sum_rows(layout: Layout, batch: Batch, given: Given, positions: Tensor | None, out: Tensor) -> None:
    """Write the gradient of row u of the batch to out[positions[u]], out [*, dim]; without positions, to out[u]."""
    _reduce("sum_rows", layout, batch, given, positions, out)


def square_rows(layout: Layout, batch: Batch, given: Given) -> Tensor:
    """[size] float32, the sum of the squares of each row's gradient, 0 beyond the unique rows."""
    squares = torch.zeros(batch.size, dtype=torch.float32, device=batch.lines.device)
    _reduce("square_rows", layout, batch, given, _whole(layout, batch), squares)
    return squares


def new_numbers(device: torch.device) -> Tensor:
    """Memory for the numbers of updates, which change from step to step."""
    return torch.zeros(_NUMBERS.itemsize, dtype=torch.uint8, device=device)


def assign(batch: Batch, layout: Layout, values: Tensor, step: int, written: Tensor, faults: Tensor) -> None:
    """Write values [size, dim] to the rows of unpooled lookups; the last write wins.

    written, faults: as in `update`.
    """
    groups = batch.groups
    launch(
        layout.device, layout.program(LINES), "assign_rows", batch.size, WARP, batch.lines, batch.tables,
        groups.offsets, groups.positions, batch.count, values, np.uint32(step), written, faults,
    )  # fmt: skip


def count_written(layout: Layout, batch: Batch, lines: Tensor) -> Tensor:
    """[tables], how many rows of a batch were ever written, by their lines [size]; a row with a line of 0 was not."""
    written = torch.zeros(layout.tables, dtype=torch.int64, device=lines.device)
    program = layout.program(LINES)
    launch(layout.device, program, "count_written", batch.size, 1, lines, batch.tables, batch.count, written)
    return written


def initialise_missing(batch: Batch, layout: Layout) -> None:
    """Give each row whose line is zero initial values in memory of the batch."""
    absent = batch.lines == 0
    batch.lines.copy_(torch.where(absent, new_lines(batch, layout, batch.size), batch.lines))
    initialise_lines(batch, layout, absent)


def new_lines(batch: Batch, layout: Layout, count: int) -> Tensor:
    """The addresses of `count` lines in memory of the batch."""
    memory = torch.empty(count * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    return batch.own(memory) + layout.line_bytes * torch.arange(count, device=memory.device)


def initialise_lines(batch: Batch, layout: Layout, only: Tensor) -> None:
    """Give initial values to each row that is flagged in `only` [size] bool and has a line."""
    launch(
        layout.device, layout.program(LINES), "initialise_lines", batch.size, WARP, batch.hashes, batch.tables,
        batch.count, batch.lines, only, layout.initial, SLOT_HASH,
    )  # fmt: skip


def copy_lines(layout: Layout, source: Tensor, to: Tensor) -> None:
    """Copy lines [n] by their addresses; an address of 0 on either side is skipped."""
    n = len(source)
    launch(layout.device, layout.program(LINES), "copy_lines", n, layout.copy_lanes, source, to, np.uint64(n))


def wide_lines(batch: Batch, layout: Layout, positions: Tensor, owner: Batch) -> Tensor:
    """The lines of positions [n] of a batch; if lines are narrow, those of float32 copies in memory of `owner`."""
    inverse = batch.inverse[positions]
    if not layout.is_narrow:
        return batch.views[inverse.to(torch.int64)]
    rows = torch.empty((len(inverse), layout.dim), dtype=torch.float32, device=batch.lines.device)
    _gather(layout, _lookups(layout, torch.float32), batch, inverse, len(inverse), rows)
    return owner.own(rows) + 4 * layout.dim * torch.arange(len(inverse), device=rows.device)


def copy_rows(batch: Batch, layout: Layout) -> None:
    """Give each row a line in memory of the batch, and if it had one a copy of that."""
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


def _program_of(layout: Layout, rule: str, dtype: torch.dtype = torch.float32) -> Program:
    macros = {"TIERBED_RULE": struct_name(rule), "TIERBED_GRADIENTS": _TYPES[dtype]}
    return layout.program("ops/cuda/update.cu", **macros)


def _dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return grads[0].dtype if grads else torch.float32


def _reduce(kernel: str, layout: Layout, batch: Batch, given: Given, *arguments: Argument) -> None:
    program = layout.program("ops/cuda/sums.cu", TIERBED_GRADIENTS=_TYPES[_dtype(given[0])])
    sources, sums, _kept = _sum_blocks(program, layout, batch, given)
    launch(layout.device, program, kernel, batch.size, WARP, sources, batch.count, sums, *arguments)


def _sum_blocks(program: Program, layout: Layout, batch: Batch, given: Given) -> tuple[np.ndarray, Tensor, list[Any]]:
    """The sources of kernels, the sums of rows with many occurrences, and what keeps the sources' memory."""
    groups, (grads, means, weights) = batch.groups, given
    scales = _scales(_lookups(layout, _dtype(grads)), batch, means, weights)
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


def _lookups(layout: Layout, dtype: torch.dtype, batch: Batch | None = None) -> Program:
    """The program of lookups with outputs of `dtype`. batch: whose lines it reads, if those may be wide."""
    row = "Float32" if batch is not None and batch.has_wide_lines else layout.type
    return layout.program(LOOKUPS, TIERBED_GRADIENTS=_TYPES[dtype], TIERBED_ROW=row)


def _gather(layout: Layout, program: Program, batch: Batch, inverse: Tensor, n: int, out: Tensor) -> None:
    launch(layout.device, program, "gather", n, layout.copy_lanes, batch.views, inverse, np.uint64(n), out)


def _whole(layout: Layout, batch: Batch) -> Tensor:
    """Memory for one row of each warp."""
    return torch.empty(_warps(layout, batch) * layout.dim, dtype=torch.float32, device=batch.lines.device)


def _wide(layout: Layout, batch: Batch) -> Tensor:
    """Memory for a line of float32 numbers of each warp, if lines are narrow."""
    size = _warps(layout, batch) * layout.wide_bytes if layout.is_narrow else 0
    return torch.empty(size, dtype=torch.uint8, device=batch.lines.device)


def _warps(layout: Layout, batch: Batch) -> int:
    return min(-(-batch.size * WARP // THREADS), layout.device.blocks) * THREADS // WARP


def _scales(program: Program, batch: Batch, means: Sequence[bool], weights: Sequence[Tensor | None]) -> Tensor | None:
    """The factor of each occurrence's gradient, None if all factors are 1."""
    if not any(means) and all(given is None for given in weights):
        return None
    scales = batch.empty(torch.float32)
    for lookup, mean, given in zip(batch.lookups, means, weights, strict=True):
        ids, part = _pooled(batch, lookup, mean, given), scales[lookup.begin :]
        launch(batch.device, program, "scale_positions", lookup.bags, 1, ids, part)
    return scales[batch.groups.order]
