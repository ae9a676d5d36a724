"""What a step exchanges with other ranks, by which ranks see that they run the same step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from zlib import crc32


class Script:
    """The exchanges of a step in their order, and the dense parameters whose gradients it sums, in words."""

    def __init__(self, exchanges: Sequence[str] = (), parameters: Sequence[str] = ()) -> None:
        self._exchanges, self._parameters = exchanges, parameters

    @property
    def parts(self) -> dict[str, str]:
        """Every part of it by kind and place."""
        exchanges = {f"exchange {place}": said for place, said in enumerate(self._exchanges)}
        return exchanges | {f"parameter {place}": said for place, said in enumerate(self._parameters)}

    @cached_property
    def checksum(self) -> int:
        """A number that is equal on ranks whose scripts are."""
        return crc32(repr((*self._exchanges, "", *self._parameters)).encode())


NONE = Script()  # outside of a graph's steps
