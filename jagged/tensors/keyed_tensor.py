"""`KeyedTensor`: dense features side by side, each with a name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from ...engine.errors import InputError
from .carrier import Carrier
from .checks import check_keys, surely
from .regroup import Keyed, regrouped


class KeyedTensor(Carrier):
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
