"""`KeyedJaggedTensor`: the features of a batch, each with any number of values in each sample.

`VariableBatchKeyedJaggedTensor`: features of which several samples share a bag.
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
from .jagged_tensor import Jagged, JaggedTensor, bag_entries, block, printed
from .validation import (
    check_alike,
    check_ascending,
    check_integers,
    check_keys,
    check_type,
    in_order,
    is_list_of,
    is_traced,
    joined,
    offsets_of,
    refuse_trace,
    statically_true,
)

_ONE_KEY = (
    "give the graph a KeyedJaggedTensor of tierbed.jagged as an argument (from_torchrec makes one), which it splits, "
    "or a dict of JaggedTensors, one for each key"
)


class KeyedJaggedTensor(Jagged):
    """The features of a batch: sample b of key f is values[offsets[f * batch + b]:offsets[f * batch + b + 1]].

    keys: one name for each feature. values: ids [n], or [n, ...]. weights: [n]. lengths: integers [keys * batch];
    offsets: integers [keys * batch + 1]; one of the two is enough, and offsets are kept, as int64. The constructor
    checks shapes, dtypes and repeated keys (InputError); `validate` and a lookup check the numbers in offsets.

    It can be an argument of a graph, with any number of values in a batch. If `build` splits the values by key, the
    graph splits them before each call, for which a GPU is waited for.

    stride_per_key_per_rank, stride_per_key: how many bags each key has. inverse_indices: the bag of each sample. With
    one of the three the constructor gives a VariableBatchKeyedJaggedTensor, a subclass. stride: the number of samples.
    The other arguments are what TorchRec computes ahead, and are computed here when they are needed.
    """

    _facts = ("_keys", "_batch")
    _keys: tuple[str, ...]
    _batch: int | None = None  # the number of samples, if it does not follow from the bags

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
            parts = keys, values, weights, lengths, offsets
            if per_rank is not None:
                strides = [sum(of_key) for of_key in (per_rank.tolist() if isinstance(per_rank, Tensor) else per_rank)]
            elif strides is None:
                strides = KeyedJaggedTensor(*parts).stride_per_key()
            self.__class__ = VariableBatchKeyedJaggedTensor
            VariableBatchKeyedJaggedTensor.__init__(self, *parts, strides, inverse_indices)  # type: ignore[arg-type]
            if per_rank is not None and len({*map(len, per_rank)}) == 1:
                self._strides = torch.as_tensor(per_rank, dtype=torch.int64, device="cpu")
            self._batch = stride
            return
        super().__init__(values, weights, lengths, offsets)
        self._keys = check_keys(keys)
        bags, count = self._offsets.shape[0] - 1, len(self._keys)
        self._batch = None if count else stride
        if statically_true(bags % count != 0 if count else bags != 0):
            raise InputError(
                f"{bags} lengths, {bags + 1} offsets, for {count} keys {self.keys()}: give one length for each key and "
                "sample, or one offset more"
            )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype = torch.int64,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        """A batch without keys. lengths_dtype: not read, since offsets are int64."""
        return _laid([], [JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype)])

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """As many samples without keys; or on a device, uninitialised tensors of the same shapes. InputError."""
        check_type("kjt", kjt, KeyedJaggedTensor)
        if device is not None:
            return kjt._each(lambda tensor: torch.empty_like(tensor, device=device))
        weights = None if kjt._weights is None else kjt._weights[:0].clone()
        return kjt._part([], kjt._values[:0].clone(), weights, kjt._offsets.new_zeros(1))

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
        """The constructor with lengths, and `sync()`, by TorchRec's name."""
        sizes = stride, stride_per_key_per_rank
        return KeyedJaggedTensor(keys, values, weights, lengths, None, *sizes, inverse_indices=inverse_indices).sync()

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
        """The constructor with offsets, and `sync()`, by TorchRec's name."""
        sizes = stride, stride_per_key_per_rank
        return KeyedJaggedTensor(keys, values, weights, None, offsets, *sizes, inverse_indices=inverse_indices).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """From features, all with weights or all without; with variable batch sizes if they differ. InputError."""
        if not isinstance(jt_dict, Mapping) or not all(isinstance(one, JaggedTensor) for one in jt_dict.values()):
            raise InputError(f"jt_dict={jt_dict!r:.80}: give a dict of one JaggedTensor for each key")
        if not jt_dict:
            raise InputError("jt_dict={}: a batch of no keys has no dtype; use KeyedJaggedTensor.empty")
        batches = [jagged.offsets().shape[0] - 1 for jagged in jt_dict.values()]
        differ = any(statically_true(batch != batches[0]) for batch in batches)
        made = _laid([*jt_dict], [*jt_dict.values()], [[batch] for batch in batches] if differ else None)
        return made.sync()

    @staticmethod
    def from_nested(values: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> KeyedJaggedTensor:
        """From torch's nested tensors of layout torch.jagged, one for each key; and weights alike. InputError."""
        for name, given in (("values", values), ("weights", weights or {})):
            if not isinstance(given, Mapping):
                raise InputError(f"{name}: got a {type(given).__name__}; give a dict of one nested tensor for each key")
        if weights is not None and weights.keys() != values.keys():
            raise InputError(f"weights have keys {[*weights]} and values {[*values]}; give weights for each key")
        given = weights or {}
        parts = {key: JaggedTensor.from_nested(each, given.get(key)) for key, each in values.items()}
        return KeyedJaggedTensor.from_jt_dict(parts)

    @staticmethod
    def from_torchrec(kjt: Any) -> KeyedJaggedTensor:
        """The features of TorchRec's KeyedJaggedTensor, or of an object with its methods, without a copy.

        If keys differ in their numbers of bags, or it has inverse indices, a VariableBatchKeyedJaggedTensor.
        InputError.
        """
        if isinstance(kjt, KeyedJaggedTensor):
            return kjt
        if not hasattr(kjt, "inverse_indices_or_none"):
            raise InputError(f"kjt={kjt!r:.80}: give a KeyedJaggedTensor of TorchRec")
        offsets, lengths = kjt.offsets_or_none(), kjt.lengths_or_none()
        if offsets is not None and statically_true(offsets.shape[0] == 0):
            offsets = None  # TorchRec's may be empty if there are no bags
        lengths = None if offsets is not None or lengths is None else lengths.flatten()
        parts = (kjt.keys(), kjt.values(), kjt.weights_or_none(), lengths, offsets)
        inverse, per_rank = kjt.inverse_indices_or_none(), None
        if kjt.variable_stride_per_key() or inverse is not None:
            refuse_trace("from_torchrec of variable batch sizes", "convert the graph's arguments, before the call")
            per_rank = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
        made = KeyedJaggedTensor(*parts, stride_per_key_per_rank=per_rank, inverse_indices=inverse)
        if made.variable_stride_per_key() or not made._keys:
            made._batch = kjt.stride() if kjt.stride() > made.stride() else None
        return made

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all, which must have the same number of samples, all with weights or all without. InputError.

        With variable batch sizes: all of them or none, all with inverse indices or none.
        """
        if not is_list_of(kjt_list, KeyedJaggedTensor) or not kjt_list:
            raise InputError(f"kjt_list={kjt_list!r:.80}: give at least one KeyedJaggedTensor, in a list")
        varies = kjt_list[0].variable_stride_per_key()
        traits = {str(kjt.keys()): kjt.variable_stride_per_key() for kjt in kjt_list}
        check_alike("kjt_list", "variable_stride_per_key()", traits)
        keys = [key for kjt in kjt_list for key in kjt._keys]
        inverses = [kjt.inverse_indices_or_none() for kjt in kjt_list]
        check_alike("kjt_list", "inverse indices", {at: one is not None for at, one in enumerate(inverses)})
        if not varies or inverses[0] is not None:
            samples = {str(kjt.keys()): kjt.stride() for kjt in kjt_list if varies or kjt._keys}
            check_alike("kjt_list", "samples", samples)
        strides = [stride for kjt in kjt_list for stride in kjt.stride_per_key_per_rank()] if varies else None
        inverse = None if None in inverses else (keys, torch.cat([one[1] for one in inverses if one is not None]))
        made = _laid(keys, kjt_list, strides, inverse)
        if not varies and not keys:
            made._batch = max(kjt.stride() for kjt in kjt_list)
        return made

    def stride(self) -> int:
        """How many samples the batch has. Without keys: of the batch that it was split from, or 0."""
        return (self._offsets.shape[0] - 1) // len(self._keys) if self._keys else self._batch or 0

    def stride_per_key(self) -> list[int]:
        return [self.stride()] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        return False

    def offsets_of_keys(self) -> Sequence[Tensor]:
        bags = self.stride() if self._keys else 0
        rows = self._offsets.unfold(0, bags + 1, bags) if bags else self._offsets.expand(len(self._keys), 1)
        return (rows - rows[:, :1]).unbind()

    def split_by_key(self) -> KeyedJaggedTensor:
        """The same batch for a graph whose `build` splits the values: a tree with the values of each key as a leaf."""
        values, weights = self._split(range(1, len(self._keys) + 1))
        weights = [] if self._weights is None else weights
        return SplitKeyedJaggedTensor._unflatten([self._offsets, *values, *weights], self._context())

    def _part(self, chosen: list[int], values: Tensor, weights: Tensor | None, offsets: Tensor) -> KeyedJaggedTensor:
        context = tuple(self._keys[at] for at in chosen), None if chosen else self.stride()
        return KeyedJaggedTensor._unflatten((values, weights, offsets), context)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """How many bags each key has of each rank, as they were given; [] if each sample has a bag of each key."""
        return []

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """The keys, and int64 [keys, batch]: the number of the key's bag that each sample has; None for its own."""
        return None

    def keys(self) -> list[str]:
        """The names of the features, in their order."""
        return list(self._keys)

    def length_per_key(self) -> list[int]:
        """How many values each key has."""
        return [end - begin for begin, end in pairwise(self._bounds)]

    def offset_per_key(self) -> list[int]:
        """Where the values of each key begin, and the end of the last."""
        return list(self._bounds)

    def length_per_key_or_none(self) -> list[int] | None:
        """`length_per_key()`, if the offsets have been read."""
        return self.length_per_key() if "_bounds" in vars(self) else None

    def offset_per_key_or_none(self) -> list[int] | None:
        """`offset_per_key()`, if the offsets have been read."""
        return self.offset_per_key() if "_bounds" in vars(self) else None

    def to(self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Self:
        """A copy on another device. dtype: of its weights; the values keep theirs."""
        moved = super().to(device, non_blocking)
        return moved if dtype is None or self._weights is None else moved._cast(dtype)

    def _cast(self, dtype: torch.dtype) -> Self:
        """Change the dtype of the weights, of which there are some. Returns itself."""
        self._weights = self.weights().to(dtype)
        return self

    def sync(self) -> Self:
        """Read where the values of each key begin, so that no later call waits. Nothing while a graph is traced."""
        if not is_traced():
            self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Forget what `sync` read."""
        vars(self).pop("_bounds", None)
        return self

    def index_per_key(self) -> dict[str, int]:
        """The number of each key."""
        return dict(self._index)

    _key_indices = index_per_key  # modules of TorchRec call it

    def lengths_offset_per_key(self) -> list[int]:
        """The first bag of each key, and the number of bags."""
        return list(self._firsts)

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """`inverse_indices_or_none()`. InputError if there are none."""
        inverse = self.inverse_indices_or_none()
        if inverse is None:
            raise InputError(f"this {type(self).__name__} has no inverse_indices; give them to its constructor")
        return inverse

    def flatten_lengths(self) -> Self:
        """Itself: lengths always have one dimension."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_stride_per_key_per_rank":  # TorchRec's managed collision reads it
            return self.stride_per_key_per_rank() or None
        if name.startswith("dist_"):
            raise AttributeError(
                f"{type(self).__name__} has no {name}: ranks exchange the ids of a lookup by themselves; give world= "
                "to the collection"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature, a view. KeyError if it is missing."""
        if key not in self._index:
            raise KeyError(f"{key!r} is no key; there are {', '.join(self._keys)}")
        at = self._index[key]
        values, weights = self._of_key(at)
        return JaggedTensor(values, weights, offsets=self._offsets_of(at, at + 1))

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Each feature by its key, views of one split. compute_offsets: not read, for offsets are known."""
        parts = zip(*self._split(range(1, len(self._keys) + 1)), self.offsets_of_keys(), strict=True)
        features = (JaggedTensor._unflatten(part, ()) for part in parts)  # parts of checked tensors
        return dict(zip(self._keys, features, strict=True))

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Views of the first segments[0] keys, of the next segments[1], and so on. InputError.

        As with TorchRec, keys after the last segment are left out.
        """
        ends = [*accumulate(check_integers("segments", segments), initial=0)]
        if min(segments, default=0) < 0 or ends[-1] > len(self._keys):
            raise InputError(f"segments={list(segments)}: give numbers of keys whose sum is at most {len(self._keys)}")
        parts = zip(pairwise(ends), *self._split([*ends[1:], len(self._keys)]), strict=False)
        return [
            self._part([*range(begin, end)], values, weights, self._offsets_of(begin, end))
            for (begin, end), values, weights in parts
        ]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """A copy with the keys of these numbers, in this order, as often as they occur. IndexError.

        indices_tensor: the same numbers, not read. No lookup needs it: a collection finds its features among any keys.
        """
        chosen = [range(len(self._keys))[index] for index in check_integers("indices", indices)]
        values, weights = self._split(range(1, len(self._keys) + 1))
        lengths = self.lengths()
        parts = lengths.split(self.stride_per_key()) if self._keys else ()
        return self._part(
            chosen,
            joined(self._values[:0], values, chosen),
            None if self._weights is None else joined(self._weights[:0], weights, chosen),
            offsets_of(joined(lengths[:0], parts, chosen)),
        )

    @cached_property
    def _index(self) -> dict[str, int]:
        return {key: at for at, key in enumerate(self._keys)}

    @cached_property
    def _firsts(self) -> list[int]:
        """The first bag of each key, and the number of bags."""
        return [*accumulate(self.stride_per_key(), initial=0)]

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the values of each key begin, and the end of the last. On meta, as in TorchRec, all have as many."""
        refuse_trace("the number of values of one key", _ONE_KEY)
        if self._offsets.is_meta:
            count, rest = divmod(self._values.shape[0], len(self._keys) or 1)
            return [0, *(rest + count * number for number in range(1, len(self._keys) + 1))]
        bounds: list[int] = self._offsets[self._firsts].tolist()
        try:
            check_ascending(bounds, self._values.shape[0])
        except InputError:
            self.validate()  # its error names the bag
        return bounds

    def _of_key(self, at: int) -> tuple[Tensor, Tensor | None]:
        """The values and weights of one key, by its number."""
        begin, end = self._bounds[at : at + 2]
        return self._values[begin:end], None if self._weights is None else self._weights[begin:end]

    def _split(self, ends: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Values and weights of the keys up to each of these numbers, from the one before."""
        sizes = [self._bounds[end] - self._bounds[begin] for begin, end in pairwise([0, *ends])]
        if self._weights is None or not sizes:
            return self._values.split(sizes) if sizes else (), [None] * len(sizes)
        return self._values.split(sizes), self._weights.split(sizes)

    def _offsets_of(self, begin: int, end: int) -> Tensor:
        """The offsets of the keys from number `begin` up to `end`, which begin with 0."""
        offsets = self._offsets[self._firsts[begin] : self._firsts[end] + 1]
        return offsets - offsets[0]

    def _bags(self) -> list[str]:
        counts = zip(self._keys, self.stride_per_key(), strict=True)
        return [f"key {key!r}, sample {sample}" for key, count in counts for sample in range(count)]

    def __str__(self) -> str:
        return printed(self, "KeyedJaggedTensor", lambda: [*map(self._entry, self._keys, pairwise(self._firsts))])

    def _entry(self, key: str, bags: tuple[int, int]) -> str:
        """One key of `__str__`. bags: its first one, and the end of the last."""
        parts = bag_entries(self._values, self._weights, self._offsets[bags[0] : bags[1] + 1])
        return f'"{key}": ' + (parts[0] if self._weights is None else block(parts, "\n        "))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.keys()}, stride={self.stride()}, {self._describe()})"


def _laid(
    keys: Sequence[str],
    parts: Sequence[Jagged],
    strides: Sequence[Sequence[int]] | None = None,
    inverse: tuple[Sequence[str], Tensor] | None = None,
) -> KeyedJaggedTensor:
    """From parts that are laid one after another. strides: of each key and rank."""
    check_alike("weights", "weights", {at: part.weights_or_none() is not None for at, part in enumerate(parts)})
    values = torch.cat([part.values() for part in parts])
    weights = torch.cat([part.weights() for part in parts]) if parts[0].weights_or_none() is not None else None
    offsets = offsets_of(torch.cat([part.lengths() for part in parts]))
    return KeyedJaggedTensor(
        keys, values, weights, offsets=offsets, stride_per_key_per_rank=strides, inverse_indices=inverse
    )


class VariableBatchKeyedJaggedTensor(KeyedJaggedTensor):
    """Features of a batch, each with its own number of bags, which TorchRec calls a variable stride per key.

    keys, values, weights, lengths, offsets: as of a KeyedJaggedTensor, with stride_per_key[f] bags of key f.
    stride_per_key: how many bags each key has. inverse_indices: key names, and integers [names, batch]: the number of
    the key's bag that each sample has. A collection needs it to return a row for each sample. InputError.
    """

    _fields = ("_values", "_weights", "_offsets", "_strides", "_inverse")
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
        Jagged.__init__(self, values, weights, lengths, offsets)
        self._keys = check_keys(keys)
        strides, bags = list(stride_per_key), self._offsets.shape[0] - 1
        if len(strides) != len(self._keys) or min(strides, default=0) < 0 or sum(strides) != bags:
            raise InputError(f"stride_per_key={strides}: give one for each of {self.keys()}, {bags} in all, as lengths")
        self._strides = torch.tensor(strides, dtype=torch.int64).view(-1, 1)
        self._inverse = None if inverse_indices is None else in_order(self._keys, *inverse_indices)

    def validate(self) -> None:
        """Read offsets and inverse indices: InputError unless offsets ascend and each sample has a bag of each key."""
        super().validate()
        if self._inverse is None:
            return
        wrong = (self._inverse < 0) | (self._inverse >= self.strides()[:, None])
        for at, sample in wrong.nonzero().tolist()[:1]:
            raise InputError(
                f"inverse_indices of key {self._keys[at]!r}, sample {sample}: {int(self._inverse[at, sample])}; give "
                f"the number of one of its {int(self.strides()[at])} bags, counted from 0"
            )

    def stride(self) -> int:
        """How many samples the batch has. Without inverse indices: the maximum number of bags of a key."""
        if self._inverse is not None:
            return self._inverse.shape[1]
        return max(self.stride_per_key(), default=0) if self._batch is None else self._batch

    def stride_per_key(self) -> list[int]:
        return [sum(of_ranks) for of_ranks in self.stride_per_key_per_rank()]

    def stride_per_key_per_rank(self) -> list[list[int]]:
        refuse_trace("stride_per_key", "use strides()")
        strides: list[list[int]] = self._strides.tolist()
        return strides

    def strides(self) -> Tensor:
        """How many bags each key has, int64 [keys]."""
        return self._strides.sum(1).to(self.device())

    def split_by_key(self) -> KeyedJaggedTensor:
        return self

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = super()._each(change)
        changed._strides = self._strides.clone()  # are the same everywhere
        return changed

    def variable_stride_per_key(self) -> bool:
        return True

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        return None if self._inverse is None else (self.keys(), self._inverse)

    def offsets_of_keys(self) -> Sequence[Tensor]:
        return [self._offsets_of(at, at + 1) for at in range(len(self._keys))]

    def _part(self, chosen: list[int], values: Tensor, weights: Tensor | None, offsets: Tensor) -> Any:
        keys, inverse = tuple(self._keys[at] for at in chosen), None if self._inverse is None else self._inverse[chosen]
        return self._unflatten((values, weights, offsets, self._strides[chosen], inverse), (keys, self.stride()))


class SplitKeyedJaggedTensor(KeyedJaggedTensor):
    """A KeyedJaggedTensor with a tensor for the values of each key; all of them in one are a copy."""

    _derived = ("_values", "_weights")
    open_leaves: ClassVar[Container[int]] = range(1, 1 << 32)
    _parts: list[Any]  # the values of each key, then the weights of each if there are any

    @cached_property
    def _values(self) -> Any:  # type: ignore[override]
        return torch.cat(self._parts[: len(self._keys)])

    @cached_property
    def _weights(self) -> Any:  # type: ignore[override]
        weights = self._parts[len(self._keys) :]
        return torch.cat(weights) if weights else None

    def split_by_key(self) -> KeyedJaggedTensor:
        return self

    def _cast(self, dtype: torch.dtype) -> Self:
        keys = len(self._keys)
        self._parts[keys:] = [weights.to(dtype) for weights in self._parts[keys:]]
        return self

    @cached_property
    def _bounds(self) -> list[int]:
        return [*accumulate((part.shape[0] for part in self._parts[: len(self._keys)]), initial=0)]

    def _of_key(self, at: int) -> tuple[Tensor, Tensor | None]:
        weights = self._parts[len(self._keys) :]
        return self._parts[at], weights[at] if weights else None

    def _split(self, ends: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        keys, spans = len(self._keys), [*pairwise([0, *ends])]
        values = [joined(self._parts[0][:0], self._parts, range(*span)) for span in spans]
        if len(self._parts) == keys:
            return values, [None] * len(spans)
        return values, [joined(self._parts[keys][:0], self._parts[keys:], range(*span)) for span in spans]

    def _tensors(self) -> list[Any]:
        return [self._offsets, *self._parts]

    def _set_tensors(self, tensors: Iterable[Any]) -> None:
        self._offsets, *self._parts = tensors
        for joined_parts in self._derived:
            vars(self).pop(joined_parts, None)

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        keys = [pytree.GetAttrKey("offsets"), *map(pytree.MappingKey, self._keys)]
        keys += [pytree.MappingKey(f"weights of {key}") for key in self._keys[: len(self._parts) - len(self._keys)]]
        return list(zip(keys, self._tensors(), strict=True)), self._context()
