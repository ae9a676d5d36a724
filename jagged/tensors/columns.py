"""FBGEMM's `permute_multi_embedding`: one op that copies columns of several tensors to new tensors.

On a CPU, a native loop copies the columns. Other devices compute the columns' indices, so that the host does not wait.
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
from ...engine.checks import validate_arguments
from ...engine.errors import InputError
from .validation import INTEGER_DTYPES, check_keys, is_list_of, is_tracing

_MISMATCH_ERROR = "values: give tensors of one batch, dtype and device"
_NATIVE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@validate_arguments("keys", "lengths", "groups")
def multi_remap_to_groups(
    keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute which columns `permute_multi_embedding` must copy to regroup features.

    Args:
        keys: Each input tensor's keys.
        lengths: Each key's column count.
        groups: Each output tensor's keys.

    Returns:
        (permutes, in_lengths, out_lengths), int32.

    Raises:
        KeyError: If a key of `groups` is in no input.
        InputError: If two inputs share a key, or lengths do not fit the keys.
    """
    check_keys([key for tensor_keys in keys for key in tensor_keys])
    if [*map(len, keys)] != [*map(len, lengths)] or min((n for widths in lengths for n in widths), default=0) < 0:
        raise InputError(f"lengths={lengths}: give a length >= 0 for each of {keys}")
    columns: dict[str, tuple[int, int, int]] = {}  # {key: (tensor, first column in it, width)}
    for tensor_index, (names, widths) in enumerate(zip(keys, lengths, strict=True)):
        for name, start, width in zip(names, accumulate(widths, initial=0), widths, strict=False):
            columns[name] = tensor_index, start, width
    moves: list[list[int]] = []
    moves_by_key: dict[str, list[int]] = defaultdict(list)  # {key: indices of the moves that copy it}
    for output_index, group in enumerate(groups):
        end = 0
        for name in group:
            tensor_index, start, width = columns[name]
            moves_by_key[name].append(len(moves))
            moves.append([tensor_index, output_index, start, end, width, 0])
            end += width
    for indices in moves_by_key.values():
        # FBGEMM's jump: the index of the next move of the same key. It is positive only in the key's first move.
        for index, next_move in pairwise(indices):
            moves[index][5] = next_move if index == indices[0] else -next_move
        if len(indices) > 1:
            moves[indices[-1]][5] = -len(moves)
    in_lengths = torch.tensor([sum(widths) for widths in lengths], dtype=torch.int32)
    out_lengths = torch.tensor([sum(columns[name][2] for name in group) for group in groups], dtype=torch.int32)
    return torch.tensor(moves, dtype=torch.int32).view(-1, 6), in_lengths, out_lengths


def permute_multi_embedding(
    values: Sequence[Tensor],
    permutes: Tensor,
    out_lengths_list: Sequence[int] | Tensor,
    in_lengths: Tensor,
    out_lengths: Tensor | Sequence[int],
) -> list[Tensor]:
    """FBGEMM's op. Copies columns of the inputs to new tensors; `multi_remap_to_groups` computes the arguments.

    The last three arguments may also come in FBGEMM 1.8's order: in_lengths, out_lengths, out_lengths_list.

    Args:
        values: Inputs [batch, in_lengths[i]] with equal dtype and device.
        permutes: Integers [moves, 6]. A move is (input, output, first input column, first output column, number of
            columns, jump). The jump is for FBGEMM's backward and is ignored. Moves must fill each output column exactly
            once. If several moves read a column, its gradients are added in the order of the moves.
        out_lengths_list: Each output's column count.
        in_lengths: Each input's column count, as a tensor.
        out_lengths: `out_lengths_list` as a tensor.

    Returns:
        A list of tensors [batch, out_lengths[o]].

    Raises:
        InputError: If arguments do not fit each other. Moves are checked only on a CPU; on a GPU the host would wait.
    """
    if isinstance(out_lengths_list, Tensor):
        in_lengths, out_lengths, out_lengths_list = out_lengths_list, in_lengths, out_lengths
    if not all(isinstance(argument, Tensor) for argument in (permutes, in_lengths, out_lengths)):
        raise InputError("permutes, in_lengths and out_lengths: give integer tensors, as from multi_remap_to_groups")
    assert isinstance(out_lengths, Tensor)
    if not is_list_of(out_lengths_list, (int, torch.SymInt)):
        raise InputError(f"out_lengths_list={out_lengths_list!r:.80}: give a list of integers")
    widths = [int(width) for width in out_lengths_list]
    if not is_list_of(values, Tensor) or not values or any(tensor.dim() != 2 for tensor in values):
        raise InputError("values: give a list of one or more tensors [batch, columns]")
    if len({(tensor.dtype, tensor.device) for tensor in values}) > 1:
        raise InputError(_MISMATCH_ERROR)
    if permutes.dim() != 2 or permutes.shape[1] != 6 or permutes.dtype not in INTEGER_DTYPES:
        raise InputError(f"permutes: {list(permutes.shape)} of {permutes.dtype}; give integers [moves, 6]")
    is_symbolic = torch.compiler.is_compiling() or is_tracing()
    is_on_cpu = not is_symbolic and in_lengths.device.type == out_lengths.device.type == "cpu"
    if is_on_cpu and ([tensor.shape[1] for tensor in values], widths) != (in_lengths.tolist(), out_lengths.tolist()):
        raise InputError("in_lengths must equal the column counts of values; out_lengths must equal out_lengths_list")
    # torch.func and forward-mode gradients support only torch's own ops
    needs_torch_ops = not is_symbolic and (peek_interpreter_stack() or forward_ad._current_level >= 0)
    copy_columns: Any = _copy_columns if needs_torch_ops else move_columns
    return list(copy_columns(values, permutes, in_lengths, out_lengths, widths, False))


@torch.library.custom_op("tierbed::move_columns", mutates_args=())
def move_columns(
    tensors: Sequence[Tensor],
    permutes: Tensor,
    in_lengths: Tensor,
    out_lengths: Tensor,
    widths: Sequence[int],
    is_gradient: bool,
) -> list[Tensor]:
    """Copy columns to new tensors, as the moves in `permutes` say. widths: the new tensors' column counts.

    With is_gradient, compute input gradients from output gradients. The op's backward calls the op with is_gradient
    inverted. A CPU ignores the lengths; other devices ignore the tensors' shapes. Raises InputError on a CPU.
    """
    if any(len(tensor) != len(tensors[0]) for tensor in tensors):
        raise InputError(_MISMATCH_ERROR)
    if tensors[0].device.type != "cpu" or tensors[0].dtype not in _NATIVE_DTYPES:
        return [part.clone() for part in _copy_columns(tensors, permutes, in_lengths, out_lengths, widths, is_gradient)]
    sources = [t.resolve_neg().contiguous() if t.stride(1) != 1 or t.is_neg() else t for t in tensors]
    targets = _allocate_outputs(tensors, permutes, in_lengths, out_lengths, widths, is_gradient)
    _move(_describe(sources), _describe(targets), permutes, len(sources[0]), sources[0].dtype, is_gradient)
    return targets


def _move(sources: list[int], targets: list[int], permutes: Tensor, rows: int, dtype: Any, is_gradient: bool) -> None:
    """Move columns on a CPU. sources, targets: from `_describe`. With rows=0, only check moves. Raises InputError."""
    moves = np.array(permutes.tolist(), np.int64)
    if not _core.move_columns(sources, targets, moves.flatten(), rows, str(dtype).removeprefix("torch."), is_gradient):
        inputs, outputs = (targets, sources) if is_gradient else (sources, targets)
        raise _make_moves_error(inputs[2::3], moves.tolist(), outputs[2::3])


def _copy_columns(
    tensors: Sequence[Tensor], permutes: Any, in_lengths: Any, out_lengths: Any, widths: Any, is_gradient: bool
) -> Sequence[Tensor]:
    """Compute `move_columns` with torch's ops. Return views of one tensor. Moves are checked on a CPU."""
    columns = [tensor.shape[1] for tensor in tensors]
    if tensors[0].device.type == "cpu":
        sources, targets = ([n for width in sizes for n in (0, 0, width)] for sizes in (columns, widths))
        _move(sources, targets, permutes, 0, torch.float32, is_gradient)
    joined = torch.cat(list(tensors), 1)
    index = _find_source_columns(permutes, in_lengths, out_lengths, sum(columns if is_gradient else widths))
    zeros = joined.new_zeros(len(joined), sum(widths))
    return (zeros.index_add(1, index, joined) if is_gradient else joined[:, index]).split(list(widths), 1)


@move_columns.register_fake
def _allocate_outputs(
    tensors: Sequence[Tensor], permutes: Any, in_lengths: Any, out_lengths: Any, widths: Sequence[int], _: Any
) -> list[Tensor]:
    return [tensors[0].new_empty(tensors[0].shape[0], width) for width in widths]


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, *moves, _, ctx.is_gradient = inputs
    ctx.save_for_backward(*moves)
    ctx.widths = [tensor.shape[1] for tensor in tensors]


def _backward(ctx: Any, grads: list[Tensor]) -> Any:
    return move_columns(grads, *ctx.saved_tensors, ctx.widths, not ctx.is_gradient), *[None] * 5


move_columns.register_autograd(_backward, setup_context=_save_for_backward)


def _describe(tensors: Sequence[Tensor]) -> list[int]:
    """Return each tensor's address, bytes between rows, and number of columns, in one list for the native loop."""
    return [n for t in tensors for n in (t.data_ptr(), t.stride(0) * t.element_size(), t.shape[1])]


def _find_source_columns(permutes: Tensor, in_lengths: Tensor, out_lengths: Tensor, columns: int) -> Tensor:
    """Return the input column for each output column, as a tensor. Columns are numbered across all tensors."""
    source, target, source_first, target_first, count = permutes[:, :5].long().unbind(1)
    begin = (out_lengths.cumsum(0) - out_lengths)[target] + target_first
    order = torch.argsort(2 * begin + (count > 0))  # at equal positions, empty moves come first
    column = torch.arange(columns, device=permutes.device)
    move = order[torch.searchsorted(begin[order], column, right=True) - 1]
    return (in_lengths.cumsum(0) - in_lengths)[source[move]] + source_first[move] + column - begin[move]


def _make_moves_error(inputs: Sequence[int], moves: Sequence[Sequence[int]], outputs: Sequence[int]) -> InputError:
    """Return the error that names the first invalid move or the first column that is not filled exactly once."""
    for move in moves:
        source, target, first, _, count, _ = move
        if not (0 <= source < len(inputs) and 0 <= target < len(outputs) and count >= 0):
            return InputError(
                f"permutes: move {move} does not fit; give an input from 0 to {len(inputs) - 1}, an output from 0 to "
                f"{len(outputs) - 1}, and a column count >= 0"
            )
        end, width = first + count, inputs[source]
        if first < 0 or end > width:
            return InputError(f"permutes: move {move} reads columns {first} to {end}; give columns from 0 to {width}")
    for output, width in enumerate(outputs):
        end = 0
        for start, count in [*sorted((move[3], move[4]) for move in moves if move[1] == output), (width, 0)]:
            if start != end:
                return InputError(
                    f"permutes: at columns {end} to {start} of output {output}, the moves overlap or leave a gap; give "
                    "one move for each column"
                )
            end += count
    return InputError(f"permutes: {moves}; give integers that fit in 32 bits")
