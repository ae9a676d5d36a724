"""Read-only copies of rows and of their optimizer states.

In FBGEMM and TorchRec a write into a tensor of rows is a write into the table. Here it would change a copy, so it
raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..engine.errors import InputError
from .shadow import shares_memory

WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")  # besides names that end in _


class ReadOnlyCopy(Tensor):
    """A tensor whose in-place operations, and those of its views, raise InputError. Tensors computed from it are plain.

    A view that is made inside of torch.compile is plain too: a write into it changes the copy and raises nothing.
    """

    remedy: str

    @classmethod
    def of(cls, tensor: Tensor, remedy: str) -> Self:
        """A read-only view of `tensor`. remedy: the message of the error."""
        if tensor.is_inference():  # it has no versions
            with torch.inference_mode(False):
                tensor = tensor.clone()
        with torch._C.DisableTorchFunctionSubclass():
            copy = tensor.as_subclass(cls)
        copy.remedy = remedy
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces this method, and knows neither versions nor memory
            if func.__name__ in WRITES or (func.__name__[-1] == "_" and func.__name__[-2] != "_"):
                raise InputError("not in compiled code: Dynamo runs the write as it is, and it raises the remedy")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            copies = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls)]
            if copies and func is Tensor.__format__:
                return Tensor.__format__(copies[0].as_subclass(Tensor), *args[1:])  # a subclass takes no format
            versions = [copy._version for copy in copies]
            result = func(*args, **(kwargs or {}))
            for copy, version in zip(copies, versions, strict=True):
                if copy._version != version:
                    raise InputError(copy.remedy)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        if type(result) in (list, tuple):
            return type(result)(_read_only_view(one, copies) for one in result)
        return _read_only_view(result, copies)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(self.remedy)  # torch calls no __torch_function__ for it

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def _read_only_view(result: Any, copies: Sequence[ReadOnlyCopy]) -> Any:
    """The result of an operation, read-only if it is a view of one of the copies."""
    if type(result) is not Tensor or result.layout != torch.strided:
        return result
    with torch._C.DisableTorchFunctionSubclass():
        copy = next((one for one in copies if shares_memory(one, result)), None)
    return result if copy is None else type(copy).of(result, copy.remedy)
