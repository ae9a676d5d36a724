"""`KeyedJaggedTensor`: the features of a batch, each with as many values in each sample as there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ...engine.errors import InputError
from .checks import offsets_of, refuse_trace, surely
from .jagged_tensor import JaggedTensor
from .keyed_jagged import KeyedJagged
from .variable_batch import VariableBatchKeyedJaggedTensor


class KeyedJaggedTensor(KeyedJagged):
    """The features of a batch: key f has in sample b values[offsets[f * batch + b]:offsets[f * batch + b + 1]].

    keys: one name for each feature. values: ids [n], or [n, ...]. weights: [n]. Of lengths, integers [keys * batch],
    and offsets, integers [keys * batch + 1], one is enough; offsets are kept, as int64. Shapes, dtypes and repeated
    keys are checked here (InputError), what offsets hold by `validate`, and by a lookup.

    In a graph it is an argument as any other: batches may have any number of values. What needs the values of one key
    apart raises GraphError while `build` is traced.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(keys, values, weights, lengths, offsets)
        bags, count = self._offsets.shape[0] - 1, len(self._keys)
        if surely(bags % count != 0 if count else bags != 0):
            raise InputError(
                f"{bags} lengths, {bags + 1} offsets, for {count} keys {self.keys()}: each key has one length for each "
                "sample, and offsets begin with a 0 before them"
            )

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype = torch.int64,
        weights_dtype: torch.dtype | None = None,
    ) -> Self:
        """No keys."""
        return cls._joined([], [JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype)])

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Self:
        """TorchRec's name for what the constructor does with lengths."""
        return cls(keys, values, weights, lengths=lengths)

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> Self:
        """TorchRec's name for what the constructor does with offsets."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> Self:
        """Of features of as many samples each, all with weights or all without. InputError."""
        if not jt_dict:
            raise InputError("jt_dict={}: a batch of no keys has no dtype; use KeyedJaggedTensor.empty")
        batches = {key: jagged.offsets().shape[0] - 1 for key, jagged in jt_dict.items()}
        _check_alike("jt_dict", "samples", batches)
        return cls._joined([*jt_dict], [*jt_dict.values()])

    @classmethod
    def from_nested(cls, values: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> Self:
        """Of torch's nested tensors of layout torch.jagged, one for each key, and of weights. InputError."""
        for name, given in (("values", values), ("weights", weights or {})):
            if not isinstance(given, Mapping):
                raise InputError(f"{name}: got a {type(given).__name__}; give a dict of one nested tensor for each key")
        if weights is not None and weights.keys() != values.keys():
            raise InputError(f"weights have keys {[*weights]} and values {[*values]}; give weights for each key")
        given = weights or {}
        return cls.from_jt_dict({key: JaggedTensor.from_nested(each, given.get(key)) for key, each in values.items()})

    @classmethod
    def from_torchrec(cls, kjt: Any) -> KeyedJagged:
        """The same features, without a copy; of TorchRec's KeyedJaggedTensor, or of what has its methods.

        Where its keys differ in their numbers of bags, it is a VariableBatchKeyedJaggedTensor.
        """
        if isinstance(kjt, KeyedJagged):
            return kjt
        offsets, lengths = kjt.offsets_or_none(), kjt.lengths_or_none()
        if offsets is not None and surely(offsets.shape[0] == 0):
            offsets = None  # TorchRec's of no bags
        lengths = None if offsets is not None or lengths is None else lengths.flatten()
        parts = (kjt.keys(), kjt.values(), kjt.weights_or_none(), lengths, offsets)
        if not kjt.variable_stride_per_key():
            made: KeyedJagged = cls(*parts)
            made._batch = None if made._keys else kjt.stride()
            return made
        refuse_trace("from_torchrec of variable batch sizes", "convert what the graph is given, before its call")
        made = VariableBatchKeyedJaggedTensor(*parts, kjt.stride_per_key(), kjt.inverse_indices_or_none())
        made._batch = kjt.stride() if kjt.stride() > made.stride() else None
        return made

    @classmethod
    def concat(cls, kjt_list: Sequence[Self]) -> Self:
        """The keys of all of them, which have as many samples each, and all weights or none. InputError."""
        if not kjt_list:
            raise InputError("kjt_list=[]: give at least one KeyedJaggedTensor")
        if any(kjt.variable_stride_per_key() for kjt in kjt_list):
            raise InputError("kjt_list: keys of one differ in their numbers of bags; give such with one bag a sample")
        _check_alike("kjt_list", "samples", {str(kjt.keys()): kjt.stride() for kjt in kjt_list if kjt._keys})
        joined = cls._joined([key for kjt in kjt_list for key in kjt._keys], kjt_list)
        joined._batch = None if joined._keys else max(kjt.stride() for kjt in kjt_list)
        return joined

    def stride(self) -> int:
        """How many samples the batch has: without keys, that which it is a part of, else 0."""
        return (self._offsets.shape[0] - 1) // len(self._keys) if self._keys else self._batch or 0

    def stride_per_key(self) -> list[int]:
        return [self.stride()] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        return False

    def inverse_indices_or_none(self) -> None:
        """TorchRec's name for how samples share bags: here each sample has its own."""

    def offsets_of_keys(self) -> Sequence[Tensor]:
        bags = self.stride() if self._keys else 0
        rows = self._offsets.unfold(0, bags + 1, bags) if bags else self._offsets.expand(len(self._keys), 1)
        return (rows - rows[:, :1]).unbind()

    def _part(self, chosen: list[int], values: Tensor, weights: Tensor | None, offsets: Tensor) -> KeyedJaggedTensor:
        part = KeyedJaggedTensor([self._keys[at] for at in chosen], values, weights, offsets=offsets)
        part._batch = None if chosen else self.stride()
        return part

    @classmethod
    def _joined(cls, keys: Sequence[str], parts: Sequence[JaggedTensor | Self]) -> Self:
        """Of parts that follow each other."""
        _check_alike("weights", "weights", {at: part.weights_or_none() is not None for at, part in enumerate(parts)})
        values = torch.cat([part.values() for part in parts])
        weights = torch.cat([part.weights() for part in parts]) if parts[0].weights_or_none() is not None else None
        offsets = offsets_of(torch.cat([part.lengths() for part in parts]))
        return cls(keys, values, weights, offsets=offsets)


def _check_alike(argument: str, what: str, of: Mapping[Any, Any]) -> None:
    """InputError where parts differ in something."""
    first, *others = of.values() or (None,)
    if any(surely(other != first) for other in others):
        raise InputError(f"{argument}: parts differ in their {what}, {dict(of)}; give parts that agree")
