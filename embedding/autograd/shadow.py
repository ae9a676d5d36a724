"""The shadow parameter of an embedding.

Rows are in a store, not in a parameter. Optimizers, autograd and state_dicts work with parameters, so each embedding
gets a *shadow*: a parameter [1, 1] that stands for all rows. The shadow's value is always zero. Code that expects rows
in a parameter, such as a weight average, a penalty or an initialization, would silently do nothing. So if an operation
needs the rows, and its argument is a shadow or a copy of a shadow, it raises an error that says what to do instead. An
operation that only reads the shadow's value logs a warning once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...engine.errors import GraphError, InputError, OptionError
from ...engine.ops.embedding_base import EmbeddingBase

log = logging.getLogger("tierbed")
_SETTABLE_ATTRIBUTES = {"grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"}
_READING_METHODS = {"__index__", "__init__", "__init_subclass__", "__int__", "__invert__", "__iter__"}
_COPY_OPS = {"clone", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "pin_memory"}
# operations that average weights; norms, powers and sums stay allowed, because loggers compute them under no_grad
_ARITHMETIC_OPS = {"add", "sub", "mul", "div", "lerp", "truediv", "true_divide", "subtract", "multiply", "divide"}
# operations that compare or check weights would only see a zero; isfinite stays allowed, because loggers call it
_CHECK_OPS = {"equal", "allclose", "isclose", "eq", "ne", "isnan", "isinf", "__eq__", "__ne__"}
_NUMBER_OPS = {"item", "tolist", "__float__", "__bool__", "is_nonzero"}  # operations that return numbers, not tensors
_WRITE_REMEDY = (
    "choose initial rows by default_initializer=, make_table_options or initializer= (of Embedding); write rows by put "
    "or load_dense; carry rows over by load_state_dict"
)
_READ_REMEDY = "read emb.weight, some ids' rows by emb.get, or all embeddings' rows by tierbed.to_dense_state_dict"
PARTLY_CONVERTED = "A model that contains the embedding may be half converted: make or load it again"
_warned_operations: set[str] = set()  # names of operations whose warning was already logged


def get_operation_name(function: Any) -> str:
    """Return a torch operation's name without its overload."""
    return str(function.__name__.partition(".")[0])


def is_write(function: Any) -> bool:
    """True for a torch operation that writes to an argument."""
    name = get_operation_name(function)
    if name == "__set__":
        return function.__self__.__name__ not in _SETTABLE_ATTRIBUTES
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _READING_METHODS)
    return name.endswith("_") and name != "requires_grad_"


def is_arithmetic(function: Any) -> bool:
    """True for arithmetic with another tensor or a number. Code that averages weights calls such operations."""
    return get_operation_name(function).rpartition("foreach_")[2].strip("_").removeprefix("r") in _ARITHMETIC_OPS


class _Placeholder(Tensor):
    """A tensor that stands for rows. Operations that would need the rows themselves raise an error."""

    owner: ref[EmbeddingBase]
    is_writable = False  # True for a writable copy
    is_in_state_dict = False  # True for a copy in a state_dict(); may be read, as the state_dict saves the rows too

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__" and ((result := func(*args)) is None or not isinstance(result, Tensor)):
                return result
            if is_write(func) or kwargs.get("out") is not None:
                _check_write(func, args, kwargs)
            elif is_arithmetic(func) and args[0] is not args[-1]:
                raise _make_error(func, args, kwargs)
            elif func.__name__ in _CHECK_OPS and not _has_state_copy(args, kwargs):
                if func is not torch.equal or any(
                    type(item) is not Shadow for item in _find_placeholders(args, kwargs)
                ):
                    raise _make_error(func, args, kwargs)
                _warn_of_read(func, args, kwargs)  # Lightning does this to find a parameter in an optimizer
                return args[0] is args[-1]
            plain_args = args
            module = getattr(func, "__module__", None) or ""  # methods lack `__module__`
            if module.startswith("torch._ops"):  # the call comes from code that torch.compile generated
                plain_args = [to_plain_tensor(arg) if isinstance(arg, _Placeholder) else arg for arg in args]
            result = func(*plain_args, **kwargs)
            if module == "torch._ops.tierbed":
                return result
            if isinstance(result, np.ndarray):
                result.setflags(write=False)
            if isinstance(result, np.ndarray) or func.__name__ in _NUMBER_OPS:
                _warn_of_read(func, args, kwargs)
            if torch.compiler.is_dynamo_compiling():
                raise GraphError("this operation cannot be compiled; outside torch.compile, its error says what to do")
            if type(result) in (list, tuple):
                return type(result)([_wrap_result(item, func, args, kwargs) for item in result])
            return _wrap_result(result, func, args, kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        raise _make_error(Tensor.set_, (self, *args), kwargs, True)  # torch does not call __torch_function__ for set_

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach().as_subclass(Tensor)
            saved = nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain
            return saved.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = self.detach().clone()
        return copy


class Shadow(_Placeholder, nn.Parameter):
    """An embedding's parameter, zeros [1, 1]. Optimizers and autograd reach the rows through this parameter."""


class ShadowCopy(_Placeholder):
    """A view or copy of a `Shadow`, for example in a state_dict()."""

    def __new__(cls, tensor: Tensor, *_: Any) -> ShadowCopy:
        return Tensor._make_subclass(cls, tensor, tensor.grad_fn is not None)

    def __init__(self, tensor: Tensor, source: _Placeholder, is_writable: bool) -> None:
        self.is_writable = is_writable or source.is_writable
        self.owner, self.is_in_state_dict = source.owner, source.is_in_state_dict


def make_shadow(embedding: EmbeddingBase, name: str, parameter: nn.Parameter | None) -> nn.Parameter:
    """Turn a parameter into an embedding's `Shadow`. Raises InputError if the parameter is unsuitable."""
    if name not in ("shadow", embedding.parameter_name) or parameter is None or parameter.shape != (1, 1):
        raise InputError(
            f"{name} of embedding {embedding.name!r} cannot be set: no parameter holds its rows; {_WRITE_REMEDY}"
        )
    if type(parameter) is nn.Parameter:  # in a trace, the parameter has another type
        shadow: Any = parameter
        shadow.__class__ = Shadow
        shadow.owner = ref(embedding)
    return parameter


def make_converter(
    embedding: EmbeddingBase, function: Callable[[Tensor], Tensor], note: str = PARTLY_CONVERTED
) -> Callable[[Tensor], Tensor]:
    """Wrap a `function` that moves or converts tensors. The wrapper only moves: an embedding's parameter stays float32.

    Raises OptionError if the dtype is neither float32 nor `output_dtype`, or if torch does not support the device here.
    note: ends each error message, and says how much of the model is already converted.
    """
    try:
        dtype = function(embedding.shadow.detach()).dtype
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available():
            raise
        raise OptionError(
            f'embedding {embedding.name!r}: torch has no such device here ({error}); call .to("cpu"). Rows trained '
            f"on the CPU are equal to rows trained on a GPU, bit for bit. {note}"
        ) from error
    if dtype not in (torch.float32, embedding.output_dtype):
        if dtype in (torch.float16, torch.bfloat16):
            remedy = f"give output_dtype={dtype} when it is made, and dtype={dtype} for stored rows of 16 bits"
        else:
            remedy = f"rows are float32 at most: convert its results by .to({dtype})"
        raise OptionError(
            f"embedding {embedding.name!r}: cannot convert it to {dtype}: its rows would keep their dtype, and lookups "
            f"would still return {embedding.output_dtype}; {remedy}, or convert only the other modules. {note}"
        )
    return lambda tensor: function(tensor).to(torch.float32).as_subclass(Tensor)  # torch makes a parameter of this


def _wrap_result(result: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an operation's result, guarded if it is a view or a copy. Raises GraphError for results with a grad_fn."""
    if not isinstance(result, Tensor) or isinstance(result, _Placeholder):
        return result
    name, has_grad_fn = get_operation_name(func), result.grad_fn is not None
    if has_grad_fn and name in ("view_as", "expand_as") and args[0] is args[1]:  # used to find the autograd node
        return result
    for argument in _find_placeholders(args, kwargs):
        if name in _COPY_OPS or shares_memory(argument, result):
            return ShadowCopy(result, argument, name in _COPY_OPS)
    if has_grad_fn:
        raise _make_error(func, args, kwargs)
    if not name.startswith(("new_", "__get__", "copy_")) and not name.endswith("like"):
        _warn_of_read(func, args, kwargs)
    return result


def _has_state_copy(*arguments: Any) -> bool:
    return any(argument.is_in_state_dict for argument in _find_placeholders(arguments))


def _warn_of_read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Warn that an operation reads the shadow's value instead of the rows. Each operation is warned about once."""
    if func.__name__ not in _warned_operations and not _has_state_copy(args, kwargs):
        _warned_operations.add(func.__name__)
        log.warning("%s reads a placeholder, not the rows; %s", _describe_operation(func, args, kwargs), _READ_REMEDY)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """True if one tensor is a view of the other, or both tensors are views of a third tensor."""
    is_strided = one.layout == other.layout == torch.strided
    try:
        return is_strided and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except NotImplementedError:  # torch.func's tensors lack a storage
        return False


def to_plain_tensor(shadow: Tensor) -> Tensor:
    """Return the shadow as a plain tensor, because torch's modes accept no subclass. Autograd still sees the shadow."""
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        if shadow.requires_grad and torch.is_grad_enabled():
            return shadow.view_as(shadow)
        return Tensor._make_subclass(Tensor, shadow, shadow.requires_grad)


def _find_placeholders(*arguments: Any) -> list[_Placeholder]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, _Placeholder)]


def _check_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if an operation writes to a guarded tensor, or copies a guarded tensor into a tensor of another size."""
    if get_operation_name(func) == "copy_":
        target, source = args[0], args[1]
        if not isinstance(target, _Placeholder) and target.numel() != 1:  # torch would fill `target` with zeros
            raise _make_error(func, args, kwargs)
        if not isinstance(target, _Placeholder) or target.is_writable or target is source:
            return
        if not isinstance(source, _Placeholder) and source.numel() == 1 and not source.count_nonzero():
            return  # torch.distributed.checkpoint loads the zero that it saved
    raise _make_error(func, args, kwargs, True)


def _describe_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    embedding = _find_placeholders(args, kwargs)[0].owner()
    name = get_operation_name(func)
    if name in ("__get__", "__set__"):
        name = f".{func.__self__.__name__}" + " =" * (name == "__set__")
    return f"{name} of the parameter of embedding {'?' if embedding is None else embedding.name!r}"


def _make_error(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_write: bool = False) -> Exception:
    name, operation = get_operation_name(func), _describe_operation(func, args, kwargs)
    if is_write:
        remedy = "train in one process, or across ranks by world=" if name == "share_memory_" else _WRITE_REMEDY
        return InputError(f"{operation}: no tensor holds its rows, so no row would change or be shared; {remedy}")
    if name in _CHECK_OPS or name == "copy_":
        return GraphError(f"{operation}: no tensor holds its rows, so the result would ignore the rows; {_READ_REMEDY}")
    return GraphError(
        f"{operation}: no tensor holds its rows, so a penalty or an average would ignore the rows. To penalise rows, "
        "set weight_decay, or penalise a lookup's result or the weight of an Embedding. To average rows, "
        "average what tierbed.to_dense_state_dict(model) returns. Leave the embedding out of sums over parameters()"
    )
