"""`JaggedTensor` holds one feature with any number of values per sample. `TensorContainer` is its base class."""

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
from .validation import check_ascending, check_eager, check_offsets, check_type, check_values, is_list_of, is_tracing

_PAD_REMEDY = "give desired_length, to_padded_dense(50)"


def _restore_tuples(value: Any) -> Any:
    return tuple(map(_restore_tuples, value)) if isinstance(value, list) else value


class TensorContainer:
    """Base class for jagged and keyed tensors, registered as a pytree. A container's tensors may be None."""

    _tensor_fields: ClassVar[tuple[str, ...]]  # attributes that hold tensors
    _context_fields: ClassVar[tuple[str, ...]] = ()  # the other attributes
    _cached_fields: ClassVar[tuple[str, ...]] = ("_value_bounds", "_bag_bounds")  # computed from the tensors
    open_leaves: ClassVar[Container[int]] = frozenset()  # indices of fields whose first dimension varies by batch

    def __init_subclass__(cls, register: bool = True) -> None:
        super().__init_subclass__()
        if register:
            pytree.register_pytree_node(
                cls,
                cls._flatten,
                cls._unflatten,
                serialized_type_name=f"tierbed.jagged.{cls.__name__}",
                flatten_with_keys_fn=cls._flatten_with_keys,
                to_dumpable_context=lambda context: context,
                from_dumpable_context=_restore_tuples,  # JSON, in which torch.export.save writes it, has only lists
            )

    def device(self) -> torch.device:
        """Return the tensors' device."""
        return getattr(self, self._tensor_fields[0]).device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on another device."""
        return self._map_tensors(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, which a GPU can copy asynchronously."""
        return self._map_tensors(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory allocated until `stream` has finished all work queued so far."""
        for tensor in self._tensors():
            if tensor is not None and not tensor.is_cpu:
                tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Return the tensors' total size in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors() if tensor is not None)

    def copy_(self, other: Self, non_blocking: bool = False) -> Self:
        """Copy the tensors of `other`, with equal shapes and dtypes, into this container. Raises InputError."""
        check_type("other", other, type(self))
        for target, source in zip(self._tensors(), other._tensors(), strict=True):
            if target is not None and source is not None:
                target.copy_(source, non_blocking=non_blocking)
        for cached in self._cached_fields:
            vars(self).pop(cached, None)
        return self

    def clear_storage(self) -> int:
        """Free the tensors' memory. Return the number of freed bytes. The container cannot be used afterwards."""
        num_bytes = self.size_in_bytes()
        for tensor in self._tensors():
            if tensor is not None:
                tensor.untyped_storage().resize_(0)
        return num_bytes

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `function` applied to every tensor."""
        result = copy(self)
        result._set_tensors([None if tensor is None else function(tensor) for tensor in self._tensors()])
        return result

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, field) for field in self._tensor_fields]

    def _set_tensors(self, tensors: Iterable[Any]) -> None:
        vars(self).update(zip(self._tensor_fields, tensors, strict=True))

    def _context(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field) for field in self._context_fields)

    def _flatten(self) -> tuple[list[Any], Any]:
        return self._tensors(), self._context()

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        names = [pytree.GetAttrKey(field.removeprefix("_")) for field in self._tensor_fields]
        return list(zip(names, self._tensors(), strict=True)), self._context()

    @classmethod
    def _unflatten(cls, tensors: Any, context: Any) -> Self:
        """Make a container from a pytree's leaves. Skips all checks, because a leaf may be any object."""
        container = cls.__new__(cls)
        container._set_tensors(tensors)
        vars(container).update(zip(cls._context_fields, context, strict=True))  # faster than setattr
        return container


def format_entries(container: TensorContainer, class_name: str, entries: Callable[[], Sequence[str]]) -> str:
    """Format entries as TorchRec prints its class `class_name`. In a trace or on meta, return `repr`."""
    if is_tracing() or container.device().type == "meta":
        return repr(container)
    return f"{class_name}({join_in_braces(entries())})\n"


def join_in_braces(entries: Sequence[str], separator: str = "\n    ") -> str:
    """Join entries in braces, one per line. `separator`: a newline and indentation. Return "" for no entries."""
    return "{" + separator + f",{separator}".join(entries) + separator[:-4] + "}" if entries else ""


def format_bags(values: Tensor, weights: Tensor | None, offsets: Tensor) -> list[str]:
    """Format the bags' values as lists. If there are weights, return two labelled entries."""
    spans = [slice(*span) for span in pairwise(offsets.tolist())]
    lists = [[tensor[span].tolist() for span in spans] for tensor in (values, weights) if tensor is not None]
    return [str(lists[0])] if weights is None else [f'"values": {lists[0]}', f'"weights": {lists[1]}']


def split_nested(name: str, nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values [n, ...], offsets [batch + 1]) of a nested tensor of layout torch.jagged. Raises InputError."""
    if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout != torch.jagged:
        expected = "a nested tensor of layout torch.jagged: torch.nested.as_nested_tensor(..., layout=torch.jagged)"
        raise InputError(f"{name}: give {expected}")
    if not nested.is_contiguous():
        problem = "the nested tensor has gaps, or its second dimension is not the ragged one"
        raise InputError(f"{name}: {problem}; give {name}.contiguous()")
    return nested.values(), nested.offsets()  # type: ignore[attr-defined]


def make_mask(offsets: Tensor, length: int) -> Tensor:
    """Return bool [bags, length]: True where a bag padded to `length` holds a value."""
    return torch.arange(length, device=offsets.device) < offsets.diff().unsqueeze(1)


def pad_bags(values: Tensor, offsets: Tensor, length: int, padding_value: float = 0.0) -> Tensor:
    """Return each bag's first `length` values, padded with padding_value: [bags, length, ...]. Raises InputError.

    The host reads neither values nor offsets, so a graph can trace this function.
    """
    if not values.is_floating_point() and padding_value != int(padding_value):
        raise InputError(f"padding_value={padding_value}: values are of {values.dtype}; give a whole number")
    padding = values.new_full((1, *values.shape[1:]), padding_value)
    indices = offsets[:-1].unsqueeze(1) + torch.arange(1, length + 1, device=offsets.device)
    rows = torch.cat([padding, values])
    # F.embedding's backward skips row 0 (the padding). Each other row gets at most one gradient.
    result = F.embedding(indices * make_mask(offsets, length), rows.flatten(1) if rows.dim() > 1 else rows[:, None], 0)
    return result.view(*indices.shape, *values.shape[1:])


class JaggedBase(TensorContainer, register=False):
    """Values [n, ...] with optional weights. Bag b is values[offsets[b]:offsets[b + 1]]."""

    _tensor_fields: ClassVar[tuple[str, ...]] = ("_values", "_weights", "_offsets")
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
        """Return all values [n, ...], one bag after another."""
        return self._values

    def weights(self) -> Tensor:
        """Return a weight per value, [n]. Raises InputError if there are none."""
        if self._weights is None:
            raise InputError(f"this {type(self).__name__} has no weights; give weights= to its constructor")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return a weight per value, [n], or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return each bag's length, int64 [bags]."""
        return self._offsets.diff()

    def offsets(self) -> Tensor:
        """Return the index at which each bag begins, then the last bag's end: int64 [bags + 1]."""
        return self._offsets

    lengths_or_none, offsets_or_none = lengths, offsets  # in TorchRec, lengths or offsets may be None

    def validate(self) -> None:
        """Raise InputError unless the offsets ascend from 0 to the number of values. Waits for the device."""
        check_eager("validate", "call it on the graph's arguments, before the call")
        check_ascending(self._offsets.tolist(), self._values.shape[0], self._bag_names())

    def check_bags(self) -> None:
        """Check offsets as `validate` does, but only on a CPU and outside a trace. On a GPU, the host would wait."""
        if self._offsets.device.type != "cpu" or is_tracing():
            return
        starts_at_0, ends_at_n = self._offsets[0] == 0, self._offsets[-1] == self._values.shape[0]
        if not (starts_at_0 and ends_at_n and (self._offsets.diff() >= 0).all()):
            self.validate()

    def _bag_names(self) -> Sequence[str] | None:
        """Return a name for each bag, for errors."""
        return None

    def _describe(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        return f"values {list(self._values.shape)} of {self._values.dtype}{weighted}"


class JaggedTensor(JaggedBase):
    """One feature of a batch. Sample b has values[offsets[b]:offsets[b + 1]].

    The constructor checks shapes and dtypes. `validate` and lookups check the numbers in offsets.

    Args:
        values: The values of all samples, [n] or [n, ...].
        weights: One weight per value, [n] or the shape of values.
        lengths: The number of values in each sample, integers [batch]. Give either lengths or offsets.
        offsets: The index of each sample's first value, followed by n. Integers [batch + 1], stored as int64.

    Raises:
        InputError: If shapes or dtypes do not fit.
    """

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a feature without samples."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return cls(values, weights, offsets=torch.zeros(1, dtype=torch.int64, device=device))

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """Make a feature from a tensor [length, ...] per sample, and weights [length] per sample. Raises InputError."""
        if not is_list_of(values, Tensor) or not values or not all(tensor.dim() for tensor in values):
            raise InputError(f"values={values!r:.80}: give a list of tensors; use JaggedTensor.empty for no samples")
        sizes = [tensor.shape[0] for tensor in values]
        if weights is not None and (
            not is_list_of(weights, Tensor) or [tensor.shape[:1] for tensor in weights] != [(size,) for size in sizes]
        ):
            raise InputError("weights: give a tensor for each sample, with one weight for each of its values")
        lengths = torch.tensor(sizes, device=values[0].device)
        return cls(torch.cat(list(values)), None if weights is None else torch.cat(list(weights)), lengths)

    @classmethod
    def from_dense_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Self:
        """Make a feature from padded values [batch, length, ...] and weights [batch, length].

        Sample b keeps its first lengths[b] values. Raises InputError.
        """
        check_eager("from_dense_lengths", "call it on the graph's arguments, before the call")
        check_type("values", values, Tensor)
        check_type("lengths", lengths, Tensor)
        if values.dim() < 2 or lengths.shape != values.shape[:1] or values.shape[1] < max(lengths.tolist(), default=0):
            expected = "values [batch, length, ...] and lengths [batch], none above the size of the second dimension"
            raise InputError(f"values {list(values.shape)}, lengths {list(lengths.shape)}: give {expected}")
        mask = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return cls(values[mask], None if weights is None else weights[mask], lengths)

    @classmethod
    def empty_like(cls, jt: Self, device: torch.device | str | None = None) -> Self:
        """Return a feature without samples, with the dtypes of `jt`.

        If `device` is given, return uninitialized tensors with equal shapes on that device. Raises InputError.
        """
        check_type("jt", jt, cls)
        if device is not None:
            return jt._map_tensors(lambda tensor: torch.empty_like(tensor, device=device))
        weights = jt._weights
        return cls.empty(weights is not None, jt.device(), jt._values.dtype, None if weights is None else weights.dtype)

    @classmethod
    def from_nested(cls, values: Tensor, weights: Tensor | None = None) -> Self:
        """Make a feature from a nested tensor [batch, ragged, ...] of layout torch.jagged. Raises InputError."""
        flat, offsets = split_nested("values", values)
        return cls(flat, None if weights is None else split_nested("weights", weights)[0], offsets=offsets)

    def to_dense(self) -> list[Tensor]:
        """Return each sample's values, a list of views [length, ...]."""
        return self._split_by_sample(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return each sample's weights, a list of views [length], or None without weights."""
        return None if self._weights is None else self._split_by_sample(self._weights)

    def _split_by_sample(self, tensor: Tensor) -> list[Tensor]:
        check_eager("to_dense", f"for a tensor of one shape, {_PAD_REMEDY}")
        lengths: list[int] = self.lengths().tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != tensor.shape[0]:
            self.validate()
        return list(tensor.split(lengths)) if lengths else []

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return each sample's first values, padded with `padding_value`: [batch, desired_length, ...].

        If `desired_length` is None, the longest sample's length is used; in a graph, None raises GraphError.
        """
        return self._pad(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """Return the weights padded like `to_padded_dense`, [batch, desired_length], or None without weights."""
        return None if self._weights is None else self._pad(self._weights, desired_length, padding_value)

    def _pad(self, tensor: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if desired_length is None:
            check_eager("to_padded_dense()", _PAD_REMEDY)
            desired_length = max(self.lengths().tolist(), default=0)
        elif not isinstance(desired_length, int) or desired_length < 0:
            raise InputError(f"desired_length={desired_length!r}: give an integer from 0 on")
        self.check_bags()
        return pad_bags(tensor, self._offsets, desired_length, padding_value)

    def __str__(self) -> str:
        return format_entries(self, "JaggedTensor", lambda: format_bags(self._values, self._weights, self._offsets))

    def __repr__(self) -> str:
        return f"JaggedTensor(samples={self._offsets.shape[0] - 1}, {self._describe()})"
