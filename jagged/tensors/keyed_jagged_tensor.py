"""`KeyedJaggedTensor`: the features of a batch, each with any number of values per sample.

In a `VariableBatchKeyedJaggedTensor`, keys differ in bag count, and samples may share a bag.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...engine.errors import InputError
from .jagged_tensor import JaggedBase, JaggedTensor, format_bags, format_entries, join_in_braces
from .validation import (
    check_all_equal,
    check_ascending,
    check_eager,
    check_integers,
    check_keys,
    check_type,
    is_list_of,
    is_statically_true,
    is_tracing,
    lengths_to_offsets,
    reorder_inverse_indices,
    select_and_concat,
)

_SPLIT_REMEDY = (
    "pass the batch to the graph as an argument: a tierbed.jagged.KeyedJaggedTensor (the graph then splits it; "
    "from_torchrec converts TorchRec's) or a dict of JaggedTensors"
)


class KeyedJaggedTensor(JaggedBase):
    """The features of a batch. Sample b of key f is values[offsets[f * batch + b]:offsets[f * batch + b + 1]].

    The constructor checks shapes, dtypes and repeated keys. `validate` and lookups check the numbers in offsets.
    A graph accepts KeyedJaggedTensors as arguments. Batches may differ in their number of values. If the graph's
    `build` reads single keys, the graph splits the batch before each call. On a GPU, the split waits for the offsets.
    If you give `stride_per_key_per_rank`, `stride_per_key` or `inverse_indices`, the constructor returns a
    `VariableBatchKeyedJaggedTensor`.

    Args:
        keys: The names of the features.
        values: The ids of all bags, [n] or [n, ...]. A bag is the list of one sample's ids for one key.
        weights: One weight per value, [n].
        lengths: The number of values in each bag, integers [keys * batch]. Give either lengths or offsets.
        offsets: The index of each bag's first value, followed by n. Integers [keys * batch + 1], stored as int64.
        stride: The number of samples. Used only if the batch has no keys or has variable batch sizes.
        stride_per_key_per_rank: The number of bags for each key and rank.
        stride_per_key: The number of bags for each key.
        inverse_indices: A pair (keys, integers [keys, batch]). A row holds the index of each sample's bag for one key.
        length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: Ignored. TorchRec stores
            these precomputed numbers; tierbed computes them from the offsets.

    Raises:
        InputError: If shapes or key counts do not match, a dtype is wrong, or a key is repeated.
    """

    _context_fields = ("_keys", "_batch")
    _keys: tuple[str, ...]
    _batch: int | None = None  # sample count, if it does not follow from the number of bags

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Any = None,
        lengths_offset_per_key: Any = None,
        offset_per_key: Any = None,
        index_per_key: Any = None,
        jt_dict: Any = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> None:
        per_rank, strides = stride_per_key_per_rank, stride_per_key
        if per_rank is not None or strides is not None or inverse_indices is not None:
            arguments = keys, values, weights, lengths, offsets
            if per_rank is not None:
                strides = [sum(bags) for bags in (per_rank.tolist() if isinstance(per_rank, Tensor) else per_rank)]
            elif strides is None:
                strides = KeyedJaggedTensor(*arguments).stride_per_key()
            self.__class__ = VariableBatchKeyedJaggedTensor
            VariableBatchKeyedJaggedTensor.__init__(self, *arguments, strides, inverse_indices)  # type: ignore[arg-type]
            if per_rank is not None and len({*map(len, per_rank)}) == 1:
                self._strides = torch.as_tensor(per_rank, dtype=torch.int64, device="cpu")
            self._batch = stride
            return
        super().__init__(values, weights, lengths, offsets)
        self._keys = check_keys(keys)
        num_bags, num_keys = self._offsets.shape[0] - 1, len(self._keys)
        self._batch = None if num_keys else stride
        if is_statically_true(num_bags % num_keys != 0 if num_keys else num_bags != 0):
            problem = f"got {num_bags} lengths (or {num_bags + 1} offsets) for {num_keys} keys {self.keys()}"
            raise InputError(f"{problem}; give keys * batch lengths, or keys * batch + 1 offsets")

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype = torch.int64,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        """Return a batch without keys.

        Args:
            is_weighted, device, values_dtype, weights_dtype: As for `JaggedTensor.empty`.
            lengths_dtype: Ignored, since offsets are always int64.
        """
        return _concat_parts([], [JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype)])

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """Return a batch with the sample count of `kjt` and no keys.

        If `device` is given, return uninitialized tensors with equal shapes on that device.
        """
        check_type("kjt", kjt, KeyedJaggedTensor)
        if device is not None:
            return kjt._map_tensors(lambda tensor: torch.empty_like(tensor, device=device))
        weights = None if kjt._weights is None else kjt._weights[:0].clone()
        return kjt._select([], kjt._values[:0].clone(), weights, kjt._offsets.new_zeros(1))

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Construct from lengths and call `sync()`."""
        strides = stride, stride_per_key_per_rank
        return KeyedJaggedTensor(keys, values, weights, lengths, None, *strides, inverse_indices=inverse_indices).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Construct from offsets and call `sync()`."""
        strides = stride, stride_per_key_per_rank
        return KeyedJaggedTensor(keys, values, weights, None, offsets, *strides, inverse_indices=inverse_indices).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Make a batch from {key: feature}. Either all features have weights, or none has.

        If features differ in sample count, the batch has variable batch sizes. Raises InputError for an empty dict.
        """
        if not isinstance(jt_dict, Mapping) or not all(isinstance(jt, JaggedTensor) for jt in jt_dict.values()):
            raise InputError(f"jt_dict={jt_dict!r:.80}: give a dict of one JaggedTensor for each key")
        if not jt_dict:
            raise InputError("jt_dict={}: a batch without keys has no dtype; use KeyedJaggedTensor.empty")
        batch_sizes = [jagged.offsets().shape[0] - 1 for jagged in jt_dict.values()]
        is_variable = any(is_statically_true(size != batch_sizes[0]) for size in batch_sizes)
        strides = [[size] for size in batch_sizes] if is_variable else None
        return _concat_parts([*jt_dict], [*jt_dict.values()], strides).sync()

    @staticmethod
    def from_nested(values: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> KeyedJaggedTensor:
        """Make a batch from nested tensors of layout torch.jagged. Raises InputError for other layouts or keys.

        `values` and `weights` are {key: nested tensor} with the same keys.
        """
        for name, argument in (("values", values), ("weights", weights or {})):
            if not isinstance(argument, Mapping):
                raise InputError(f"{name}: got a {type(argument).__name__}; give a dict with a nested tensor per key")
        if weights is not None and weights.keys() != values.keys():
            raise InputError(f"values have keys {[*values]}, but weights have keys {[*weights]}; give the same keys")
        parts = {key: JaggedTensor.from_nested(values[key], weights[key] if weights else None) for key in values}
        return KeyedJaggedTensor.from_jt_dict(parts)

    @staticmethod
    def from_torchrec(kjt: Any) -> KeyedJaggedTensor:
        """Convert TorchRec's KeyedJaggedTensor, or an object with its methods, without copying tensors."""
        if isinstance(kjt, KeyedJaggedTensor):
            return kjt
        if not hasattr(kjt, "inverse_indices_or_none"):
            raise InputError(f"kjt={kjt!r:.80}: give a KeyedJaggedTensor of TorchRec")
        offsets, lengths = kjt.offsets_or_none(), kjt.lengths_or_none()
        if offsets is not None and is_statically_true(offsets.shape[0] == 0):
            offsets = None  # TorchRec allows empty offsets for a batch without bags
        lengths = None if offsets is not None or lengths is None else lengths.flatten()
        arguments = (kjt.keys(), kjt.values(), kjt.weights_or_none(), lengths, offsets)
        inverse_indices, per_rank = kjt.inverse_indices_or_none(), None
        if kjt.variable_stride_per_key() or inverse_indices is not None:
            check_eager("from_torchrec of variable batch sizes", "convert the graph's arguments, before the call")
            per_rank = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
        result = KeyedJaggedTensor(*arguments, stride_per_key_per_rank=per_rank, inverse_indices=inverse_indices)
        if result.variable_stride_per_key() or not result._keys:
            result._batch = kjt.stride() if kjt.stride() > result.stride() else None
        return result

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Concatenate the keys of batches with equal sample counts.

        Raises InputError unless weights, variable batch sizes and inverse indices are in all batches or in none.
        """
        if not is_list_of(kjt_list, KeyedJaggedTensor) or not kjt_list:
            raise InputError(f"kjt_list={kjt_list!r:.80}: give a list of one or more KeyedJaggedTensors")
        is_variable = kjt_list[0].variable_stride_per_key()
        is_variable_by_keys = {str(kjt.keys()): kjt.variable_stride_per_key() for kjt in kjt_list}
        check_all_equal("kjt_list", "variable_stride_per_key()", is_variable_by_keys)
        keys = [key for kjt in kjt_list for key in kjt._keys]
        inverses = [kjt.inverse_indices_or_none() for kjt in kjt_list]
        check_all_equal("kjt_list", "inverse indices", {i: inverse is not None for i, inverse in enumerate(inverses)})
        if not is_variable or inverses[0] is not None:
            sample_counts = {str(kjt.keys()): kjt.stride() for kjt in kjt_list if is_variable or kjt._keys}
            check_all_equal("kjt_list", "samples", sample_counts)
        strides = [stride for kjt in kjt_list for stride in kjt.stride_per_key_per_rank()] if is_variable else None
        inverse = None if None in inverses else (keys, torch.cat([pair[1] for pair in inverses if pair is not None]))
        result = _concat_parts(keys, kjt_list, strides, inverse)
        if not is_variable and not keys:
            result._batch = max(kjt.stride() for kjt in kjt_list)
        return result

    def stride(self) -> int:
        """Return the number of samples. A batch without keys has the count of the batch it was taken from, or 0."""
        return (self._offsets.shape[0] - 1) // len(self._keys) if self._keys else self._batch or 0

    def stride_per_key(self) -> list[int]:
        """Return each key's number of bags."""
        return [self.stride()] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """True if keys may differ in bag count."""
        return False

    def split_offsets(self) -> Sequence[Tensor]:
        """Return each key's offsets, shifted to start at 0."""
        stride = self.stride() if self._keys else 0
        offsets = self._offsets.unfold(0, stride + 1, stride) if stride else self._offsets.expand(len(self._keys), 1)
        return (offsets - offsets[:, :1]).unbind()

    def split_by_key(self) -> KeyedJaggedTensor:
        """Return the batch as a pytree with a leaf per key, for a graph whose `build` splits the values by key."""
        values, weights = self._split(range(1, len(self._keys) + 1))
        parts = values if self._weights is None else (*values, *weights)
        return SplitKeyedJaggedTensor._unflatten([self._offsets, *parts], self._context())

    def _select(self, indices: list[int], values: Tensor, weights: Tensor | None, offsets: Tensor) -> KeyedJaggedTensor:
        """Return a batch with only the keys at these indices."""
        context = tuple(self._keys[index] for index in indices), None if indices else self.stride()
        return KeyedJaggedTensor._unflatten((values, weights, offsets), context)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the number of bags per key and rank, or [] if all keys have equally many bags."""
        return []

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Return (keys, int64 indices) or None. For keys[k], the bag of sample i has the number indices[k, i]."""
        return None

    def keys(self) -> list[str]:
        """Return the features' names, in order."""
        return list(self._keys)

    def length_per_key(self) -> list[int]:
        """Return each key's value count."""
        return [end - begin for begin, end in pairwise(self._value_bounds)]

    def offset_per_key(self) -> list[int]:
        """Return the index at which each key's values begin, then the last key's end."""
        return list(self._value_bounds)

    def length_per_key_or_none(self) -> list[int] | None:
        """Return `length_per_key()` if the offsets have been read, else None."""
        return self.length_per_key() if "_value_bounds" in vars(self) else None

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return `offset_per_key()` if the offsets have been read, else None."""
        return self.offset_per_key() if "_value_bounds" in vars(self) else None

    def to(self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Self:
        """Return a copy on another device.

        Args:
            device, non_blocking: As in `torch.Tensor.to`.
            dtype: The new dtype of the weights. Values keep their dtype.
        """
        result = super().to(device, non_blocking)
        return result if dtype is None or self._weights is None else result._cast(dtype)

    def _cast(self, dtype: torch.dtype) -> Self:
        """Convert this object's weights in place. The weights must exist. Return self."""
        self._weights = self.weights().to(dtype)
        return self

    def sync(self) -> Self:
        """Read the offsets, so that later calls do not wait for the device. Does nothing while a graph is traced."""
        if not is_tracing():
            self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Discard the numbers that `sync` read."""
        vars(self).pop("_value_bounds", None)
        return self

    def index_per_key(self) -> dict[str, int]:
        """Return {key: index}."""
        return dict(self._index)

    _key_indices = index_per_key  # TorchRec's modules call this method

    def lengths_offset_per_key(self) -> list[int]:
        """Return the index of each key's first bag, followed by the total number of bags."""
        return list(self._bag_bounds)

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Return `inverse_indices_or_none()`. Raises InputError if there are none."""
        if (inverse := self.inverse_indices_or_none()) is None:
            raise InputError(f"this {type(self).__name__} has no inverse_indices; give them to its constructor")
        return inverse

    def flatten_lengths(self) -> Self:
        """Return self, since lengths are always 1-D."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_stride_per_key_per_rank":  # TorchRec's managed collision module reads it
            return self.stride_per_key_per_rank() or None
        if name.startswith("dist_"):
            reason = "ranks exchange the ids of a lookup by themselves; give world= to the collection"
            raise AttributeError(f"{type(self).__name__} has no {name}: {reason}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature, a view. Raises KeyError if it is missing."""
        if key not in self._index:
            raise KeyError(f"{key!r} is not a key; keys are {', '.join(self._keys)}")
        index = self._index[key]
        return JaggedTensor(*self._slice_key(index), offsets=self._slice_offsets(index, index + 1))

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return {key: feature}, as views. `compute_offsets` is ignored, since offsets are always known."""
        parts = zip(*self._split(range(1, len(self._keys) + 1)), self.split_offsets(), strict=True)
        features = (JaggedTensor._unflatten(part, ()) for part in parts)  # the constructor checked these tensors
        return dict(zip(self._keys, features, strict=True))

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Return views of the first segments[0] keys, the next segments[1] keys, and so on.

        As in TorchRec, keys after the last segment are left out. Raises InputError if there are too few keys.
        """
        ends = [*accumulate(check_integers("segments", segments), initial=0)]
        if min(segments, default=0) < 0 or ends[-1] > len(self._keys):
            raise InputError(f"segments={list(segments)}: give key counts that sum to at most {len(self._keys)}")
        parts = zip(pairwise(ends), *self._split([*ends[1:], len(self._keys)]), strict=False)
        return [self._select([*range(*span)], ids, weights, self._slice_offsets(*span)) for span, ids, weights in parts]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Return a copy with the selected keys, in the given order. Collections accept any order without it.

        Args:
            indices: The indices of the keys to copy. An index may repeat. Raises IndexError if one is out of range.
            indices_tensor: Ignored. In TorchRec, this tensor holds the same indices.
        """
        selected = [range(len(self._keys))[index] for index in check_integers("indices", indices)]
        values, weights = self._split(range(1, len(self._keys) + 1))
        lengths = self.lengths()
        parts = lengths.split(self.stride_per_key()) if self._keys else ()
        return self._select(
            selected,
            select_and_concat(self._values[:0], values, selected),
            None if self._weights is None else select_and_concat(self._weights[:0], weights, selected),
            lengths_to_offsets(select_and_concat(lengths[:0], parts, selected)),
        )

    @cached_property
    def _index(self) -> dict[str, int]:
        return {key: index for index, key in enumerate(self._keys)}

    @cached_property
    def _bag_bounds(self) -> list[int]:
        return [*accumulate(self.stride_per_key(), initial=0)]

    @cached_property
    def _value_bounds(self) -> list[int]:
        """The index at which each key's values begin, then the last key's end. On meta, values are divided evenly."""
        check_eager("the number of values of one key", _SPLIT_REMEDY)
        if self._offsets.is_meta:
            length, remainder = divmod(self._values.shape[0], len(self._keys) or 1)
            return [0, *(remainder + length * index for index in range(1, len(self._keys) + 1))]
        bounds: list[int] = self._offsets[self._bag_bounds].tolist()
        try:
            check_ascending(bounds, self._values.shape[0])
        except InputError:
            self.validate()  # raises an error that names the bag
        return bounds

    def _slice_key(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Return the values and weights of one key, given its index."""
        span = slice(*self._value_bounds[index : index + 2])
        return self._values[span], None if self._weights is None else self._weights[span]

    def _split(self, ends: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Split values and weights at these key indices. Part i holds the keys from ends[i - 1] (or 0) to ends[i]."""
        sizes = [self._value_bounds[end] - self._value_bounds[begin] for begin, end in pairwise([0, *ends])]
        if self._weights is None or not sizes:
            return self._values.split(sizes) if sizes else (), [None] * len(sizes)
        return self._values.split(sizes), self._weights.split(sizes)

    def _slice_offsets(self, begin: int, end: int) -> Tensor:
        """Return the offsets of keys `begin` to `end` (exclusive), shifted to start at 0."""
        offsets = self._offsets[self._bag_bounds[begin] : self._bag_bounds[end] + 1]
        return offsets - offsets[0]

    def _bag_names(self) -> list[str]:
        counts = zip(self._keys, self.stride_per_key(), strict=True)
        return [f"key {key!r}, sample {sample}" for key, count in counts for sample in range(count)]

    def __str__(self) -> str:
        return format_entries(self, "KeyedJaggedTensor", lambda: [*map(self._format_key, range(len(self._keys)))])

    def _format_key(self, index: int) -> str:
        first, last = self._bag_bounds[index : index + 2]
        parts = format_bags(self._values, self._weights, self._offsets[first : last + 1])
        return f'"{self._keys[index]}": ' + (parts[0] if self._weights is None else join_in_braces(parts, "\n        "))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.keys()}, stride={self.stride()}, {self._describe()})"


def _concat_parts(
    keys: Sequence[str],
    parts: Sequence[JaggedBase],
    strides: Sequence[Sequence[int]] | None = None,
    inverse_indices: tuple[Sequence[str], Tensor] | None = None,
) -> KeyedJaggedTensor:
    """Concatenate parts to one batch. strides: number of bags per key and rank."""
    check_all_equal("weights", "weights", {i: part.weights_or_none() is not None for i, part in enumerate(parts)})
    values = torch.cat([part.values() for part in parts])
    weights = torch.cat([part.weights() for part in parts]) if parts[0].weights_or_none() is not None else None
    offsets = lengths_to_offsets(torch.cat([part.lengths() for part in parts]))
    return KeyedJaggedTensor(
        keys, values, weights, offsets=offsets, stride_per_key_per_rank=strides, inverse_indices=inverse_indices
    )


class VariableBatchKeyedJaggedTensor(KeyedJaggedTensor):
    """A batch whose keys may differ in bag count (TorchRec's variable stride per key).

    Args:
        keys, values, weights, lengths, offsets: As for `KeyedJaggedTensor`, with stride_per_key[f] bags for key f.
        stride_per_key: The number of bags for each key.
        inverse_indices: A pair (key names, integer tensor [names, batch]). Element [k, s] is the index of sample
            s's bag among the bags of key k. A collection needs it to return one row per sample.

    Raises:
        InputError: If shapes or key counts do not match, a dtype is wrong, or a key is repeated.
    """

    _tensor_fields = ("_values", "_weights", "_offsets", "_strides", "_inverse")
    open_leaves: ClassVar[Container[int]] = frozenset({0, 1, 2})
    _strides: Tensor  # [keys, ranks], on the CPU
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
        JaggedBase.__init__(self, values, weights, lengths, offsets)
        self._keys = check_keys(keys)
        strides, num_bags = list(stride_per_key), self._offsets.shape[0] - 1
        if len(strides) != len(self._keys) or min(strides, default=0) < 0 or sum(strides) != num_bags:
            raise InputError(f"stride_per_key={strides}: give a bag count for each of {self.keys()}, {num_bags} in all")
        self._strides = torch.tensor(strides, dtype=torch.int64).view(-1, 1)
        self._inverse = None if inverse_indices is None else reorder_inverse_indices(self._keys, *inverse_indices)

    def validate(self) -> None:
        """Raise InputError unless offsets ascend and each sample refers to a bag of each key. Waits for a GPU."""
        super().validate()
        if self._inverse is None:
            return
        invalid = (self._inverse < 0) | (self._inverse >= self.strides()[:, None])
        for index, sample in invalid.nonzero().tolist()[:1]:
            subject = f"inverse_indices of key {self._keys[index]!r}, sample {sample}"
            bag, num_bags = int(self._inverse[index, sample]), int(self.strides()[index])
            raise InputError(f"{subject}: got bag {bag}; give a bag number >= 0 and < {num_bags}")

    def stride(self) -> int:
        """Return the number of samples. Without inverse indices, this is the largest bag count of any key."""
        if self._inverse is not None:
            return self._inverse.shape[1]
        return max(self.stride_per_key(), default=0) if self._batch is None else self._batch

    def stride_per_key(self) -> list[int]:
        return [sum(bag_counts) for bag_counts in self.stride_per_key_per_rank()]

    def stride_per_key_per_rank(self) -> list[list[int]]:
        check_eager("stride_per_key", "use strides()")
        return self._strides.tolist()

    def strides(self) -> Tensor:
        """Return each key's bag count, int64 [keys]."""
        return self._strides.sum(1).to(self.device())

    def split_by_key(self) -> KeyedJaggedTensor:
        return self

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        result = super()._map_tensors(function)
        result._strides = self._strides.clone()  # strides stay on the CPU
        return result

    def variable_stride_per_key(self) -> bool:
        return True

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        return None if self._inverse is None else (self.keys(), self._inverse)

    def split_offsets(self) -> Sequence[Tensor]:
        return [self._slice_offsets(index, index + 1) for index in range(len(self._keys))]

    def _select(self, indices: list[int], values: Tensor, weights: Tensor | None, offsets: Tensor) -> Any:
        keys = tuple(self._keys[index] for index in indices)
        inverse = None if self._inverse is None else self._inverse[indices]
        return self._unflatten((values, weights, offsets, self._strides[indices], inverse), (keys, self.stride()))


class SplitKeyedJaggedTensor(KeyedJaggedTensor):
    """A KeyedJaggedTensor that stores a tensor per key. `values()` and `weights()` copy these tensors into one."""

    _cached_fields = ("_values", "_weights")
    open_leaves: ClassVar[Container[int]] = range(1, 1 << 32)
    _parts: list[Any]  # each key's values, then each key's weights if there are any

    @cached_property
    def _values(self) -> Any:  # type: ignore[override]
        return torch.cat(self._parts[: len(self._keys)])

    @cached_property
    def _weights(self) -> Any:  # type: ignore[override]
        return torch.cat(weights) if (weights := self._parts[len(self._keys) :]) else None

    def split_by_key(self) -> KeyedJaggedTensor:
        return self

    def _cast(self, dtype: torch.dtype) -> Self:
        num_keys = len(self._keys)
        self._parts[num_keys:] = [weights.to(dtype) for weights in self._parts[num_keys:]]
        return self

    @cached_property
    def _value_bounds(self) -> list[int]:
        return [*accumulate((part.shape[0] for part in self._parts[: len(self._keys)]), initial=0)]

    def _slice_key(self, index: int) -> tuple[Tensor, Tensor | None]:
        weights = self._parts[len(self._keys) :]
        return self._parts[index], weights[index] if weights else None

    def _split(self, ends: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        spans, weights = [*pairwise([0, *ends])], self._parts[len(self._keys) :]
        values = [select_and_concat(self._parts[0][:0], self._parts, range(*span)) for span in spans]
        if not weights:
            return values, [None] * len(spans)
        return values, [select_and_concat(weights[0][:0], weights, range(*span)) for span in spans]

    def _tensors(self) -> list[Any]:
        return [self._offsets, *self._parts]

    def _set_tensors(self, tensors: Iterable[Any]) -> None:
        self._offsets, *self._parts = tensors
        for cached in self._cached_fields:
            vars(self).pop(cached, None)

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        keys = [pytree.GetAttrKey("offsets"), *map(pytree.MappingKey, self._keys)]
        keys += [pytree.MappingKey(f"weights of {key}") for key in self._keys[: len(self._parts) - len(self._keys)]]
        return list(zip(keys, self._tensors(), strict=True)), self._context()
