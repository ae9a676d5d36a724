"""FBGEMM's `permute_multi_embedding`: columns of several tensors moved to other tensors.

Moves on a CPU are read: tensors are split where moves begin and end, and the parts of an output are joined. In a trace
and on other devices one gather moves columns, from indices that the device computes, so nothing waits for the moves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...engine.checks import checked_arguments
from ...engine.errors import InputError
from .validation import INTEGERS, check_keys, is_list_of, is_traced

_ALIKE = "values: give tensors of one batch, dtype and device"


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
    have to fill each output. InputError. Moves on another device than a CPU are not checked, since that would wait.
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
    is_symbolic = torch.compiler.is_compiling() or is_traced()
    columns, in_lists = [one.shape[1] for one in values], in_lengths.device.type == out_lengths.device.type == "cpu"
    if not is_symbolic and in_lists and (columns, widths) != (in_lengths.tolist(), out_lengths.tolist()):
        raise InputError("in_lengths and out_lengths: give the widths of values, and out_lengths_list as a tensor")
    if is_symbolic or permutes.device.type != "cpu":
        index = _column_index(columns, permutes, in_lengths, out_lengths, widths)
        return list(torch.cat(list(values), 1).index_select(1, index).split(widths, 1))
    if any(len(one) != len(values[0]) for one in values):
        raise InputError(_ALIKE)
    moves = _checked_moves(permutes, columns, widths)
    ends = [{0, width} for width in columns]
    for source, _, first, _, count, _ in moves:
        ends[source] |= {first, first + count}
    cuts = [sorted(of_tensor) for of_tensor in ends]  # a slice for each move would have a gradient of the whole width
    pieces = [one.tensor_split(cut[1:-1], 1) for one, cut in zip(values, cuts, strict=True)]
    parts = [[values[0][:, :0]] for _ in widths]
    for source, target, first, _, count, _ in moves:
        begin, end = (bisect_left(cuts[source], column) for column in (first, first + count))
        parts[target] += pieces[source][begin:end]
    return [torch.cat(of_output, 1) for of_output in parts]


def _checked_moves(permutes: Tensor, columns: Sequence[int], widths: Sequence[int]) -> list[list[int]]:
    """The moves in the order of the columns that they fill. InputError unless they fill each once.

    columns, widths: how many columns each input and each output has.
    """
    moves: list[list[int]] = sorted(permutes.tolist(), key=lambda move: (move[1], move[3], move[4]))
    for move in moves:
        source, target, first, _, count, _ = move
        if not (0 <= source < len(columns) and 0 <= target < len(widths) and count >= 0):
            raise InputError(
                f"permutes: {move} of {len(columns)} inputs and {len(widths)} outputs; give moves of columns from one "
                "of the inputs to one of the outputs"
            )
        if first < 0 or first + count > columns[source]:
            raise InputError(
                f"permutes: moves of columns {first} to {first + count}; give columns from 0 to {columns[source]}"
            )
    for output, width in enumerate(widths):
        end = 0
        for to, count in [*((move[3], move[4]) for move in moves if move[1] == output), (width, 0)]:
            if to != end:
                raise InputError(
                    f"permutes: columns {end} to {to} of output {output} are filled by no move or by two; give one "
                    "move for each column"
                )
            end += count
    return moves


@torch.library.custom_op("tierbed::column_index", mutates_args=())
def _column_index(
    columns: Sequence[int], permutes: Tensor, in_lengths: Tensor, out_lengths: Tensor, widths: Sequence[int]
) -> Tensor:
    """For each column of all outputs, the column of all inputs that it comes from. InputError on a CPU.

    One op, so that a graph's step on a CPU checks the moves. Other devices are not waited for.
    """
    if permutes.device.type == "cpu":
        _checked_moves(permutes, columns, widths)
    source, target, first, to, count = permutes[:, :5].long().unbind(1)
    begin = (out_lengths.cumsum(0) - out_lengths)[target] + to
    order = torch.argsort(2 * begin + (count > 0))  # moves of no columns first
    column = torch.arange(sum(widths), device=permutes.device)
    move = order[torch.searchsorted(begin[order], column, right=True) - 1]
    return (in_lengths.cumsum(0) - in_lengths)[source[move]] + first[move] + column - begin[move]


@_column_index.register_fake
def _(columns: Any, permutes: Tensor, in_lengths: Any, out_lengths: Any, widths: Sequence[int]) -> Tensor:
    return permutes.new_empty(sum(widths), dtype=torch.int64)
