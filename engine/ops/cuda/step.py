"""Launches a step's kernels for a batch whose line addresses are set: gather, pool, update, catch up, assign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...optim.kernel import make_struct_name
from .batch import SLOT_HASH, Batch, LookupSpan
from .device import THREADS, Argument, launch, make_struct, make_struct_type
from .layout import Layout
from .program import Program

LINES, LOOKUPS = "ops/cuda/lines.cu", "ops/cuda/lookups.cu"
WARP, SUM_BLOCK, MAX_OUTPUTS, MAX_HYPERPARAMS = 32, 256, 8, 504  # as in update.cu and row_gradient.h
# (gradients, "is mean" flags, pooling weights), one item per lookup. Gradients [output rows, dim] have one dtype.
LookupGradients = tuple[Sequence[Tensor], Sequence[bool], Sequence[Tensor | None]]
_TYPE_STRUCTS = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}

_BAGS = make_struct_type("uint64 offsets length features", "uint32 num_columns batch_size")
_POOLED_IDS = make_struct_type("uint64 inverse weights num_bags", "uint32 is_mean", ("bags", _BAGS))
_OUTPUTS = ("outputs", make_struct_type("uint64 rows", "uint32 first_output_row"), (MAX_OUTPUTS,))
_BATCH_GRADIENTS = make_struct_type(_OUTPUTS, "uint32 count", "uint64 rows offsets output_rows scales n")
_STEP_PARAMS = make_struct_type(("hyperparams", "<f8", (MAX_HYPERPARAMS,)), "float32 scale", "uint32 step")


def gather(
    batch: Batch, layout: Layout, index: int, out: Tensor, mean: bool = False, weights: Tensor | None = None
) -> None:
    """Write a lookup's result to `out` [output rows, dim], float32, float16 or bfloat16. Pools bags, if any."""
    lookup = batch.lookups[index]
    program = _make_lookup_program(layout, out.dtype, batch)
    if lookup.is_pooled:
        ids = _make_pooled_ids(batch, lookup, mean, weights)
        launch(layout.device, program, "pool", lookup.num_bags, layout.column_lanes, batch.lookup_lines, ids, out)
    else:
        _gather(layout, program, batch, batch.inverse[lookup.first_position :], lookup.num_ids, out)


def weights_grad(batch: Batch, layout: Layout, index: int, grads: Tensor, out: Tensor, mean: bool = False) -> None:
    """Write the weights' gradients to `out` [n], float32; 0 for padding. grads [bags, dim]: the result's gradient."""
    lookup = batch.lookups[index]
    program, ids = _make_lookup_program(layout, grads.dtype, batch), _make_pooled_ids(batch, lookup, mean, None)
    launch(layout.device, program, "compute_weights_grad", lookup.num_bags, WARP, batch.lookup_lines, ids, grads, out)


def write_step_params(
    layout: Layout, rule_name: str, hyperparams: Sequence[float], step: int, scale: float, params: Tensor
) -> None:
    """Write the arguments of `Processor.send_hyperparams` to `params`, a `StepParams` that kernels read."""
    values = np.zeros((), _STEP_PARAMS)
    values["hyperparams"][: len(hyperparams)], values["scale"], values["step"] = hyperparams, scale, step
    launch(layout.device, _make_update_program(layout, rule_name), "write_step_params", 1, WARP, values, params)


def update(
    layout: Layout, rule: str, batch: Batch, gradients: LookupGradients, params: Tensor, counts: Tensor, faults: Tensor
) -> None:
    """Update a batch's rows, unless a fault bit is set. Counts first writes of rows in counts [tables], int64."""
    program = _make_update_program(layout, rule, _get_dtype(gradients[0]))
    batch_gradients, sums, _keep_alive = _sum_blocks(program, layout, batch, gradients)
    launch(
        layout.device, program, "update_rows", batch.num_positions, WARP, batch_gradients, batch.lines, batch.tables,
        batch.count, params, sums, _allocate_row_memory(layout, batch), counts, faults,
        _allocate_line_memory(layout, batch), batch.hashes, layout.seed, SLOT_HASH,
    )  # fmt: skip


def preview_catch_up(layout: Layout, rule_name: str, batch: Batch, params: Tensor) -> None:
    """Apply missed steps to row copies. Lookups then read the copies. The rule must be able to apply missed steps."""
    memory = torch.empty(batch.num_positions * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    batch.keep_alive(memory)
    copies = batch.empty(torch.int64)
    catch_up(layout, rule_name, batch, params, memory, copies)
    batch.lookup_lines = copies


def catch_up(
    layout: Layout, rule: str, batch: Batch, params: Tensor, memory: Tensor | None = None, copies: Tensor | None = None
) -> None:
    """Apply each row's missed steps to its embedding and states. `rule` must be able to apply missed steps.

    With `copies` [positions], the lines do not change. Rows that missed steps are copied to `memory` and caught up
    there. `copies` gets the address of each row's current line.
    """
    arguments = (batch.lines, batch.count, params, memory, copies, _allocate_line_memory(layout, batch))
    launch(layout.device, _make_update_program(layout, rule), "catch_up_lines", batch.num_positions, WARP, *arguments)


def sum_gradients(layout: Layout, batch: Batch, gradients: LookupGradients, rows: Tensor | None, out: Tensor) -> None:
    """Write row u's gradient to out[rows[u]], or to out[u] without `rows`. out: [*, dim]."""
    _reduce("sum_gradients", layout, batch, gradients, rows, out)


def compute_squared_norms(layout: Layout, batch: Batch, gradients: LookupGradients) -> Tensor:
    """Return each row's squared gradient norm, [positions] float32. Elements after the unique rows are 0."""
    squares = torch.zeros(batch.num_positions, dtype=torch.float32, device=batch.lines.device)
    _reduce("compute_squared_norms", layout, batch, gradients, _allocate_row_memory(layout, batch), squares)
    return squares


def allocate_step_params(device: torch.device) -> Tensor:
    """Allocate memory for a `StepParams`. Captured CUDA graphs read each step's values there."""
    return torch.zeros(_STEP_PARAMS.itemsize, dtype=torch.uint8, device=device)


def assign(batch: Batch, layout: Layout, values: Tensor, step: int, first_write_counts: Tensor, faults: Tensor) -> None:
    """Write values [positions, dim] to rows. A row's last value wins. Other arguments: see `update`."""
    groups = batch.occurrences
    launch(
        layout.device, layout.program(LINES), "assign_rows", batch.num_positions, WARP, batch.lines, batch.tables,
        groups.offsets, groups.positions, batch.count, values, np.uint32(step), first_write_counts, faults,
    )  # fmt: skip


def count_written(layout: Layout, batch: Batch, lines: Tensor) -> Tensor:
    """Return each table's number of written rows in a batch. lines: the rows' lines; 0 for unwritten rows."""
    written = torch.zeros(layout.num_tables, dtype=torch.int64, device=lines.device)
    program = layout.program(LINES)
    launch(layout.device, program, "count_written", batch.num_positions, 1, lines, batch.tables, batch.count, written)
    return written


def initialise_missing(batch: Batch, layout: Layout) -> None:
    """Give each row without a line a new line with initial values, in memory owned by the batch."""
    absent = batch.lines == 0
    batch.lines.copy_(torch.where(absent, allocate_lines(batch, layout, batch.num_positions), batch.lines))
    initialise_lines(batch, layout, absent)


def allocate_lines(batch: Batch, layout: Layout, count: int) -> Tensor:
    """Allocate `count` lines in memory owned by the batch. Returns their addresses."""
    memory = torch.empty(count * layout.line_bytes, dtype=torch.uint8, device=batch.lines.device)
    return batch.keep_alive(memory) + layout.line_bytes * torch.arange(count, device=memory.device)


def initialise_lines(batch: Batch, layout: Layout, flags: Tensor) -> None:
    """Write initial values to lines flagged in `flags` [positions], bool. Skips rows without a line."""
    launch(
        layout.device, layout.program(LINES), "initialise_lines", batch.num_positions, WARP, batch.hashes, batch.tables,
        batch.count, batch.lines, flags, layout.initial, SLOT_HASH,
    )  # fmt: skip


def copy_lines(layout: Layout, source: Tensor, to: Tensor) -> None:
    """Copy n lines from the addresses in one array to those in another. Skips a pair of addresses if one is 0."""
    n = len(source)
    launch(layout.device, layout.program(LINES), "copy_lines", n, layout.copy_lanes, source, to, np.uint64(n))


def decode_lines(batch: Batch, layout: Layout, positions: Tensor, memory_owner: Batch) -> Tensor:
    """Return the lines at positions [n]. 16-bit floats are decoded to float32, in memory owned by `memory_owner`."""
    inverse = batch.inverse[positions]
    if not layout.has_16bit_floats:
        return batch.lookup_lines[inverse.to(torch.int64)]
    rows = torch.empty((len(inverse), layout.dim), dtype=torch.float32, device=batch.lines.device)
    _gather(layout, _make_lookup_program(layout, torch.float32), batch, inverse, len(inverse), rows)
    return memory_owner.keep_alive(rows) + 4 * layout.dim * torch.arange(len(inverse), device=rows.device)


def copy_rows(batch: Batch, layout: Layout) -> None:
    """Give each row a new line in memory owned by the batch. Copies the row's present line, if there is one."""
    copies = allocate_lines(batch, layout, batch.num_positions)
    copy_lines(layout, batch.lines, copies)
    batch.lines.copy_(copies)


def _make_pooled_ids(batch: Batch, lookup: LookupSpan, mean: bool, weights: Tensor | None) -> np.ndarray:
    columns = 0 if lookup.feature_by_column is None else len(lookup.feature_by_column)
    bags = make_struct(
        _BAGS, offsets=lookup.bag_offsets, length=lookup.bag_length, features=lookup.feature_by_column,
        num_columns=columns, batch_size=lookup.num_bags // columns if columns else 0,
    )  # fmt: skip
    inverse = batch.inverse.data_ptr() + 4 * lookup.first_position
    return make_struct(_POOLED_IDS, inverse=inverse, weights=weights, num_bags=lookup.num_bags, is_mean=mean, bags=bags)


def _make_update_program(layout: Layout, rule_name: str, dtype: torch.dtype = torch.float32) -> Program:
    macros = {"TIERBED_RULE": make_struct_name(rule_name), "TIERBED_GRADIENTS": _TYPE_STRUCTS[dtype]}
    return layout.program("ops/cuda/update.cu", **macros)


def _get_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return grads[0].dtype if grads else torch.float32


def _reduce(kernel: str, layout: Layout, batch: Batch, gradients: LookupGradients, *arguments: Argument) -> None:
    program = layout.program("ops/cuda/sums.cu", TIERBED_GRADIENTS=_TYPE_STRUCTS[_get_dtype(gradients[0])])
    batch_gradients, sums, _keep_alive = _sum_blocks(program, layout, batch, gradients)
    launch(layout.device, program, kernel, batch.num_positions, WARP, batch_gradients, batch.count, sums, *arguments)


def _sum_blocks(
    program: Program, layout: Layout, batch: Batch, gradients: LookupGradients
) -> tuple[np.ndarray, Tensor, list[Any]]:
    """Launch `sum_blocks`. Returns (the `BatchGradients` argument, the blocks' sums, objects to keep alive)."""
    groups, grads = batch.occurrences, gradients[0]
    n, scales = batch.num_positions, _compute_scales(_make_lookup_program(layout, _get_dtype(grads)), batch, gradients)
    if len(grads) > MAX_OUTPUTS:
        grads = [torch.cat(list(grads))]
    grads = [grad if grad.data_ptr() % 16 == 0 else grad.clone() for grad in grads]  # lanes read up to 16 bytes
    batch_gradients = make_struct(
        _BATCH_GRADIENTS, count=len(grads), n=n, rows=groups.rows, offsets=groups.offsets,
        output_rows=groups.output_rows, scales=scales,
    )  # fmt: skip
    for index, (grad, lookup) in enumerate(zip(grads, batch.lookups, strict=False)):
        batch_gradients["outputs"][index] = (grad.data_ptr(), lookup.first_output_row)
    slots = n // SUM_BLOCK + 1
    sums = torch.empty(slots * layout.dim, dtype=torch.float32, device=batch.lines.device)
    launch(layout.device, program, "sum_blocks", slots if n > SUM_BLOCK else 0, WARP, batch_gradients, sums)
    return batch_gradients, sums, [grads, groups, scales]


def _make_lookup_program(layout: Layout, dtype: torch.dtype, batch: Batch | None = None) -> Program:
    """Return the program for lookups with this output dtype. batch: needed if its lines may be decoded to float32."""
    row = "Float32" if batch is not None and batch.has_float32_lines else layout.type
    return layout.program(LOOKUPS, TIERBED_GRADIENTS=_TYPE_STRUCTS[dtype], TIERBED_ROW=row)


def _gather(layout: Layout, program: Program, batch: Batch, inverse: Tensor, n: int, out: Tensor) -> None:
    launch(layout.device, program, "gather", n, layout.copy_lanes, batch.lookup_lines, inverse, np.uint64(n), out)


def _allocate_row_memory(layout: Layout, batch: Batch) -> Tensor:
    """Allocate one float32 row per warp."""
    return torch.empty(_count_warps(layout, batch) * layout.dim, dtype=torch.float32, device=batch.lines.device)


def _allocate_line_memory(layout: Layout, batch: Batch) -> Tensor:
    """Allocate one float32 line per warp if lines hold 16-bit floats."""
    size = _count_warps(layout, batch) * layout.float32_line_bytes if layout.has_16bit_floats else 0
    return torch.empty(size, dtype=torch.uint8, device=batch.lines.device)


def _count_warps(layout: Layout, batch: Batch) -> int:
    return min(-(-batch.num_positions * WARP // THREADS), layout.device.blocks) * THREADS // WARP


def _compute_scales(program: Program, batch: Batch, gradients: LookupGradients) -> Tensor | None:
    """Return the factors by which occurrences' gradients are multiplied, or None if all are 1."""
    _, means, weights = gradients
    if not any(means) and all(tensor is None for tensor in weights):
        return None
    scales = batch.empty(torch.float32)
    for lookup, mean, tensor in zip(batch.lookups, means, weights, strict=True):
        ids, part = _make_pooled_ids(batch, lookup, mean, tensor), scales[lookup.first_position :]
        launch(batch.device, program, "scale_positions", lookup.num_bags, 1, ids, part)
    return scales[batch.occurrences.order]
