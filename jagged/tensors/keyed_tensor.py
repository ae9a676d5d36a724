"""`KeyedTensor`: dense features side by side, each with a name; and how they are regrouped.

Regrouping is one split of each tensor and one cat for each group. A slice for each feature would make the backward
quadratic in features: each has a gradient of the whole width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol, Self

import torch
from torch import Tensor

from ...engine.errors import InputError
from .jagged_tensor import TensorContainer
from .validation import check_keys, refuse_trace, surely


class Keyed(Protocol):
    """What a KeyedTensor tells of itself, TorchRec's as well."""

    def keys(self) -> list[str]: ...

    def length_per_key(self) -> list[int]: ...

    def values(self) -> Tensor: ...


def regrouped(keyed_tensors: Sequence[Keyed], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """`KeyedTensor.regroup`."""
    if not keyed_tensors:
        raise InputError("keyed_tensors=[]: give one KeyedTensor or more")
    batches = [tensor.values().shape[0] for tensor in keyed_tensors]
    if any(surely(batch != batches[0]) for batch in batches):
        raise InputError(f"keyed_tensors: they have {batches} samples; give tensors of one batch")
    parts: dict[str, Tensor] = {}
    for tensor in keyed_tensors:
        keys, lengths, values = tensor.keys(), tensor.length_per_key(), tensor.values()
        if both := [key for key in keys if key in parts]:
            raise InputError(f"keyed_tensors: {both} are keys of two of them; give each key once")
        if keys:  # the backward of a split copies, also of a split into one
            parts.update(zip(keys, values.split(lengths, 1) if len(keys) > 1 else [values], strict=True))
    if missing := [key for group in groups for key in group if key not in parts]:
        raise KeyError(f"groups: {missing[0]!r} is a key of no keyed tensor; they have {', '.join(parts)}")
    none = keyed_tensors[0].values()[:, :0]
    return [torch.cat([parts[key] for key in group], 1) if group else none for group in groups]


def multi_remap_to_groups(
    keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor, Tensor]:
    """What `permute_multi_embedding` is given for these groups: (permutes, in_lengths, out_lengths), int32.

    keys, lengths: for each input tensor its keys, and how many columns each has. groups: for each output its keys.
    KeyError for a key that no tensor has, InputError for one that two have.
    """
    check_keys([key for each in keys for key in each])
    places: dict[str, tuple[int, int, int]] = {}
    for tensor, (names, widths) in enumerate(zip(keys, lengths, strict=True)):
        start = 0
        for name, width in zip(names, widths, strict=True):
            places[name] = tensor, start, width
            start += width
    rows: list[list[int]] = []
    uses: dict[str, list[int]] = defaultdict(list)  # the rows that take each key
    for output, group in enumerate(groups):
        end = 0
        for name in group:
            tensor, start, width = places[name]
            uses[name].append(len(rows))
            rows.append([tensor, output, start, end, width, 0])
            end += width
    for used in uses.values():
        for row, following in pairwise(used):  # of the first the next one's number, of others minus that
            rows[row][5] = following if row == used[0] else -following
        if len(used) > 1:
            rows[used[-1]][5] = -len(rows)
    in_lengths = torch.tensor([sum(each) for each in lengths], dtype=torch.int32)
    out_lengths = torch.tensor([sum(places[name][2] for name in group) for group in groups], dtype=torch.int32)
    return torch.tensor(rows, dtype=torch.int32).view(-1, 6), in_lengths, out_lengths


def permute_multi_embedding(
    values: Sequence[Tensor],
    permutes: Tensor,
    out_lengths_list: Sequence[int],
    in_lengths: Tensor,
    out_lengths: Tensor,
) -> list[Tensor]:
    """Tensors [batch, out_lengths[o]] made of columns of `values`, [batch, in_lengths[i]] each: FBGEMM's op.

    permutes: integers [moves, 6]. A move is (input, output, first column there, first column here, columns, jump). The
    jump is for FBGEMM's backward, and is not looked at here. Moves may overlap where they read, and fill each output
    whole. Reads `permutes`: GraphError where a graph is traced. InputError.
    """
    refuse_trace("permute_multi_embedding", "use KeyedTensor.regroup")
    if [tensor.shape[1] for tensor in values] != in_lengths.tolist() or list(out_lengths_list) != out_lengths.tolist():
        raise InputError("in_lengths and out_lengths: give the widths of values, and out_lengths_list as a tensor")
    rows: list[list[int]] = permutes.tolist()
    for row in rows:
        if not (0 <= row[0] < len(values) and 0 <= row[1] < len(out_lengths_list) and row[4] >= 0):
            raise InputError(
                f"permutes: {row} of {len(values)} inputs and {len(out_lengths_list)} outputs; give moves of columns "
                "from one of the inputs to one of the outputs"
            )
    atoms = [_Atoms(tensor, [row[2:5:2] for row in rows if row[0] == at]) for at, tensor in enumerate(values)]
    moves: dict[int, list[list[int]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row[3]):
        moves[row[1]].append(row)
    made = []
    for output, width in enumerate(out_lengths_list):
        parts: list[Tensor] = []
        end = 0
        for tensor, _, start, place, columns, _ in moves[output]:
            if place != end:
                raise InputError(
                    f"permutes: columns {end} to {place} of output {output} come from none or from two moves"
                )
            parts += atoms[tensor].columns(start, columns)
            end += columns
        if end != width:
            raise InputError(f"permutes: output {output} has {end} columns of moves, and out_lengths says {width}")
        made.append(torch.cat(parts, 1) if parts else values[0][:, :0])
    return made


class _Atoms:
    """A tensor's columns, split where any move begins or ends."""

    def __init__(self, tensor: Tensor, moves: Sequence[Sequence[int]]) -> None:
        width = tensor.shape[1]
        cuts = sorted({0, width, *(cut for start, columns in moves for cut in (start, start + columns))})
        if cuts[0] < 0 or cuts[-1] > width:
            raise InputError(f"permutes: moves of columns {cuts[0]} to {cuts[-1]} of a tensor of {width} columns")
        self._places = {cut: place for place, cut in enumerate(cuts)}
        self._parts = tensor.split([end - begin for begin, end in pairwise(cuts)], 1)

    def columns(self, start: int, count: int) -> Sequence[Tensor]:
        return self._parts[self._places[start] : self._places[start + count]]


class KeyedTensor(TensorContainer):
    """Dense features of a batch side by side: values [batch, sum of length_per_key].

    keys: one name for each feature. length_per_key: how many columns each has. InputError where they do not fit.
    """

    _fields = ("_values",)
    _values: Tensor
    _keys: tuple[str, ...]
    _lengths: tuple[int, ...]

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._lengths, self._values = check_keys(keys), tuple(length_per_key), values
        if len(self._lengths) != len(self._keys) or min(self._lengths, default=0) < 0:
            raise InputError(f"length_per_key={list(length_per_key)}: give one, 0 or more, for each of {self.keys()}")
        if not isinstance(values, Tensor) or values.dim() != 2 or surely(values.shape[1] != sum(self._lengths)):
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(f"values: {shape}; give a tensor [batch, {sum(self._lengths)}], the sum of length_per_key")

    @classmethod
    def from_tensor_list(cls, keys: Sequence[str], tensors: Sequence[Tensor]) -> Self:
        """Of one tensor [batch, length] for each key. InputError."""
        if not tensors or any(tensor.dim() != 2 for tensor in tensors):
            raise InputError("tensors: give one tensor [batch, length] or more, one for each key")
        return cls(keys, [tensor.shape[1] for tensor in tensors], torch.cat(list(tensors), 1))

    @staticmethod
    def regroup(keyed_tensors: Sequence[Keyed], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """One tensor [batch, sum of lengths] for each group of keys, which come from any of the keyed tensors.

        A key may be in several groups; the gradient of one in none is zero. KeyError for a key that no tensor has,
        InputError for one that two have.
        """
        return regrouped(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[Keyed], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """What `regroup` gives, each tensor by the name of its group in `keys`."""
        names = check_keys(keys)
        if len(names) != len(groups):
            raise InputError(f"keys={list(keys)}: give one for each of {len(groups)} groups")
        return dict(zip(names, regrouped(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """The names of the features, in their order."""
        return list(self._keys)

    def values(self) -> Tensor:
        """All features [batch, sum of length_per_key]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """How many columns each key has."""
        return list(self._lengths)

    def key_dim(self) -> int:
        """TorchRec's name for the dimension that features lie along: the second."""
        return 1

    def offset_per_key(self) -> list[int]:
        """The first column of each key, and at last how many there are."""
        return [*accumulate(self._lengths, initial=0)]

    def __getitem__(self, key: str) -> Tensor:
        """One feature [batch, length], a view. KeyError where there is none."""
        if key not in self._columns:
            raise KeyError(f"{key!r} is no key; there are {', '.join(self._keys)}")
        begin, length = self._columns[key]
        return self._values.narrow(1, begin, length)

    def to_dict(self) -> dict[str, Tensor]:
        """Each feature by its key, views of one split."""
        return dict(zip(self._keys, self._values.split(self._lengths, 1) if self._keys else (), strict=True))

    @cached_property
    def _columns(self) -> dict[str, tuple[int, int]]:
        return dict(zip(self._keys, zip(self.offset_per_key(), self._lengths, strict=False), strict=True))

    def _context(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self._keys, self._lengths

    def _set_context(self, context: tuple[tuple[str, ...], tuple[int, ...]]) -> None:
        self._keys, self._lengths = context

    def __repr__(self) -> str:
        parts = ", ".join(f"{key!r}: {length}" for key, length in zip(self._keys, self._lengths, strict=True))
        return f"KeyedTensor({{{parts}}}, values {list(self._values.shape)} of {self._values.dtype})"
