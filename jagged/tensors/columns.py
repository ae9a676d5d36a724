"""FBGEMM's `permute_multi_embedding`: columns of several tensors moved to other tensors, as one op.

On a CPU a native loop moves them. On other devices one gather of columns does, from indices that the device computes,
so nothing waits for the moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ...engine import _core
from ...engine.checks import checked_arguments
from ...engine.errors import InputError
from .validation import INTEGERS, check_keys, is_list_of, is_traced

_ALIKE = "values: give tensors of one batch, dtype and device"
_NATIVE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@checked_arguments("keys", "lengths", "groups")
def multi_remap_to_groups(
    keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `permute_multi_embedding` for these groups: (permutes, in_lengths, out_lengths), int32.

    keys, lengths: for each input tensor its keys, and how many columns each has. groups: for each output its keys.
    KeyError for a key that no tensor has, InputError for one that two have.
    """
    check_keys([key for of_tensor in keys for key in of_tensor])
    if [*map(len, keys)] != [*map(len, lengths)] or min((width for of in lengths for width in of), default=0) < 0:
        raise InputError(f"lengths={lengths}: give one, 0 or more, for each of {keys}")
    columns: dict[str, tuple[int, int, int]] = {}  # of each key: its tensor, its first column there, its width
    for tensor, (names, widths) in enumerate(zip(keys, lengths, strict=True)):
        for name, start, width in zip(names, accumulate(widths, initial=0), widths, strict=False):
            columns[name] = tensor, start, width
    rows: list[list[int]] = []
    uses: dict[str, list[int]] = defaultdict(list)  # the rows that take each key
    for output, group in enumerate(groups):
        end = 0
        for name in group:
            tensor, start, width = columns[name]
            uses[name].append(len(rows))
            rows.append([tensor, output, start, end, width, 0])
            end += width
    for used in uses.values():
        for row, following in pairwise(used):  # the first has the number of the next one, others minus that
            rows[row][5] = following if row == used[0] else -following
        if len(used) > 1:
            rows[used[-1]][5] = -len(rows)
    in_lengths = torch.tensor([sum(widths) for widths in lengths], dtype=torch.int32)
    out_lengths = torch.tensor([sum(columns[name][2] for name in group) for group in groups], dtype=torch.int32)
    return torch.tensor(rows, dtype=torch.int32).view(-1, 6), in_lengths, out_lengths


def permute_multi_embedding(
    values: Sequence[Tensor],
    permutes: Tensor,
    out_lengths_list: Sequence[int] | Tensor,
    in_lengths: Tensor,
    out_lengths: Tensor | Sequence[int],
) -> list[Tensor]:
    """FBGEMM's op: tensors [batch, out_lengths[o]] of columns of `values`, which are [batch, in_lengths[i]] each.

    The last three may also be in the order of FBGEMM 1.8: in_lengths, out_lengths, then the list of out_lengths.
    permutes: integers [moves, 6]. A move is (input, output, first column of the input, first column of the output,
    number of columns, jump); the jump is for FBGEMM's backward and is ignored. Moves may read the same columns, and
    have to fill each output. Where several moves read a column, their gradients are added in the order of the moves.

    InputError. On another device than a CPU, moves are not checked, since that would wait for it.
    """
    if isinstance(out_lengths_list, Tensor):
        in_lengths, out_lengths, out_lengths_list = out_lengths_list, in_lengths, out_lengths
    if not all(isinstance(one, Tensor) for one in (permutes, in_lengths, out_lengths)):
        raise InputError("permutes, in_lengths and out_lengths: give tensors of integers, as of multi_remap_to_groups")
    assert isinstance(out_lengths, Tensor)
    if not is_list_of(out_lengths_list, (int, torch.SymInt)):
        raise InputError(f"out_lengths_list={out_lengths_list!r:.80}: give a list of integers")
    widths = [int(width) for width in out_lengths_list]
    if not is_list_of(values, Tensor) or not values or any(one.dim() != 2 for one in values):
        raise InputError("values: give one tensor [batch, columns] or more")
    if len({(one.dtype, one.device) for one in values}) > 1:
        raise InputError(_ALIKE)
    if permutes.dim() != 2 or permutes.shape[1] != 6 or permutes.dtype not in INTEGERS:
        raise InputError(f"permutes: {list(permutes.shape)} of {permutes.dtype}; give integers [moves, 6]")
    traced = torch.compiler.is_compiling() or is_traced()
    on_cpu = not traced and in_lengths.device.type == out_lengths.device.type == "cpu"
    if on_cpu and ([one.shape[1] for one in values], widths) != (in_lengths.tolist(), out_lengths.tolist()):
        raise InputError("in_lengths and out_lengths: give the widths of values, and out_lengths_list as a tensor")
    # torch.func and forward gradients know torch's ops alone
    plain = not traced and (peek_interpreter_stack() or forward_ad._current_level >= 0)
    op: Any = _gathered if plain else move_columns
    return list(op(values, permutes, in_lengths, out_lengths, widths, False))


@torch.library.custom_op("tierbed::move_columns", mutates_args=())
def move_columns(
    given: Sequence[Tensor],
    permutes: Tensor,
    in_lengths: Tensor,
    out_lengths: Tensor,
    widths: Sequence[int],
    is_gradient: bool,
) -> list[Tensor]:
    """Tensors of `widths` columns, filled by moves; with is_gradient the gradients of inputs by those of outputs.

    The two are each other's gradient. A CPU does not read the lengths, other devices no shape. InputError on a CPU.
    """
    if any(len(one) != len(given[0]) for one in given):
        raise InputError(_ALIKE)
    if given[0].device.type != "cpu" or given[0].dtype not in _NATIVE:
        return [one.clone() for one in _gathered(given, permutes, in_lengths, out_lengths, widths, is_gradient)]
    kept = [one.resolve_neg().contiguous() if one.stride(1) != 1 or one.is_neg() else one for one in given]
    made = _empty(given, permutes, in_lengths, out_lengths, widths, is_gradient)
    _move(_matrices(kept), _matrices(made), permutes, len(kept[0]), kept[0].dtype, is_gradient)
    return made


def _move(sources: list[int], targets: list[int], permutes: Tensor, rows: int, dtype: Any, is_gradient: bool) -> None:
    """Move columns between `_matrices` on a CPU. Without rows it checks the moves alone. InputError."""
    moves = np.array(permutes.tolist(), np.int64)
    if not _core.move_columns(sources, targets, moves.flatten(), rows, str(dtype).removeprefix("torch."), is_gradient):
        inputs, outputs = (targets, sources) if is_gradient else (sources, targets)
        raise _wrong(inputs[2::3], moves.tolist(), outputs[2::3])


def _gathered(
    given: Sequence[Tensor], permutes: Tensor, ins: Tensor, outs: Tensor, widths: Sequence[int], is_gradient: bool
) -> Sequence[Tensor]:
    """The same by torch's ops, views of one tensor. Moves are checked on a CPU."""
    columns = [one.shape[1] for one in given]
    if given[0].device.type == "cpu":
        sources, targets = ([n for width in of for n in (0, 0, width)] for of in (columns, widths))
        _move(sources, targets, permutes, 0, torch.float32, is_gradient)
    index, joined = _sources(permutes, ins, outs, sum(columns if is_gradient else widths)), torch.cat(list(given), 1)
    zeros = joined.new_zeros(len(joined), sum(widths))
    moved = zeros.index_add(1, index, joined) if is_gradient else joined[:, index]
    return moved.split(list(widths), 1)


@move_columns.register_fake
def _empty(given: Sequence[Tensor], permutes: Any, ins: Any, outs: Any, widths: Sequence[int], _: Any) -> list[Tensor]:
    return [given[0].new_empty(given[0].shape[0], width) for width in widths]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    given, *moves, _, ctx.is_gradient = inputs
    ctx.save_for_backward(*moves)
    ctx.widths = [one.shape[1] for one in given]


def _backward(ctx: Any, grads: list[Tensor]) -> Any:
    return move_columns(grads, *ctx.saved_tensors, ctx.widths, not ctx.is_gradient), *[None] * 5


move_columns.register_autograd(_backward, setup_context=_keep)


def _matrices(tensors: Sequence[Tensor]) -> list[int]:
    return [n for one in tensors for n in (one.data_ptr(), one.stride(0) * one.element_size(), one.shape[1])]


def _sources(permutes: Tensor, in_lengths: Tensor, out_lengths: Tensor, columns: int) -> Tensor:
    """For each column of all outputs, the column of all inputs that it comes from, on the device of permutes."""
    source, target, first, to, count = permutes[:, :5].long().unbind(1)
    begin = (out_lengths.cumsum(0) - out_lengths)[target] + to
    order = torch.argsort(2 * begin + (count > 0))  # moves of no columns first
    column = torch.arange(columns, device=permutes.device)
    move = order[torch.searchsorted(begin[order], column, right=True) - 1]
    return (in_lengths.cumsum(0) - in_lengths)[source[move]] + first[move] + column - begin[move]


def _wrong(inputs: Sequence[int], moves: Sequence[Sequence[int]], outputs: Sequence[int]) -> InputError:
    """The error for moves that do not fill the outputs."""
    for row in moves:
        source, target, first, _, count, _ = row
        if not (0 <= source < len(inputs) and 0 <= target < len(outputs) and count >= 0):
            return InputError(
                f"permutes: {row} of {len(inputs)} inputs and {len(outputs)} outputs; give moves of columns from one "
                "of the inputs to one of the outputs"
            )
        if first < 0 or first + count > inputs[source]:
            return InputError(
                f"permutes: moves of columns {first} to {first + count}; give columns from 0 to {inputs[source]}"
            )
    for output, width in enumerate(outputs):
        end = 0
        for to, count in [*sorted((row[3], row[4]) for row in moves if row[1] == output), (width, 0)]:
            if to != end:
                return InputError(
                    f"permutes: columns {end} to {to} of output {output} are filled by no move or by two; give one "
                    "move for each column"
                )
            end += count
    return InputError(f"permutes: {moves}; give numbers of 32 bits")
