"""What containers of tensors share: moving their tensors, and standing in a graph's arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Carrier:
    """An object that holds tensors in `_fields`, some of them None, and else what `_context` gives.

    open_leaves: which of the fields change their first dimension from batch to batch.
    """

    _fields: ClassVar[tuple[str, ...]]
    open_leaves: ClassVar[frozenset[int]] = frozenset()

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
        """Where the tensors are."""
        device: torch.device = getattr(self, self._fields[0]).device
        return device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in page-locked memory, from where a GPU copies it without waiting."""
        return self._each(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until what `stream` has been given to do is done."""
        for tensor in self._tensors():
            if tensor is not None:
                tensor.record_stream(stream)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every tensor changed."""
        made = copy(self)
        for field, tensor in zip(self._fields, self._tensors(), strict=True):
            setattr(made, field, None if tensor is None else change(tensor))
        return made

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, field) for field in self._fields]

    def _context(self) -> Any:
        """What is no tensor."""
        return None

    def _set_context(self, context: Any) -> None:
        """Take what `_context` gave."""

    def _flatten(self) -> tuple[list[Any], Any]:
        return self._tensors(), self._context()

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        names = [pytree.GetAttrKey(field.removeprefix("_")) for field in self._fields]
        return list(zip(names, self._tensors(), strict=True)), self._context()

    @classmethod
    def _unflatten(cls, tensors: Any, context: Any) -> Self:
        """Of whatever a tree holds in the place of tensors, unchecked."""
        made = cls.__new__(cls)
        for field, tensor in zip(cls._fields, tensors, strict=True):
            setattr(made, field, tensor)
        made._set_context(context)
        return made
