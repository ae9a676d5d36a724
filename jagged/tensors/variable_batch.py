"""`VariableBatchKeyedJaggedTensor`: features whose samples share bags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...engine.errors import InputError
from .checks import INTEGERS, refuse_trace
from .keyed_jagged import KeyedJagged


class VariableBatchKeyedJaggedTensor(KeyedJagged):
    """Features of a batch, each with its own number of bags: what TorchRec calls a variable stride per key.

    keys, values, weights, lengths, offsets: as of a KeyedJaggedTensor, with stride_per_key[f] bags of key f.
    stride_per_key: how many bags each key has. inverse_indices: names, and for each of them which of its bags each
    sample has, integers [names, batch]; a collection needs it, to give each sample its rows. InputError.
    """

    _fields = ("_values", "_weights", "_offsets", "_strides", "_inverse")
    open_leaves: ClassVar[frozenset[int]] = frozenset({0, 1, 2})
    _strides: Tensor
    _inverse: Tensor | None

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride_per_key: Sequence[int],
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> None:
        super().__init__(keys, values, weights, lengths, offsets)
        strides, bags = list(stride_per_key), self._offsets.shape[0] - 1
        if len(strides) != len(self._keys) or min(strides, default=0) < 0 or sum(strides) != bags:
            raise InputError(f"stride_per_key={strides}: give one for each of {self.keys()}, {bags} in all, as lengths")
        self._strides = torch.tensor(strides, dtype=torch.int64, device=values.device)
        self._inverse = None if inverse_indices is None else self._in_order(*inverse_indices)

    def validate(self) -> None:
        """Read offsets and inverse indices: InputError unless offsets ascend and each sample has a bag of its key."""
        super().validate()
        if self._inverse is None:
            return
        wrong = (self._inverse < 0) | (self._inverse >= self._strides[:, None])
        for at, sample in wrong.nonzero().tolist()[:1]:
            raise InputError(
                f"inverse_indices of key {self._keys[at]!r}, sample {sample}: {int(self._inverse[at, sample])}; give "
                f"the number of one of its {int(self._strides[at])} bags, from 0 on"
            )

    def stride(self) -> int:
        """How many samples the batch has; without inverse indices, the most bags of a key, in the whole of a part."""
        if self._inverse is not None:
            return self._inverse.shape[1]
        return max(self.stride_per_key(), default=0) if self._batch is None else self._batch

    def stride_per_key(self) -> list[int]:
        refuse_trace("stride_per_key", "use strides()")
        strides: list[int] = self._strides.tolist()
        return strides

    def strides(self) -> Tensor:
        """How many bags each key has, int64 [keys]."""
        return self._strides

    def variable_stride_per_key(self) -> bool:
        return True

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """The keys, and for each which of its bags each sample has, int64 [keys, batch], if that is known."""
        return None if self._inverse is None else (self.keys(), self._inverse)

    def offsets_of_keys(self) -> Sequence[Tensor]:
        return [self._offsets_of(at, at + 1) for at in range(len(self._keys))]

    def _in_order(self, names: Sequence[str], indices: Tensor) -> Tensor:
        """The rows of indices in the order of keys, as int64."""
        if not isinstance(indices, Tensor) or indices.dim() != 2 or indices.shape[0] != len(names):
            raise InputError(f"inverse_indices: give names and a tensor [{len(names)}, batch], a row for each of them")
        if indices.dtype not in INTEGERS:
            raise InputError(f"inverse_indices: a tensor of {indices.dtype}; give integers")
        rows = {name: row for row, name in enumerate(names)}
        if missing := [key for key in self._keys if key not in rows]:
            raise InputError(f"inverse_indices have no row for {missing}; give one for each key")
        order = [rows[key] for key in self._keys]
        if order != [*range(len(names))]:
            indices = indices[order]
        return indices.to(torch.int64)

    def _part(self, chosen: list[int], values: Tensor, weights: Tensor | None, offsets: Tensor) -> Any:
        keys, strides = [self._keys[at] for at in chosen], self.stride_per_key()
        inverse = None if self._inverse is None else (keys, self._inverse[chosen])
        kind = VariableBatchKeyedJaggedTensor
        part = kind(keys, values, weights, None, offsets, [strides[at] for at in chosen], inverse)
        part._batch = self.stride()
        return part
