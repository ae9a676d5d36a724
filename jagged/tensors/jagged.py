"""What jagged tensors share: values in bags that lie one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...engine.errors import InputError
from .carrier import Carrier
from .checks import check_ascending, check_offsets, check_values, is_traced, refuse_trace


class Jagged(Carrier, registered=False):
    """Values [n, ...], where bag b is values[offsets[b]:offsets[b + 1]], and maybe a weight for each."""

    _fields: ClassVar[tuple[str, ...]] = ("_values", "_weights", "_offsets")
    open_leaves: ClassVar[frozenset[int]] = frozenset({0, 1})
    _values: Tensor
    _weights: Tensor | None
    _offsets: Tensor

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_values(values, weights)
        self._values, self._weights = values, weights
        self._offsets = check_offsets(values, lengths, offsets)

    def values(self) -> Tensor:
        """All values [n, ...], those of a bag together."""
        return self._values

    def weights(self) -> Tensor:
        """A weight for each of the values [n]. InputError where there are none."""
        if self._weights is None:
            raise InputError(f"this {type(self).__name__} has no weights; give weights= when it is made")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """A weight for each of the values [n], if it has them."""
        return self._weights

    def lengths(self) -> Tensor:
        """How many values each bag has, int64 [bags]."""
        return self._offsets.diff()

    def offsets(self) -> Tensor:
        """Where each bag begins, and at last where they end: int64 [bags + 1]."""
        return self._offsets

    def lengths_or_none(self) -> Tensor:
        """TorchRec's name for `lengths`, which are always known here."""
        return self.lengths()

    def offsets_or_none(self) -> Tensor:
        """TorchRec's name for `offsets`, which are always known here."""
        return self.offsets()

    def validate(self) -> None:
        """Read the offsets: InputError unless they ascend from 0 to the number of values."""
        refuse_trace("validate", "call it on what the graph is given")
        check_ascending(self._offsets.tolist(), self._values.shape[0], self._bags())

    def check_bags(self) -> None:
        """What `validate` does, on a CPU alone, and not while a graph records: it waits for nothing."""
        if self._offsets.device.type != "cpu" or is_traced():
            return
        begins, ends = self._offsets[0] == 0, self._offsets[-1] == self._values.shape[0]
        if not (begins and ends and (self._offsets.diff() >= 0).all()):
            self.validate()

    def _bags(self) -> Sequence[str] | None:
        """What a message calls each bag."""
        return None

    def _told(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        return f"values {list(self._values.shape)} of {self._values.dtype}{weighted}"
