"""`JaggedTensor`: one feature of a batch, with as many values in each sample as there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ...engine.errors import InputError
from .checks import refuse_trace
from .jagged import Jagged
from .nested import jagged_parts
from .padding import padded

_PAD = "give desired_length, to_padded_dense(50)"


class JaggedTensor(Jagged):
    """One feature of a batch: sample b has values[offsets[b]:offsets[b + 1]].

    values: [n] or [n, ...]. weights: [n]. Of lengths, integers [batch], and offsets, integers [batch + 1], one is
    enough; offsets are kept, as int64. Shapes and dtypes are checked here (InputError), what offsets hold by
    `validate`, and by a lookup.
    """

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
    ) -> Self:
        """A feature of no samples."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return cls(values, weights, offsets=torch.zeros(1, dtype=torch.int64, device=device))

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """Of one tensor [length, ...] for each sample, with weights [length] of as many samples. InputError."""
        if not values:
            raise InputError("values=[]: a batch of no samples has no dtype; use JaggedTensor.empty")
        sizes = [tensor.shape[0] for tensor in values]
        if weights is not None and [tensor.shape[0] for tensor in weights] != sizes:
            raise InputError("weights: give a list of tensors, each as long as that of values in its place")
        together = torch.cat(list(values))
        lengths = torch.tensor(sizes, device=together.device)
        return cls(together, None if weights is None else torch.cat(list(weights)), lengths)

    @classmethod
    def from_nested(cls, values: Tensor, weights: Tensor | None = None) -> Self:
        """Of torch's nested tensors of layout torch.jagged, [batch, ragged, ...]. InputError for others."""
        flat, offsets = jagged_parts("values", values)
        if weights is None:
            return cls(flat, None, offsets=offsets)
        return cls(flat, jagged_parts("weights", weights)[0], offsets=offsets)

    def to_dense(self) -> list[Tensor]:
        """The values of each sample, a list of views [length, ...]."""
        refuse_trace("to_dense", f"for a tensor of one shape, {_PAD}")
        lengths: list[int] = self.lengths().tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != self._values.shape[0]:
            self.validate()
        return list(self._values.split(lengths)) if lengths else []

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Values as [batch, desired_length, ...]: the first ones of each sample, then `padding_value`.

        desired_length: None is the longest of the batch, which a traced step does not know: GraphError.
        """
        if desired_length is None:
            refuse_trace("to_padded_dense()", _PAD)
            desired_length = max(self.lengths().tolist(), default=0)
        elif not isinstance(desired_length, int) or desired_length < 0:
            raise InputError(f"desired_length={desired_length!r}: give an integer from 0 on")
        return padded(self._values, self._offsets, desired_length, padding_value)

    def __repr__(self) -> str:
        return f"JaggedTensor(samples={self._offsets.shape[0] - 1}, {self._told()})"
