"""Copies of rows that refuse to be written: a write into FBGEMM's tensors is one into the table, and here it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...engine.errors import InputError

WRITES = (  # beside those whose name ends in _
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
)


class ReadOnlyCopy(Tensor):
    """A tensor whose in-place operations raise InputError, and those of its views. Tensors computed of it are plain.

    So are views that code of torch.compile makes within: a write into such a view changes the copy without an error.
    """

    remedy: str

    @classmethod
    def of(cls, tensor: Tensor, remedy: str) -> ReadOnlyCopy:
        """The same memory. remedy: the message of the error."""
        with torch._C.DisableTorchFunctionSubclass():
            made = tensor.as_subclass(cls)
        made.remedy = remedy
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces this method, and knows neither versions nor memory
            if func.__name__ in WRITES or (func.__name__[-1] == "_" and func.__name__[-2] != "_"):
                raise InputError("not in compiled code: Dynamo runs the write as it is, and there it is refused")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            own = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls)]
            if own and func is Tensor.__format__:
                return Tensor.__format__(own[0].as_subclass(Tensor), *args[1:])  # of a subclass it refuses formats
            versions = [one._version for one in own]
            found = func(*args, **(kwargs or {}))
            for one, version in zip(own, versions, strict=True):
                if one._version != version:
                    raise InputError(one.remedy)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        if type(found) in (list, tuple):
            return type(found)(_same_memory(one, own) for one in found)
        return _same_memory(found, own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def _same_memory(found: Any, own: Sequence[ReadOnlyCopy]) -> Any:
    """What an operation returned: read-only as well, if it is a view of one of these."""
    if type(found) is not Tensor or found.layout != torch.strided:
        return found
    with torch._C.DisableTorchFunctionSubclass():
        memory = found.untyped_storage()._cdata
        copy = next((one for one in own if one.untyped_storage()._cdata == memory), None)
    return found if copy is None else ReadOnlyCopy.of(found, copy.remedy)
