"""Read-only copies of rows and optimizer states.

In FBGEMM and TorchRec, writing to a tensor of rows changes the table. In tierbed, the tensor is a copy: a write raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...engine.errors import InputError
from ..autograd.shadow import get_operation_name, is_arithmetic, is_write, shares_memory

_COPY_REMEDY = (
    "they are a copy, so no row of the embedding would change, and the next state_dict may order rows differently; "
    "give a state to load_state_dict, call put or load_dense, average what tierbed.to_dense_state_dict(model) returns, "
    "or clone() the tensor"
)
WRITE_METHODS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")  # add_ and the like write, too


class ReadOnlyCopy(Tensor):
    """A tensor that raises InputError if the tensor or a view is changed in place. Computed results are plain tensors.

    Views made inside torch.compile are plain as well: writing to such a view changes the copy without an error.
    """

    def __new__(cls, tensor: Tensor, *_: Any) -> Self:
        if tensor.is_inference():  # inference tensors lack the version counter that shows a write
            with torch.inference_mode(False):
                tensor = tensor.clone()
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(cls)

    def __init__(self, tensor: Tensor, remedy: str) -> None:
        """Make a read-only view of `tensor`. Writing to the view raises InputError with `remedy` as its message."""
        self.remedy = remedy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces this method, but supports neither versions nor storage
            if func.__name__ in WRITE_METHODS or (func.__name__[-1] == "_" and func.__name__[-2] != "_"):
                raise InputError("cannot compile this write; in eager mode, the write raises an error that says why")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            copies = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            if copies and func is Tensor.__format__:
                return Tensor.__format__(copies[0].as_subclass(Tensor), *args[1:])  # format() fails for subclasses
            versions = [copy._version for copy in copies]
            result = func(*args, **(kwargs or {}))
            for copy, version in zip(copies, versions, strict=True):
                if copy._version != version and copy.remedy:
                    raise InputError(copy.remedy)
        if isinstance(result, np.ndarray) and any(copy.remedy for copy in copies):
            result.setflags(write=False)
        if type(result) in (list, tuple):
            return type(result)(_read_only_view(item, copies) for item in result)
        return _read_only_view(result, copies)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if self.remedy:  # torch does not call __torch_function__ for set_
            raise InputError(self.remedy)
        return super().set_(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def _read_only_view(result: Any, copies: Sequence[ReadOnlyCopy]) -> Any:
    """Return an operation's result, read-only if it is a view of a copy."""
    if type(result) is not Tensor or result.layout != torch.strided:
        return result
    with torch._C.DisableTorchFunctionSubclass():
        copy = next((copy for copy in copies if shares_memory(copy, result)), None)
    if copy is None:
        return result
    view = type(copy).__new__(type(copy), result)
    view.__dict__.update(copy.__dict__)
    return view


class StateTensor(ReadOnlyCopy):
    """A state_dict()'s tensor of rows. Writing to the tensor or a view raises, and so does averaging with it.

    torch.distributed.checkpoint saves it as an object, not as a tensor, so that a load can change its size.
    """

    def __init__(self, tensor: Tensor, has_rows: bool, is_writable: bool = False) -> None:
        """has_rows: False on ranks whose rows are in rank 0's state_dict. is_writable: True for a writable copy."""
        super().__init__(tensor, "" if is_writable else f"the rows of a state_dict(): {_COPY_REMEDY}")
        self.has_rows, self.is_writable = has_rows, is_writable

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, get_operation_name(func)
        with torch._C.DisableTorchFunctionSubclass():
            states = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            writes, target = is_write(func) or kwargs.get("out") is not None, args[0] if args else None
            if (writes and any(not state.is_writable if state is target else name != "copy_" for state in states)) or (
                not writes and is_arithmetic(func) and any(state.is_floating_point() for state in states)
            ):
                raise InputError(f"{name} of the rows of a state_dict(): {_COPY_REMEDY}")
        return super().__torch_function__(func, types, args, kwargs)

    def new_empty(self, *size: Any, **like: Any) -> StateTensor:
        return StateTensor(super().new_empty(*size, **like), self.has_rows, True)  # for async_save

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex  # imported here, because it takes a second
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)] if self.has_rows else []

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # pickled as a plain tensor

    def __deepcopy__(self, memo: Any) -> StateTensor:
        return StateTensor(self.clone(), self.has_rows, True)
