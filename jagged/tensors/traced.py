"""`TracedFeature`: one feature of a batch while a graph is traced, which does not know how many values it has."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from ...engine.errors import GraphError
from .jagged_tensor import JaggedTensor


class TracedFeature(JaggedTensor):
    """The bags offsets[0] to offsets[-1] of the values of several features.

    Its lengths and its padded form are known. What would have as many rows as it has values raises GraphError: remedy
    ends the message.
    """

    def __init__(self, values: Tensor, weights: Tensor | None, offsets: Tensor, remedy: str) -> None:
        super().__init__(values, weights, offsets=offsets)
        self._remedy = remedy

    def values(self) -> NoReturn:
        self._refuse("values")

    def weights(self) -> NoReturn:
        self._refuse("weights")

    def weights_or_none(self) -> None:
        if self._weights is not None:
            self._refuse("weights")

    def offsets(self) -> Tensor:
        """Where each bag begins, counted from the first, and at last where they end: int64 [bags + 1]."""
        return self._offsets - self._offsets[0]

    def _tensors(self) -> NoReturn:
        self._refuse("values, as an argument or a result")

    def _refuse(self, what: str) -> NoReturn:
        raise GraphError(f"{what} of one feature: build is traced without knowing how many there are; {self._remedy}")
