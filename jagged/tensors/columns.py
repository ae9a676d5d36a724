"""FBGEMM's `permute_multi_embedding`: columns of several tensors moved to other tensors, as one op.

On a CPU a cat of parts makes each output. On other devices one gather of columns does, from indices that the device
computes, so nothing waits for the moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ...engine.checks import checked_arguments
from ...engine.errors import InputError
from .validation import INTEGERS, check_keys, is_list_of, is_traced

_ALIKE = "values: give tensors of one batch, dtype and device"
_HOST = ("cpu",)  # devices whose moves can be read


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
    op: Any = _moved if plain else move_columns
    return list(op(values, permutes, in_lengths, out_lengths, widths, False))


def _moved(
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
    columns = [one.shape[1] for one in given]
    if given[0].device.type not in _HOST:
        index = _sources(permutes, in_lengths, out_lengths, sum(columns if is_gradient else widths))
        joined = torch.cat(list(given), 1)
        zeros = joined.new_zeros(len(joined), sum(widths))
        whole = zeros.index_add(1, index, joined) if is_gradient else joined[:, index]
        return [one.clone() for one in whole.split(list(widths), 1)]
    moves: list[list[int]] = permutes.tolist()
    if is_gradient:
        sums = [given[0].new_zeros(len(given[0]), width) for width in widths]
        for source, target, first, to, count, _ in moves:
            sums[source].narrow(1, first, count).add_(given[target].narrow(1, to, count))
        return sums
    _check_moves(columns, moves, widths)
    parts: list[list[Tensor]] = [[given[0][:, :0]] for _ in widths]
    for source, target, first, _, count, _ in sorted(moves, key=itemgetter(3)):
        parts[target].append(given[source].narrow(1, first, count))
    return [torch.cat(of_output, 1) for of_output in parts]


move_columns = torch.library.custom_op("tierbed::move_columns", _moved, mutates_args=())


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


def _sources(permutes: Tensor, in_lengths: Tensor, out_lengths: Tensor, columns: int) -> Tensor:
    """For each column of all outputs, the column of all inputs that it comes from, on the device of permutes."""
    source, target, first, to, count = permutes[:, :5].long().unbind(1)
    begin = (out_lengths.cumsum(0) - out_lengths)[target] + to
    order = torch.argsort(2 * begin + (count > 0))  # moves of no columns first
    column = torch.arange(columns, device=permutes.device)
    move = order[torch.searchsorted(begin[order], column, right=True) - 1]
    return (in_lengths.cumsum(0) - in_lengths)[source[move]] + first[move] + column - begin[move]


def _check_moves(inputs: Sequence[int], moves: Sequence[Sequence[int]], outputs: Sequence[int]) -> None:
    """InputError unless moves fill each column of the outputs once. inputs, outputs: how many columns each has."""
    for row in moves:
        source, target, first, _, count, _ = row
        if not (0 <= source < len(inputs) and 0 <= target < len(outputs) and count >= 0):
            raise InputError(
                f"permutes: {row} of {len(inputs)} inputs and {len(outputs)} outputs; give moves of columns from one "
                "of the inputs to one of the outputs"
            )
        if first < 0 or first + count > inputs[source]:
            raise InputError(
                f"permutes: moves of columns {first} to {first + count}; give columns from 0 to {inputs[source]}"
            )
    ends = [0] * len(outputs)
    spans = sorted((to, count, target) for _, target, _, to, count, _ in moves)
    for to, count, output in [*spans, *((width, 0, output) for output, width in enumerate(outputs))]:
        if to != ends[output]:
            raise InputError(
                f"permutes: columns {ends[output]} to {to} of output {output} are filled by no move or by two; give "
                "one move for each column"
            )
        ends[output] += count
