"""`JaggedTensor`: one feature of a batch, with any number of values in each sample; and the base of all containers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ...engine.errors import InputError
from .validation import check_ascending, check_offsets, check_type, check_values, is_list_of, is_traced, refuse_trace

_PAD = "give desired_length, to_padded_dense(50)"


class TensorContainer:
    """An object with tensors in the attributes `_fields`, of which some may be None; registered as a pytree.

    open_leaves: the numbers of the fields whose first dimension differs from batch to batch.
    """

    _fields: ClassVar[tuple[str, ...]]
    _facts: ClassVar[tuple[str, ...]] = ()  # the attributes that are no tensors
    _derived: ClassVar[tuple[str, ...]] = ("_bounds", "_firsts")  # attributes that are computed from the tensors
    open_leaves: ClassVar[Container[int]] = frozenset()

    def __init_subclass__(cls, registered: bool = True) -> None:
        super().__init_subclass__()
        if registered:
            pytree.register_pytree_node(
                cls,
                cls._flatten,
                cls._unflatten,
                serialized_type_name=f"tierbed.jagged.{cls.__name__}",
                flatten_with_keys_fn=cls._flatten_with_keys,
            )

    def device(self) -> torch.device:
        """The device of the tensors."""
        device: torch.device = getattr(self, self._fields[0]).device
        return device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """A copy on another device."""
        return self._each(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory, from which a GPU copies asynchronously."""
        return self._each(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has done all that it was given so far."""
        for tensor in self._tensors():
            if tensor is not None and not tensor.is_cpu:
                tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors() if tensor is not None)

    def copy_(self, other: Self, non_blocking: bool = False) -> Self:
        """Copy another container's tensors, of the same shapes and dtypes, into those of this one. InputError."""
        check_type("other", other, type(self))
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs, non_blocking=non_blocking)
        for read in self._derived:  # of the tensors before
            vars(self).pop(read, None)
        return self

    def clear_storage(self) -> int:
        """Free the memory of all tensors, which cannot be used any more. Returns its bytes."""
        freed = self.size_in_bytes()
        for tensor in self._tensors():
            if tensor is not None:
                tensor.untyped_storage().resize_(0)
        return freed

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every tensor changed."""
        changed = copy(self)
        changed._set_tensors([None if tensor is None else change(tensor) for tensor in self._tensors()])
        return changed

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, field) for field in self._fields]

    def _set_tensors(self, tensors: Iterable[Any]) -> None:
        for field, tensor in zip(self._fields, tensors, strict=True):
            setattr(self, field, tensor)

    def _context(self) -> tuple[Any, ...]:
        return tuple(getattr(self, fact) for fact in self._facts)

    def _flatten(self) -> tuple[list[Any], Any]:
        return self._tensors(), self._context()

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        names = [pytree.GetAttrKey(field.removeprefix("_")) for field in self._fields]
        return list(zip(names, self._tensors(), strict=True)), self._context()

    @classmethod
    def _unflatten(cls, tensors: Any, context: Any) -> Self:
        """A container of whatever a tree has as leaves, unchecked."""
        container = cls.__new__(cls)
        container._set_tensors(tensors)
        for fact, value in zip(cls._facts, context, strict=True):
            setattr(container, fact, value)
        return container


def printed(container: TensorContainer, kind: str, entries: Callable[[], Sequence[str]]) -> str:
    """As TorchRec's `kind` prints its entries. Without values, in a trace or on the device meta: the `repr`."""
    if is_traced() or container.device().type == "meta":
        return repr(container)
    return f"{kind}({block(entries())})\n"


def block(entries: Sequence[str], line: str = "\n    ") -> str:
    """Entries in braces, each on a line of its own, which begins with `line`; nothing if there are none."""
    return "{" + line + f",{line}".join(entries) + line[:-4] + "}" if entries else ""


def bag_entries(values: Tensor, weights: Tensor | None, offsets: Tensor) -> list[str]:
    """The values of the bags as lists; if there are weights, each of the two with its name."""
    spans = [slice(*span) for span in pairwise(offsets.tolist())]
    lists = [[of[span].tolist() for span in spans] for of in (values, weights) if of is not None]
    return [str(lists[0])] if weights is None else [f'"values": {lists[0]}', f'"weights": {lists[1]}']


def jagged_parts(name: str, nested: Tensor) -> tuple[Tensor, Tensor]:
    """The values [n, ...] and offsets [batch + 1] of a nested tensor of layout torch.jagged. InputError for others."""
    if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout != torch.jagged:
        raise InputError(
            f"{name}: give a nested tensor of layout torch.jagged: torch.nested.as_nested_tensor(..., "
            "layout=torch.jagged)"
        )
    if not nested.is_contiguous():
        raise InputError(
            f"{name}: the nested tensor has gaps, or its second dimension is not the ragged one; give "
            f"{name}.contiguous()"
        )
    values, offsets = nested.values(), nested.offsets()  # type: ignore[attr-defined]
    return values, offsets


def is_value(offsets: Tensor, length: int) -> Tensor:
    """Which positions of bags padded to `length` have values: bool [bags, length]."""
    return torch.arange(length, device=offsets.device) < offsets.diff().unsqueeze(1)


def padded(values: Tensor, offsets: Tensor, length: int, padding_value: float = 0.0) -> Tensor:
    """The first `length` values of each bag, then padding_value: [bags, length, ...]. InputError.

    Reads neither values nor offsets on the host, so a graph can trace it.
    """
    if not values.is_floating_point() and padding_value != int(padding_value):
        raise InputError(f"padding_value={padding_value}: values are of {values.dtype}; give a whole number")
    padding = values.new_full((1, *values.shape[1:]), padding_value)
    index = offsets[:-1].unsqueeze(1) + torch.arange(1, length + 1, device=offsets.device)
    rows = torch.cat([padding, values])
    # the backward of an embedding skips row 0, the padding, and adds a gradient to each other row once
    result = F.embedding(index * is_value(offsets, length), rows.flatten(1) if rows.dim() > 1 else rows[:, None], 0)
    return result.view(*index.shape, *values.shape[1:])


class Jagged(TensorContainer, registered=False):
    """Values [n, ...], where bag b is values[offsets[b]:offsets[b + 1]], with or without a weight for each."""

    _fields: ClassVar[tuple[str, ...]] = ("_values", "_weights", "_offsets")
    open_leaves: ClassVar[Container[int]] = frozenset({0, 1})
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
        """All values [n, ...], one bag after another."""
        return self._values

    def weights(self) -> Tensor:
        """A weight for each of the values [n]. InputError if there are none."""
        if self._weights is None:
            raise InputError(f"this {type(self).__name__} has no weights; give weights= to its constructor")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """A weight for each of the values [n], or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """How many values each bag has, int64 [bags]."""
        return self._offsets.diff()

    def offsets(self) -> Tensor:
        """Where each bag begins, and the end of the last: int64 [bags + 1]."""
        return self._offsets

    lengths_or_none, offsets_or_none = lengths, offsets  # TorchRec's names for those that may be unknown

    def validate(self) -> None:
        """Read the offsets: InputError unless they ascend from 0 to the number of values."""
        refuse_trace("validate", "call it on the graph's arguments, before the call")
        check_ascending(self._offsets.tolist(), self._values.shape[0], self._bags())

    def check_bags(self) -> None:
        """As `validate`, but only on a CPU and outside of a trace, so that it waits for nothing."""
        if self._offsets.device.type != "cpu" or is_traced():
            return
        begins, ends = self._offsets[0] == 0, self._offsets[-1] == self._values.shape[0]
        if not (begins and ends and (self._offsets.diff() >= 0).all()):
            self.validate()

    def _bags(self) -> Sequence[str] | None:
        """The name of each bag in an error."""
        return None

    def _describe(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        return f"values {list(self._values.shape)} of {self._values.dtype}{weighted}"


class JaggedTensor(Jagged):
    """One feature of a batch: sample b has values[offsets[b]:offsets[b + 1]].

    values: [n] or [n, ...]. weights: [n], or in the shape of values. lengths: integers [batch]; offsets: integers
    [batch + 1]; one of the two is enough, and offsets are kept, as int64. The constructor checks shapes and dtypes
    (InputError); `validate` and a lookup check the numbers in offsets.
    """

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
    ) -> Self:
        """A feature without samples."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return cls(values, weights, offsets=torch.zeros(1, dtype=torch.int64, device=device))

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """From one tensor [length, ...] for each sample, and weights [length] for each. InputError."""
        if not is_list_of(values, Tensor) or not values or not all(tensor.dim() for tensor in values):
            raise InputError(f"values={values!r:.80}: give one tensor or more; use JaggedTensor.empty for no samples")
        sizes = [tensor.shape[0] for tensor in values]
        if weights is not None and (
            not is_list_of(weights, Tensor) or [tensor.shape[:1] for tensor in weights] != [(size,) for size in sizes]
        ):
            raise InputError("weights: give a list of tensors, each as long as the sample's tensor in values")
        joined = torch.cat(list(values))
        lengths = torch.tensor(sizes, device=joined.device)
        return cls(joined, None if weights is None else torch.cat(list(weights)), lengths)

    @classmethod
    def from_dense_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Self:
        """From values [batch, length, ...] and weights [batch, length], of which sample b has the first lengths[b]."""
        refuse_trace("from_dense_lengths", "call it on the graph's arguments, before the call")
        check_type("values", values, Tensor)
        check_type("lengths", lengths, Tensor)
        if values.dim() < 2 or lengths.shape != values.shape[:1] or values.shape[1] < max(lengths.tolist(), default=0):
            raise InputError(
                f"values {list(values.shape)}, lengths {list(lengths.shape)}: give values [batch, length, ...] and "
                "lengths [batch] up to the second dimension"
            )
        kept = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return cls(values[kept], None if weights is None else weights[kept], lengths)

    @classmethod
    def empty_like(cls, jt: Self, device: torch.device | str | None = None) -> Self:
        """A feature without samples, of the same dtypes; or on a device, uninitialised tensors of the same shapes.

        InputError.
        """
        check_type("jt", jt, cls)
        if device is not None:
            return jt._each(lambda tensor: torch.empty_like(tensor, device=device))
        weights = jt._weights
        return cls.empty(weights is not None, jt.device(), jt._values.dtype, None if weights is None else weights.dtype)

    @classmethod
    def from_nested(cls, values: Tensor, weights: Tensor | None = None) -> Self:
        """From torch's nested tensors of layout torch.jagged, [batch, ragged, ...]. InputError for others."""
        flat, offsets = jagged_parts("values", values)
        if weights is None:
            return cls(flat, None, offsets=offsets)
        return cls(flat, jagged_parts("weights", weights)[0], offsets=offsets)

    def to_dense(self) -> list[Tensor]:
        """The values of each sample, a list of views [length, ...]."""
        return self._by_sample(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of each sample, a list of views [length]; None if there are none."""
        return None if self._weights is None else self._by_sample(self._weights)

    def _by_sample(self, tensor: Tensor) -> list[Tensor]:
        refuse_trace("to_dense", f"for a tensor of one shape, {_PAD}")
        lengths: list[int] = self.lengths().tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != tensor.shape[0]:
            self.validate()
        return list(tensor.split(lengths)) if lengths else []

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Values as [batch, desired_length, ...]: the first ones of each sample, then `padding_value`.

        desired_length: None is the longest of the batch; while a graph is traced it raises GraphError.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """Weights as [batch, desired_length], as `to_padded_dense`; None if there are none."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, tensor: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if desired_length is None:
            refuse_trace("to_padded_dense()", _PAD)
            desired_length = max(self.lengths().tolist(), default=0)
        elif not isinstance(desired_length, int) or desired_length < 0:
            raise InputError(f"desired_length={desired_length!r}: give an integer from 0 on")
        self.check_bags()
        return padded(tensor, self._offsets, desired_length, padding_value)

    def __str__(self) -> str:
        return printed(self, "JaggedTensor", lambda: bag_entries(self._values, self._weights, self._offsets))

    def __repr__(self) -> str:
        return f"JaggedTensor(samples={self._offsets.shape[0] - 1}, {self._describe()})"
