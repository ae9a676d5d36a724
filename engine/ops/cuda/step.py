"""The kernels of a step, launched for a batch whose lines are set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import SLOT_HASH, Batch, LookupSpan
from .device import THREADS, Argument, launch, struct_of
from .layout import Layout
from .program import Program

LINES = "ops/cuda/lines.cu"
WARP, SUM_BLOCK, MAX_SOURCES, MAX_HYPERS = 32, 256, 8, 504  # as in update.cu and sources.h
# of each lookup: the gradient [rows of the lookup, dim], of one dtype, whether bags are means, its pooling weights
Given = tuple[Sequence[Tensor], Sequence[bool], Sequence[Tensor | None]]
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_TYPES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}

_BAGS = np.dtype(
    [("offsets", "<u8"), ("length", "<u8"), ("features", "<u8"), ("columns", "<u4"), ("batch", "<u4")], align=True
)
_POOLED_IDS = np.dtype(
    [("inverse", "<u8"), ("weights", "<u8"), ("count", "<u8"), ("mean", "<u4"), ("bags", _BAGS)], align=True
)
_PART = np.dtype([("rows", "<u8"), ("begin", "<u4")], align=True)
_SOURCES = np.dtype(
    [
        ("parts", _PART, (MAX_SOURCES,)),
        ("count", "<u4"),
        ("rows", "<u8"),
        ("offsets", "<u8"),
        ("sources", "<u8"),
        ("scales", "<u8"),
        ("n", "<u8"),
    ],
    align=True,
)
_NUMBERS = np.dtype([("hyper", "<f8", (MAX_HYPERS,)), ("scale", "<f4"), ("step", "<u4")])


def gather(
    batch: Batch, layout: Layout, index: int, out: Tensor, mean: bool = False, weights: Tensor | None = None
) -> None:
    """out [rows of lookup `index`, dim], float32, float16 or bfloat16; pooled if the lookup has bags."""
    lookup, name = batch.lookups[index], _NAMES[out.dtype]
    program = _reading(batch, layout)
    if lookup.pooled:
        ids = _pooled(batch, lookup, mean, weights)
        launch(layout.device, program, f"pool_{name}", lookup.bags, lanes_for(layout.dim), batch.views, ids, out)
        return
    inverse = batch.inverse[lookup.begin :]
    lanes = lanes_for((layout.dim + 3) // 4)
    launch(
        layout.device, program, f"gather_{name}", lookup.size, lanes, batch.views, inverse, np.uint64(lookup.size), out
    )


def weights_grad(batch: Batch, layout: Layout, index: int, grads: Tensor, out: Tensor, mean: bool = False) -> None:
    """grads [bags, dim] as gathered -> out [n] float32, the gradient of each weight, 0 for padding."""
    lookup = batch.lookups[index]
    kernel = f"weights_grad_{_NAMES[grads.dtype]}"
    ids = _pooled(batch, lookup, mean, None)
    launch(layout.device, _reading(batch, layout), kernel, lookup.bags, WARP, batch.views, ids, grads, out)


class RuleKernels:
    """An optimizer's rule, compiled for a layout. `numbers` of its methods: what `write_numbers` wrote last."""

    def __init__(self, layout: Layout, rule: str) -> None:
        self._layout = layout
        self._rule = rule

    def write_numbers(self, hyper: Sequence[float], step: int, scale: float, numbers: Tensor) -> None:
        """Write the numbers of an update to `numbers`, memory of `new_numbers`.

        hyper: the rule's numbers, as from `RowOptimizer.hyper`. scale: multiplies the summed gradient of a row.
        """
        given = np.zeros((), _NUMBERS)
        given["hyper"][: len(hyper)], given["scale"], given["step"] = hyper, scale, step
        self._run("write_numbers", 1, given, numbers)

    def update(
        self,
        batch: Batch,
        grads: Sequence[Tensor],
        means: Sequence[bool],
        weights: Sequence[Tensor | None],
        numbers: Tensor,
        written: Tensor,
        faults: Tensor,
    ) -> None:
        """Apply the rule to the rows of a batch.

        grads: for each lookup, [rows of the lookup, dim], all of one dtype. `written` [tables] int64 grows by the rows
        that are written for the first time. After a fault nothing is written.
        """
        program, layout = self._program(_dtype(grads)), self._layout
        sources, sums, _kept = _sum_blocks(program, layout, batch, (grads, means, weights))
        launch(
            layout.device, program, "update_rows", batch.size, WARP, sources, batch.lines, batch.tables, batch.count,
            numbers, sums, _whole(layout, batch), written, faults, _wide(layout, batch), batch.hashes, layout.seed,
            SLOT_HASH,
        )  # fmt: skip

    def preview_catch_up(self, batch: Batch, numbers: Tensor) -> None:
        """Let lookups read rows as of the beginning of the step, for a rule that catches up."""
        memory = torch.empty(batch.size * self._layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
        views = batch.empty(torch.int64)
        address = np.uint64(batch.own(memory))
        self._run(
            "settle_rows", batch.size, batch.lines, batch.count, numbers, address, views, _wide(self._layout, batch)
        )
        batch.views = views

    def catch_up(self, batch: Batch, numbers: Tensor) -> None:
        """Apply missed steps to the rows' embeddings and states, for a rule that catches up."""
        self._run("catch_up_lines", batch.size, batch.lines, batch.count, numbers, _wide(self._layout, batch))

    def _run(self, kernel: str, items: int, *arguments: Argument) -> None:
        launch(self._layout.device, self._program(torch.float32), kernel, items, WARP, *arguments)

    def _program(self, dtype: torch.dtype) -> Program:
        macros = {"TIERBED_RULE": struct_name(self._rule), "TIERBED_GRADIENTS": _TYPES[dtype]}
        return self._layout.program("ops/cuda/update.cu", **macros)


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

    written, faults: as in `RuleKernels.update`.
    """
    groups = batch.groups
    launch(
        layout.device, layout.program(LINES), "assign_rows", batch.size, WARP, batch.lines, batch.tables,
        groups.offsets, groups.positions, batch.count, values, np.uint32(step), written, faults,
    )  # fmt: skip


def count_new(layout: Layout, lines: Tensor, count: Tensor) -> Tensor:
    """[1], how many of the first `count` [1] lines have `updates == 0`; an address of 0 counts as such a line."""
    total = torch.zeros(1, dtype=torch.int64, device=lines.device)
    launch(layout.device, layout.program(LINES), "count_new", len(lines), 1, lines, count, total)
    return total


def count_written(layout: Layout, batch: Batch) -> Tensor:
    """[tables], how many rows of a batch whose lines are set were ever written."""
    written = torch.zeros(layout.tables, dtype=torch.int64, device=batch.lines.device)
    program = layout.program(LINES)
    launch(layout.device, program, "count_written", batch.size, 1, batch.lines, batch.tables, batch.count, written)
    return written


def initialise_missing(batch: Batch, layout: Layout, ranks: Tensor) -> None:
    """Give each row whose line is zero initial values in memory of the batch; ranks: from `CudaFullTable.find`."""
    if batch.size == 0:
        return
    absent = batch.lines == 0
    place_lines(batch, layout, ranks, batch.size)
    initialise_lines(batch, layout, absent)


def place_lines(batch: Batch, layout: Layout, ranks: Tensor, count: int) -> None:
    """Give each of `count` rows without a line a line in memory of the batch. ranks: running sum of their flags."""
    if not count:
        return
    memory = torch.empty(count * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    address, program = np.uint64(batch.own(memory)), layout.program(LINES)
    launch(layout.device, program, "place_lines", batch.size, 1, ranks, batch.count, address, batch.lines)


def initialise_lines(batch: Batch, layout: Layout, only: Tensor) -> None:
    """Give initial values to each row that is flagged in `only` [size] bool and has a line."""
    launch(
        layout.device, layout.program(LINES), "initialise_lines", batch.size, WARP, batch.hashes, batch.tables,
        batch.count, batch.lines, only, layout.initial, SLOT_HASH,
    )  # fmt: skip


def copy_lines(layout: Layout, source: Tensor, to: Tensor) -> None:
    """Copy lines [n] by their addresses; an address of 0 on either side is skipped."""
    lanes = lanes_for((layout.dim + 3) // 4)
    n = np.uint64(len(source))
    launch(layout.device, layout.program(LINES), "copy_lines", len(source), lanes, source, to, n)


def wide_lines(batch: Batch, layout: Layout, positions: Tensor, owner: Batch) -> Tensor:
    """The lines of positions [n] of a batch; if lines are narrow, those of float32 copies in memory of `owner`."""
    inverse = batch.inverse[positions]
    if not layout.is_narrow:
        return batch.views[inverse.to(torch.int64)]
    rows = torch.empty((len(inverse), layout.dim), dtype=torch.float32, device=batch.lines.device)
    n = np.uint64(len(inverse))
    lanes = lanes_for((layout.dim + 3) // 4)
    launch(layout.device, layout.program(LINES), "gather_float32", len(inverse), lanes, batch.views, inverse, n, rows)
    return owner.own(rows) + 4 * layout.dim * torch.arange(len(inverse), device=rows.device)


def copy_present(batch: Batch, layout: Layout) -> None:
    """Replace the line of each row that has one by a copy, in memory of the batch."""
    memory = torch.empty(batch.size * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    copies = batch.own(memory) + layout.line_bytes * torch.arange(batch.size, device=batch.lines.device)
    copies = torch.where(batch.lines != 0, copies, 0)
    copy_lines(layout, batch.lines, copies)
    batch.lines.copy_(copies)


def struct_name(rule: str) -> str:
    """The name of a rule's struct in the header that engine/optim/kernel.py makes."""
    return "".join(part.capitalize() for part in rule.split("_"))


def lanes_for(words: int) -> int:
    """The lanes that share an item of `words` words, as in layout.h."""
    return min(1 << max(words - 1, 0).bit_length(), 32)


def _pooled(batch: Batch, lookup: LookupSpan, mean: bool, weights: Tensor | None) -> np.ndarray:
    columns = 0 if lookup.features is None else len(lookup.features)
    bags = struct_of(
        _BAGS, offsets=lookup.begins, length=lookup.length, features=lookup.features, columns=columns,
        batch=lookup.bags // columns if columns else 0,
    )  # fmt: skip
    inverse = batch.inverse.data_ptr() + 4 * lookup.begin
    return struct_of(_POOLED_IDS, inverse=inverse, weights=weights, count=lookup.bags, mean=mean, bags=bags)


def _dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return grads[0].dtype if grads else torch.float32


def _reduce(kernel: str, layout: Layout, batch: Batch, given: Given, *arguments: Argument) -> None:
    program = layout.program("ops/cuda/sums.cu", TIERBED_GRADIENTS=_TYPES[_dtype(given[0])])
    sources, sums, _kept = _sum_blocks(program, layout, batch, given)
    launch(layout.device, program, kernel, batch.size, WARP, sources, batch.count, sums, *arguments)


def _sum_blocks(program: Program, layout: Layout, batch: Batch, given: Given) -> tuple[np.ndarray, Tensor, list[Any]]:
    """The sources of kernels, the sums of rows with many occurrences, and what keeps the sources' memory."""
    groups, (grads, means, weights) = batch.groups, given
    scales = _scales(batch, layout, means, weights)
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


def _reading(batch: Batch, layout: Layout) -> Program:
    """The program that reads the rows of a batch."""
    return layout.program(LINES, "Float32" if batch.has_wide_lines else None)


def _whole(layout: Layout, batch: Batch) -> Tensor:
    """Memory for one row of each warp."""
    return torch.empty(_warps(layout, batch) * layout.dim, dtype=torch.float32, device=batch.lines.device)


def _wide(layout: Layout, batch: Batch) -> Tensor:
    """Memory for a line of float32 numbers of each warp, if lines are narrow."""
    size = _warps(layout, batch) * layout.wide_bytes if layout.is_narrow else 0
    return torch.empty(size, dtype=torch.uint8, device=batch.lines.device)


def _warps(layout: Layout, batch: Batch) -> int:
    return min(-(-batch.size * WARP // THREADS), layout.device.blocks) * THREADS // WARP


def _scales(batch: Batch, layout: Layout, means: Sequence[bool], weights: Sequence[Tensor | None]) -> Tensor | None:
    """The factor of each occurrence's gradient, None if all factors are 1."""
    if not any(means) and all(given is None for given in weights):
        return None
    scales = batch.empty(torch.float32)
    for lookup, mean, given in zip(batch.lookups, means, weights, strict=True):
        ids, part = _pooled(batch, lookup, mean, given), scales[lookup.begin :]
        launch(layout.device, layout.program(LINES), "scale_positions", lookup.bags, 1, ids, part)
    return scales[batch.groups.order]
