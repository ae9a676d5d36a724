"""`KeyedTensor`: dense features side by side, each with a name; and functions that reorder such features.

Regrouping is one split of each tensor and one cat for each group. With a slice for each feature the backward would be
quadratic in the number of features, since the gradient of a slice has the whole width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ...engine.checks import as_int
from ...engine.errors import InputError
from .jagged_tensor import TensorContainer, printed
from .validation import check_keys, is_empty, refuse_trace, statically_true


class ColumnOrder:
    """The columns of features, computed by several lookups, in the order of the features.

    sources: the lookup of each feature, by its number. dims: how many columns each lookup has for a feature.
    """

    def __init__(self, sources: Sequence[int], dims: Sequence[int]) -> None:
        runs = [(source, len(list(run))) for source, run in groupby(sources)]
        self._order = [source for source, _ in runs]
        self._widths = [[count * dim for of, count in runs if of == source] for source, dim in enumerate(dims)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """All columns, [batch, sum of dims]. tensors: of each lookup, with its features in their order."""
        if len(tensors) == 1:
            return tensors[0]
        parts = [iter(tensor.split(widths, 1)) for tensor, widths in zip(tensors, self._widths, strict=True)]
        return torch.cat([next(parts[source]) for source in self._order], 1)


class Keyed(Protocol):
    """The methods of our KeyedTensor and TorchRec's that regrouping calls."""

    def keys(self) -> list[str]: ...

    def length_per_key(self) -> list[int]: ...

    def key_dim(self) -> int: ...

    def values(self) -> Tensor: ...


def regrouped(keyed_tensors: Sequence[Keyed], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """As `KeyedTensor.regroup`."""
    if not keyed_tensors:
        raise InputError("keyed_tensors=[]: give one KeyedTensor or more")
    dim, *dims = (tensor.key_dim() for tensor in keyed_tensors)
    if any(other != dim for other in dims):
        raise InputError(f"keyed_tensors have key_dim {[dim, *dims]}; give tensors of one key_dim")
    batches = [tensor.values().shape[1 - dim] if tensor.values().dim() > 1 else 1 for tensor in keyed_tensors]
    if any(statically_true(batch != batches[0]) for batch in batches):
        raise InputError(f"keyed_tensors have {batches} samples; give tensors of one batch")
    parts: dict[str, Tensor] = {}
    for tensor in keyed_tensors:
        keys, lengths, values = tensor.keys(), tensor.length_per_key(), tensor.values()
        if both := [key for key in keys if key in parts]:
            raise InputError(f"keyed_tensors: {both} are keys of two of them; give each key once")
        if keys:  # the backward of a split copies, even if it has one part
            parts.update(zip(keys, values.split(lengths, dim) if len(keys) > 1 else [values], strict=True))
    if missing := [key for group in groups for key in group if key not in parts]:
        raise KeyError(f"groups: no keyed tensor has key {missing[0]!r}; they have {', '.join(parts)}")
    none = keyed_tensors[0].values().narrow(dim, 0, 0)
    return [torch.cat([parts[key] for key in group], dim) if group else none for group in groups]


def multi_remap_to_groups(
    keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `permute_multi_embedding` for these groups: (permutes, in_lengths, out_lengths), int32.

    keys, lengths: for each input tensor its keys, and how many columns each has. groups: for each output its keys.
    KeyError for a key that no tensor has, InputError for one that two have.
    """
    check_keys([key for of_tensor in keys for key in of_tensor])
    columns: dict[str, tuple[int, int, int]] = {}  # of each key: its tensor, its first column there, its width
    for tensor, (names, widths) in enumerate(zip(keys, lengths, strict=True)):
        start = 0
        for name, width in zip(names, widths, strict=True):
            columns[name] = tensor, start, width
            start += width
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
    have to fill each output; on the device meta none is read. GraphError in a trace, where none can be. InputError.
    """
    refuse_trace("permute_multi_embedding", "use KeyedTensor.regroup")
    if isinstance(out_lengths_list, Tensor):
        in_lengths, out_lengths, out_lengths_list = out_lengths_list, in_lengths, out_lengths
    assert isinstance(out_lengths, Tensor)
    if permutes.is_meta:
        return [values[0].new_empty(values[0].shape[0], width) for width in out_lengths_list]
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
    outputs = []
    for output, width in enumerate(out_lengths_list):
        parts: list[Tensor] = []
        end = 0
        for tensor, _, start, first, columns, _ in moves[output]:
            if first != end:
                raise InputError(
                    f"permutes: columns {end} to {first} of output {output} are filled by no move or by two; give one "
                    "move for each column"
                )
            parts += atoms[tensor].columns(start, columns)
            end += columns
        if end != width:
            raise InputError(
                f"permutes: moves fill {end} columns of output {output}, and out_lengths is {width}; give moves that "
                "fill it"
            )
        outputs.append(torch.cat(parts, 1) if parts else values[0][:, :0])
    return outputs


class _Atoms:
    """A tensor's columns, split at each column where a move begins or ends."""

    def __init__(self, tensor: Tensor, moves: Sequence[Sequence[int]]) -> None:
        width = tensor.shape[1]
        cuts = sorted({0, width, *(cut for start, columns in moves for cut in (start, start + columns))})
        if cuts[0] < 0 or cuts[-1] > width:
            raise InputError(f"permutes: moves of columns {cuts[0]} to {cuts[-1]}; give columns from 0 to {width}")
        self._numbers = {cut: number for number, cut in enumerate(cuts)}
        self._parts = tensor.split([end - begin for begin, end in pairwise(cuts)], 1)

    def columns(self, start: int, count: int) -> Sequence[Tensor]:
        return self._parts[self._numbers[start] : self._numbers[start + count]]


class KeyedTensor(TensorContainer):
    """Dense features of a batch side by side: values [batch, sum of length_per_key].

    keys: one name for each feature. length_per_key: how many columns each has. key_dim: 0 for features one below the
    other, values [sum of length_per_key, batch]. Values may have more dimensions after these. The other arguments are
    what TorchRec computes ahead, and are computed here. InputError if they do not fit.
    """

    _fields = ("_values",)
    _values: Tensor
    _keys: tuple[str, ...]
    _lengths: tuple[int, ...]
    _dim: int

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Any = None,
        index_per_key: Any = None,
    ) -> None:
        if as_int(key_dim, 0, 1) is None:
            raise InputError(f"key_dim={key_dim!r}: give 1, or 0 for features one below the other")
        self._dim = key_dim
        if is_empty(values) and values.dim() == 1 and not keys:
            values = values.view(0, 0)  # TorchRec's way to write a batch of nothing
        self._keys, self._lengths, self._values = check_keys(keys), tuple(length_per_key), values
        if len(self._lengths) != len(self._keys) or min(self._lengths, default=0) < 0:
            raise InputError(f"length_per_key={list(length_per_key)}: give one, 0 or more, for each of {self.keys()}")
        if (
            not isinstance(values, Tensor)
            or values.dim() <= key_dim
            or statically_true(values.shape[key_dim] != sum(self._lengths))
        ):
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            total = sum(self._lengths)
            wanted = f"[batch, {total}]" if key_dim else f"[{total}, batch]"
            raise InputError(f"values: {shape}; give a tensor {wanted}, the sum of length_per_key")

    @classmethod
    def from_tensor_list(
        cls, keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int | None = None
    ) -> Self:
        """From one tensor [batch, length], or [length, batch] with key_dim=0, for each key. InputError.

        cat_dim: TorchRec's name for the same as key_dim, the default.
        """
        if not tensors or any(not isinstance(tensor, Tensor) or tensor.dim() <= key_dim for tensor in tensors):
            raise InputError("tensors: give one tensor [batch, length] or more, one for each key")
        if cat_dim not in (None, key_dim):
            raise InputError(f"cat_dim={cat_dim!r}: features lie along key_dim={key_dim!r}; give the same")
        return cls(keys, [tensor.shape[key_dim] for tensor in tensors], torch.cat(list(tensors), key_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence[Keyed], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """One tensor [batch, sum of lengths] for each group of keys, each key from the keyed tensor that has it.

        A key may be in several groups; the gradient of a key in no group is zero. With key_dim=0, tensors are
        [sum of lengths, batch]. KeyError for a key that no tensor has, InputError for one that two have.
        """
        return regrouped(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[Keyed], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """The tensors of `regroup` by name. keys: the name of each group."""
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
        """The dimension along which features lie."""
        return self._dim

    def _key_indices(self) -> dict[str, int]:
        """The number of each key; modules of TorchRec read it."""
        return {key: number for number, key in enumerate(self._keys)}

    def offset_per_key(self) -> list[int]:
        """The first column of each key, and the number of columns."""
        return [*accumulate(self._lengths, initial=0)]

    def __getitem__(self, key: str) -> Tensor:
        """One feature [batch, length], a view. KeyError if it is missing."""
        if key not in self._columns:
            raise KeyError(f"{key!r} is no key; there are {', '.join(self._keys)}")
        begin, length = self._columns[key]
        return self._values.narrow(self._dim, begin, length)

    def to_dict(self) -> dict[str, Tensor]:
        """Each feature by its key, views of one split."""
        return dict(zip(self._keys, self._values.split(self._lengths, self._dim) if self._keys else (), strict=True))

    @cached_property
    def _columns(self) -> dict[str, tuple[int, int]]:
        return dict(zip(self._keys, zip(self.offset_per_key(), self._lengths, strict=False), strict=True))

    def _context(self) -> tuple[tuple[str, ...], tuple[int, ...], int]:
        return self._keys, self._lengths, self._dim

    def _set_context(self, context: tuple[tuple[str, ...], tuple[int, ...], int]) -> None:
        self._keys, self._lengths, self._dim = context

    def __str__(self) -> str:
        return printed(self, "KeyedTensor", lambda: [f'"{key}": {self[key].tolist()}' for key in self._keys])

    def __repr__(self) -> str:
        parts = ", ".join(f"{key!r}: {length}" for key, length in zip(self._keys, self._lengths, strict=True))
        return f"KeyedTensor({{{parts}}}, values {list(self._values.shape)} of {self._values.dtype})"
