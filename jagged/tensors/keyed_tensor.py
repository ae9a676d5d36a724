"""`KeyedTensor`: named dense features side by side, and functions that reorder them.

Regrouping splits each tensor once and concatenates once per group. Slicing each feature would make backward quadratic
in the number of features, because a slice's gradient is as wide as the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, Self

import torch
from torch import Tensor

from ...engine.checks import as_int
from ...engine.errors import InputError
from .jagged_tensor import TensorContainer, format_entries
from .validation import check_keys, is_empty, is_list_of, is_statically_true


class ColumnJoiner:
    """Joins the results of several lookups, with columns in the order of the features.

    sources: for each feature, the index of its lookup. dims: for each lookup, the number of columns per feature.
    """

    def __init__(self, sources: Sequence[int], dims: Sequence[int]) -> None:
        runs = [(source, len(list(run))) for source, run in groupby(sources)]
        self._run_sources = [source for source, _ in runs]
        self._widths = [[n * dim for run_source, n in runs if run_source == source] for source, dim in enumerate(dims)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all columns, [batch, sum of dims]. tensors: Each lookup's result, with its features in order."""
        if len(tensors) == 1:
            return tensors[0]
        parts = [iter(tensor.split(widths, 1)) for tensor, widths in zip(tensors, self._widths, strict=True)]
        return torch.cat([next(parts[source]) for source in self._run_sources], 1)


class KeyedTensor(TensorContainer):
    """A batch's dense features, side by side in one tensor.

    Args:
        keys: The names of the features.
        length_per_key: The number of columns of each feature.
        values: The features' columns, [batch, sum of length_per_key, ...].
        key_dim: The dimension of the columns. With 0, values are [sum of length_per_key, batch, ...]. Default: 1.
        offset_per_key, index_per_key: Ignored. TorchRec precomputes them; tierbed derives them.

    Raises:
        InputError: If arguments do not fit each other.
    """

    _tensor_fields, _context_fields = ("_values",), ("_keys", "_lengths", "_dim")
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
            values = values.view(0, 0)  # TorchRec's form of an empty batch
        self._keys, self._lengths, self._values = check_keys(keys), tuple(length_per_key), values
        if len(self._lengths) != len(self._keys) or min(self._lengths, default=0) < 0:
            raise InputError(f"length_per_key={list(length_per_key)}: give a length >= 0 for each of {self.keys()}")
        total, has_key_dim = sum(self._lengths), isinstance(values, Tensor) and values.dim() > key_dim
        if not has_key_dim or is_statically_true(values.shape[key_dim] != total):
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            expected = f"[batch, {total}]" if key_dim else f"[{total}, batch]"
            raise InputError(f"values: {shape}; give a tensor {expected}; {total} is the sum of length_per_key")

    @classmethod
    def from_tensor_list(
        cls, keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int | None = None
    ) -> Self:
        """Make a KeyedTensor from a tensor [batch, length] per key ([length, batch] with key_dim=0).

        `cat_dim` is TorchRec's name for `key_dim`; both must be equal. Raises InputError.
        """
        if not is_list_of(tensors, Tensor) or not tensors or any(tensor.dim() <= key_dim for tensor in tensors):
            raise InputError("tensors: give a tensor [batch, length] for each key, and at least one key")
        if cat_dim not in (None, key_dim):
            raise InputError(f"cat_dim={cat_dim!r}: differs from key_dim={key_dim!r}; give the same")
        return cls(keys, [tensor.shape[key_dim] for tensor in tensors], torch.cat(list(tensors), key_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Concatenate features into one tensor per group.

        Args:
            keyed_tensors: KeyedTensors (tierbed's or TorchRec's) with equal key_dim and batch size.
            groups: The keys of each output. A key may be in several groups. A key in no group gets a zero gradient.

        Returns:
            A list of tensors [batch, sum of lengths], or [sum of lengths, batch] with key_dim=0.

        Raises:
            KeyError: If a key is in no tensor.
            InputError: If two tensors share a key, or arguments do not fit each other.
        """
        are_keyed = is_list_of(keyed_tensors, object) and all(hasattr(kt, "length_per_key") for kt in keyed_tensors)
        if not are_keyed or not keyed_tensors:
            raise InputError(f"keyed_tensors={keyed_tensors!r:.80}: give a list of one or more KeyedTensors")
        if not is_list_of(groups, (list, tuple)):
            raise InputError(f"groups={groups!r:.80}: give a list of keys for each output tensor")
        dim, *dims = (tensor.key_dim() for tensor in keyed_tensors)
        if any(other_dim != dim for other_dim in dims):
            raise InputError(f"keyed_tensors have key_dim {[dim, *dims]}; give tensors of one key_dim")
        batch_sizes = [tensor.values().shape[1 - dim] if tensor.values().dim() > 1 else 1 for tensor in keyed_tensors]
        if any(is_statically_true(size != batch_sizes[0]) for size in batch_sizes):
            raise InputError(f"keyed_tensors have {batch_sizes} samples; give tensors of one batch")
        parts: dict[str, Tensor] = {}
        for tensor in keyed_tensors:
            keys, lengths, values = tensor.keys(), tensor.length_per_key(), tensor.values()
            if repeated := [key for key in keys if key in parts]:
                raise InputError(f"keyed_tensors: two of them have keys {repeated}; give each key once")
            if keys:  # a single key is not split, since backward of split would copy
                parts.update(zip(keys, values.split(lengths, dim) if len(keys) > 1 else [values], strict=True))
        if missing := [key for group in groups for key in group if key not in parts]:
            raise KeyError(f"groups: no keyed tensor has key {missing[0]!r}; they have {', '.join(parts)}")
        empty = keyed_tensors[0].values().narrow(dim, 0, 0)
        return [torch.cat([parts[key] for key in group], dim) if group else empty for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return {name: tensor} from `regroup`. `keys` are the groups' names."""
        names = check_keys(keys)
        if len(names) != len(groups):
            raise InputError(f"keys={list(keys)}: give one for each of {len(groups)} groups")
        return dict(zip(names, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """Return the features' names, in order."""
        return list(self._keys)

    def values(self) -> Tensor:
        """Return all features [batch, sum of length_per_key]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Return each key's column count."""
        return list(self._lengths)

    def key_dim(self) -> int:
        """Return the dimension along which features lie."""
        return self._dim

    def _key_indices(self) -> dict[str, int]:
        """Return {key: index}. TorchRec's modules call it."""
        return {key: index for index, key in enumerate(self._keys)}

    def offset_per_key(self) -> list[int]:
        """Return each key's first column, followed by the total column count."""
        return [*accumulate(self._lengths, initial=0)]

    def __getitem__(self, key: str) -> Tensor:
        """Return one feature, a view [batch, length]. Raises KeyError if it is missing."""
        # on Python 3.11, Dynamo cannot trace the lock of a cached_property
        columns = self._find_columns() if torch.compiler.is_dynamo_compiling() else self._columns
        if key not in columns:
            raise KeyError(f"{key!r} is not a key; keys are {', '.join(self._keys)}")
        begin, length = columns[key]
        return self._values.narrow(self._dim, begin, length)

    def to_dict(self) -> dict[str, Tensor]:
        """Return {key: feature}, views from one split."""
        return dict(zip(self._keys, self._values.split(self._lengths, self._dim) if self._keys else (), strict=True))

    @cached_property
    def _columns(self) -> dict[str, tuple[int, int]]:
        return self._find_columns()

    def _find_columns(self) -> dict[str, tuple[int, int]]:
        return dict(zip(self._keys, zip(self.offset_per_key(), self._lengths, strict=False), strict=True))

    def __str__(self) -> str:
        return format_entries(self, "KeyedTensor", lambda: [f'"{key}": {self[key].tolist()}' for key in self._keys])

    def __repr__(self) -> str:
        parts = ", ".join(f"{key!r}: {length}" for key, length in zip(self._keys, self._lengths, strict=True))
        return f"KeyedTensor({{{parts}}}, values {list(self._values.shape)} of {self._values.dtype})"
