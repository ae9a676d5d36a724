"""The parameter that stands for an embedding's rows, and refuses to be taken for a tensor that has them."""

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
from ...engine.ops.rows_contract import EmbeddingBase

log = logging.getLogger("tierbed")
_SETTABLE = {"grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"}
_READ_BY_I = {"__index__", "__init__", "__init_subclass__", "__int__", "__invert__", "__iter__"}
_COPIES = {"clone", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "pin_memory"}
# what averages weights is made of; norms, powers and sums are not, and loggers may take them under no_grad
_MIXES = {"add", "sub", "mul", "div", "lerp", "truediv", "true_divide", "subtract", "multiply", "divide"}
# what compares and checks weights, where a number in place of the rows would answer for them; loggers call isfinite
_CHECKS = {"equal", "allclose", "isclose", "eq", "ne", "isnan", "isinf", "__eq__", "__ne__"}
_NUMBERS = {"item", "tolist", "__float__", "__bool__", "is_nonzero"}  # what reads a tensor and returns none
_WRITE = (
    "choose initial rows by initializer= (of Embedding), default_initializer= or make_table_options, write rows by put "
    "or load_dense, and carry them over by load_state_dict"
)
_READ = "read emb.weight, or the rows of some ids by emb.get, or those of all embeddings by tierbed.to_dense_state_dict"
IN_PART = "A model around it may be converted in part by now: make or load it again"
_noted: set[str] = set()  # the operations that read a parameter and got no row


def name_of(function: Any) -> str:
    """The name of an operation of torch, without that of an overload."""
    return str(function.__name__.partition(".")[0])


def is_write(function: Any) -> bool:
    """True for an operation of torch that writes to a tensor it gets."""
    name = name_of(function)
    if name == "__set__":
        return function.__self__.__name__ not in _SETTABLE
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _READ_BY_I)
    return name.endswith("_") and name != "requires_grad_"


def is_mix(function: Any) -> bool:
    """True for arithmetic with another tensor or a number, of which averages of weights are made."""
    return name_of(function).rpartition("foreach_")[2].strip("_").removeprefix("r") in _MIXES


class _Guarded(Tensor):
    """A tensor without rows. What only a tensor with rows could do raises."""

    owner: ref[EmbeddingBase]
    is_own = False  # True for a copy that may be copied into
    is_in_state = False  # True for a copy in a state_dict(), which names or has the rows besides, so it may be read

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__" and ((result := func(*args)) is None or not isinstance(result, Tensor)):
                return result
            if is_write(func) or given.get("out") is not None:
                _check_write(func, args, given)
            elif is_mix(func) and args[0] is not args[-1]:
                raise _misuse(func, args, given)
            elif func.__name__ in _CHECKS and not _is_of_state(args, given):
                if func is not torch.equal or not all(type(one) is Shadow for one in _guarded(args, given)):
                    raise _misuse(func, args, given)
                _note_read(func, args, given)  # of Lightning, which asks whether an optimizer has a parameter
                return args[0] is args[-1]
            used = args
            module = getattr(func, "__module__", None) or ""  # which methods lack
            if module.startswith("torch._ops"):  # called by what torch.compile made
                used = [plain(one) if isinstance(one, _Guarded) else one for one in args]
            result = func(*used, **given)
            if module == "torch._ops.tierbed":
                return result
            if isinstance(result, np.ndarray):
                result.setflags(write=False)
            if isinstance(result, np.ndarray) or func.__name__ in _NUMBERS:
                _note_read(func, args, given)
            if torch.compiler.is_dynamo_compiling():
                raise GraphError("not in compiled code: Dynamo calls it as it is, and it raises the remedy")
            if type(result) in (list, tuple):
                return type(result)([_checked(one, func, args, given) for one in result])
            return _checked(result, func, args, given)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        raise _misuse(Tensor.set_, (self, *args), kwargs, True)  # torch calls no __torch_function__ for it

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach().as_subclass(Tensor)
            saved = nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain
            return saved.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = self.detach().clone()
        return copy


class Shadow(_Guarded, nn.Parameter):
    """The parameter of an embedding, [1, 1] of zeros, by which optimizers and autograd reach its rows."""

    def belong_to(self, embedding: EmbeddingBase) -> None:
        self.owner = ref(embedding)


class ShadowCopy(_Guarded):
    """A tensor made of a `Shadow`, such as a state_dict() or an average of weights has."""

    def __new__(cls, tensor: Tensor, *_: Any) -> ShadowCopy:
        return Tensor._make_subclass(cls, tensor, tensor.grad_fn is not None)

    def __init__(self, tensor: Tensor, source: _Guarded, is_own: bool) -> None:
        self.owner, self.is_own, self.is_in_state = source.owner, is_own or source.is_own, source.is_in_state

    def enter_state(self) -> None:
        """Called when a state_dict() takes it."""
        self.is_in_state = True


def adopt(embedding: EmbeddingBase, name: str, parameter: nn.Parameter | None) -> nn.Parameter:
    """Make a parameter the `Shadow` of an embedding. InputError for one that is no `shadow`."""
    if name not in ("shadow", embedding.parameter_name) or parameter is None or parameter.shape != (1, 1):
        raise InputError(
            f"{name} = of embedding {embedding.name!r}: no parameter holds its rows, so no row would change; {_WRITE}"
        )
    if type(parameter) is nn.Parameter:  # not that of a trace
        shadow: Any = parameter
        shadow.__class__ = Shadow
        shadow.belong_to(embedding)
    return parameter


def converter(
    embedding: EmbeddingBase, function: Callable[[Tensor], Tensor], by_now: str = IN_PART
) -> Callable[[Tensor], Tensor]:
    """Wrap `function`, which moves or converts a module, so that it moves an embedding's parameter alone.

    OptionError for another dtype than that of lookups' results, and for a GPU where there is none. by_now: says what is
    converted when this raises.
    """
    try:
        dtype = function(embedding.shadow.detach()).dtype
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available():
            raise
        raise OptionError(
            f'embedding {embedding.name!r}: torch has no such device here ({error}); call .to("cpu"), where its rows '
            f"have the same bits. {by_now}"
        ) from error
    if dtype not in (torch.float32, embedding.output_dtype):
        if dtype in (torch.float16, torch.bfloat16):
            remedy = f"give output_dtype={dtype} when it is made, and dtype={dtype} for stored rows of 16 bits"
        else:
            remedy = f"rows are float32 at most: convert its results by .to({dtype})"
        raise OptionError(
            f"embedding {embedding.name!r}: a conversion to {dtype} would change neither its rows nor what lookups "
            f"return, {embedding.output_dtype}; {remedy}, or convert the other modules alone. {by_now}"
        )
    return lambda tensor: function(tensor).to(torch.float32).as_subclass(Tensor)  # no Shadow


def _checked(result: Any, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """The result of an operation, guarded if it is a view or a copy. GraphError if autograd recorded another."""
    if not isinstance(result, Tensor) or isinstance(result, _Guarded):
        return result
    name, recorded = name_of(func), result.grad_fn is not None
    if recorded and name in ("view_as", "expand_as") and args[0] is args[1]:  # by which hooks find a node of autograd
        return result
    for one in _guarded(args, given):
        if name in _COPIES or shares_memory(one, result):
            return ShadowCopy(result, one, name in _COPIES)
    if recorded:
        raise _misuse(func, args, given)
    if not name.startswith(("new_", "__get__", "copy_")) and not name.endswith("like"):
        _note_read(func, args, given)
    return result


def _is_of_state(*arguments: Any) -> bool:
    return any(one.is_in_state for one in _guarded(arguments))


def _note_read(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Log that an operation got no row, once for each."""
    if func.__name__ not in _noted and not _is_of_state(args, given):
        _noted.add(func.__name__)
        log.warning("%s reads a zero in place of its rows; %s", _where(func, args, given), _READ)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """True if one tensor is a view of the other, or both of a third."""
    is_strided = one.layout == other.layout == torch.strided
    try:
        return is_strided and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except NotImplementedError:  # of torch.func's tensors
        return False


def plain(shadow: Tensor) -> Tensor:
    """The tensor itself, through which autograd reaches the parameter where it records. Torch's modes take no other."""
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        if shadow.requires_grad and torch.is_grad_enabled():
            return shadow.view_as(shadow)
        return Tensor._make_subclass(Tensor, shadow, shadow.requires_grad)


def _guarded(*arguments: Any) -> list[_Guarded]:
    return [one for one in pytree.tree_leaves(arguments) if isinstance(one, _Guarded)]


def _check_write(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """InputError for a write into a guarded tensor, or into another one by its numbers."""
    if name_of(func) == "copy_":
        target, source = args[0], args[1]
        if not isinstance(target, _Guarded) and target.numel() != 1:  # torch would fill it with zeros
            raise _misuse(func, args, given)
        if not isinstance(target, _Guarded) or target.is_own or target is source:
            return
        if not isinstance(source, _Guarded) and source.numel() == 1 and not source.count_nonzero():
            return  # torch.distributed.checkpoint loads the zero that it saved
    raise _misuse(func, args, given, True)


def _where(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> str:
    embedding = _guarded(args, given)[0].owner()
    name = name_of(func)
    if name in ("__get__", "__set__"):
        name = f".{func.__self__.__name__}" + " =" * (name == "__set__")
    return f"{name} of the parameter of embedding {'?' if embedding is None else embedding.name!r}"


def _misuse(func: Any, args: Sequence[Any], given: Mapping[str, Any], is_write: bool = False) -> Exception:
    name, where = name_of(func), _where(func, args, given)
    if is_write:
        remedy = "train in one process, or over ranks by world=" if name == "share_memory_" else _WRITE
        return InputError(f"{where}: no tensor holds its rows, so no row would change or be shared; {remedy}")
    if name in _CHECKS or name == "copy_":
        return GraphError(f"{where}: no tensor holds its rows, so the result would not be theirs; {_READ}")
    return GraphError(
        f"{where}: no tensor holds its rows, so a penalty or an average would leave them out; penalise emb.weight of "
        "an Embedding, or the rows that a lookup returns, or give the optimizer weight_decay; leave the embedding's "
        "parameters out of sums over parameters(), and average what tierbed.to_dense_state_dict(model) returns"
    )
