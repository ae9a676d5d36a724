"""What keyed jagged tensors share: the features of a batch one after another, and the parts of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from ...engine.errors import InputError
from .checks import check_ascending, check_keys, offsets_of, refuse_trace
from .jagged import Jagged
from .jagged_tensor import JaggedTensor

_APART = (
    "give the graph a dict of JaggedTensors, one for each key, or let an EmbeddingCollection have that feature padded, "
    "padded={key: length}"
)


class KeyedJagged(Jagged, registered=False):
    """Features of a batch: the bags of the first key, then those of the second, and so on."""

    _keys: tuple[str, ...]
    _batch: int | None = None  # of a part that does not say it by itself: how many samples the whole has

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)
        self._keys = check_keys(keys)

    @abstractmethod
    def stride(self) -> int:
        """How many samples the batch has."""

    @abstractmethod
    def stride_per_key(self) -> list[int]:
        """How many bags each key has."""

    @abstractmethod
    def variable_stride_per_key(self) -> bool:
        """Whether keys differ in their numbers of bags."""

    @abstractmethod
    def offsets_of_keys(self) -> Sequence[Tensor]:
        """The offsets of each key, from 0 on: int64 [bags of it + 1]."""

    @abstractmethod
    def _part(self, chosen: list[int], values: Tensor, weights: Tensor | None, offsets: Tensor) -> Self:
        """Such a tensor of the keys of these numbers, of the same batch."""

    def keys(self) -> list[str]:
        """The names of the features, in their order."""
        return list(self._keys)

    def length_per_key(self) -> list[int]:
        """How many values each key has."""
        return [end - begin for begin, end in pairwise(self._bounds)]

    def offset_per_key(self) -> list[int]:
        """Where the values of each key begin, and at last where they end."""
        return list(self._bounds)

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature, a view. KeyError where there is none."""
        if key not in self._index:
            raise KeyError(f"{key!r} is no key; there are {', '.join(self._keys)}")
        at = self._index[key]
        begin, end = self._bounds[at : at + 2]
        weights = None if self._weights is None else self._weights[begin:end]
        return JaggedTensor(self._values[begin:end], weights, offsets=self._offsets_of(at, at + 1))

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Each feature by its key, views of one split."""
        parts = zip(*self._split(self.length_per_key()), self.offsets_of_keys(), strict=True)
        made = (JaggedTensor._unflatten(part, None) for part in parts)  # parts of what was checked
        return dict(zip(self._keys, made, strict=True))

    def split(self, segments: Sequence[int]) -> list[Self]:
        """Views of the first segments[0] keys, of the next segments[1], and so on, to the last. InputError."""
        if min(segments, default=0) < 0 or sum(segments) != len(self._keys):
            raise InputError(f"segments={list(segments)}: give numbers of keys whose sum is {len(self._keys)}")
        spans = [*pairwise(accumulate(segments, initial=0))]
        sizes = [self._bounds[end] - self._bounds[begin] for begin, end in spans]
        parts = zip(spans, *self._split(sizes), strict=True)
        return [
            self._part([*range(begin, end)], values, weights, self._offsets_of(begin, end))
            for (begin, end), values, weights in parts
        ]

    def permute(self, indices: Sequence[int]) -> Self:
        """A copy with the keys of these numbers, in this order, each once. InputError.

        No lookup needs it: a collection takes its features from any keys in any order.
        """
        chosen = [range(len(self._keys))[index] for index in indices]
        check_keys([self._keys[index] for index in chosen])
        sizes = self.length_per_key()
        values = _taken(self._values, sizes, chosen)
        weights = None if self._weights is None else _taken(self._weights, sizes, chosen)
        lengths = _taken(self.lengths(), self.stride_per_key(), chosen)
        return self._part(chosen, values, weights, offsets_of(lengths))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {key: at for at, key in enumerate(self._keys)}

    @cached_property
    def _firsts(self) -> list[int]:
        """Which bag is the first of each key, and at last how many there are."""
        return [*accumulate(self.stride_per_key(), initial=0)]

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the values of each key begin, and at last where they end."""
        refuse_trace("the number of values of one key", _APART)
        bounds: list[int] = self._offsets[self._firsts].tolist()
        try:
            check_ascending(bounds, self._values.shape[0])
        except InputError:
            self.validate()  # which tells the bag
        return bounds

    def _split(self, sizes: list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Values and weights in parts of these sizes."""
        values = self._values.split(sizes) if sizes else ()
        return values, [None] * len(values) if self._weights is None else self._weights.split(sizes) if sizes else ()

    def _offsets_of(self, begin: int, end: int) -> Tensor:
        """The offsets of keys number `begin` to `end`, from 0 on."""
        return self._offsets[self._firsts[begin] : self._firsts[end] + 1] - self._bounds[begin]

    def _bags(self) -> list[str]:
        counts = zip(self._keys, self.stride_per_key(), strict=True)
        return [f"key {key!r}, sample {sample}" for key, count in counts for sample in range(count)]

    def _context(self) -> tuple[tuple[str, ...], int | None]:
        return self._keys, self._batch

    def _set_context(self, context: tuple[tuple[str, ...], int | None]) -> None:
        self._keys, self._batch = context

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.keys()}, stride={self.stride()}, {self._told()})"


def _taken(tensor: Tensor, sizes: list[int], chosen: list[int]) -> Tensor:
    """The chosen ones of parts of these sizes."""
    parts = tensor.split(sizes) if sizes else ()
    return torch.cat([tensor[:0], *(parts[at] for at in chosen)])
