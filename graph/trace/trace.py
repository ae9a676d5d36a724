"""Trace `build`: run it once on fake tensors and record its forward and backward as aten calls.

`make_fx` records every aten call while `build` runs, also inside autograd. Fake tensors have shapes but no values, so a
`build` that needs a value raises. During the trace, swap.py replaces the real parameters in modules and optimizers by
fake ones. A dispatch mode refuses ops that the trace would record wrongly. `ReadRecorder` collects the Python values
that `build` reads, because these values become constants of the step.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, takewhile
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental import _config as symbolic
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.errors import GraphError, InputError
from ...engine.ops.embedding_base import REMEDY_ATTRIBUTE, TRACED_ATTRIBUTE
from .alias import is_random
from .names import HasBuild, find_tensor_name, map_tensor_names
from .reads import ReadRecorder
from .signature import Call, Dims, is_plain, name_arguments, suggest_registration
from .swap import make_setting_error, set_sentinel_grads, swap_tensors

_OWN_FOLDERS = [Path(__file__).parents[2] / own for own in ("engine", "embedding", "graph")]
_LIBRARY_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, *_OWN_FOLDERS))
_INPUT_NAME = re.compile(r"L\['t(\d+)'\]")  # torch's guards refer to input tensor 3 as L['t3']
_OFFSET_CHECK = re.compile(r"L\[\d+\]\.storage_offset\(\) == \d+")  # dropped from guards: a step works for any offset
_ORDINARY_SIZE = 64
_SEED = 0x7165_7262_6564
BACKWARD = "backward"  # this key in a node's meta says that autograd added the node
MODULE_TENSOR = "module_tensor"  # this key in a placeholder's meta marks a parameter or buffer

ShapeGuard = Callable[[Sequence[Tensor]], bool]  # True if a step accepts inputs of these sizes


@dataclass(frozen=True)
class ResultSpec:
    """Describes the result of build, and the parameters that got a gradient."""

    tree_spec: pytree.TreeSpec
    constants: list[Any]  # the result's leaves, with None in place of tensors
    is_tensor: list[bool]
    grad_indices: list[int]  # indices of parameters whose gradients the trace returns after the result


@dataclass(frozen=True)
class Trace:
    """A traced step. Its placeholders are the inputs, followed by the graph's parameters and buffers."""

    module: fx.GraphModule
    result_spec: ResultSpec
    input_names: list[str]  # names of the input tensors
    guard: ShapeGuard | None  # None for a static-shape step
    reads: ReadRecorder  # the Python values that became constants

    def make_program_key(self) -> Hashable:
        """Return a key. Traces with equal keys and signatures make equal steps. Call this before passes run."""
        graph, result = self.module.graph, self.result_spec
        grads = graph.find_nodes(op="call_function", target=torch.ops.tierbed.lookup_grad.default)
        orders = sorted(node.args[-2] for node in grads)  # renumbered, as the process counts lookups over all calls
        nodes = []
        for node in graph.nodes:
            args: Any = node.args
            if node in grads:
                args = *args[:-2], orders.index(args[-2]), args[-1]
            constant = getattr(self.module, node.target) if node.op == "get_attr" else None
            if isinstance(constant, Tensor) and all("lift_fresh" in str(user.target) for user in node.users):
                constant = repr(constant.tolist())  # by value: each trace creates a new tensor
            else:
                constant = id(constant)  # by identity: every call reads this object
            nodes.append((node.op, node.name, str(node.target), repr(args), repr(node.kwargs), constant))
        constants = [(type(value), repr(value)) for value in result.constants]
        guard = self.guard and self.guard.__code__
        return tuple(nodes), repr((result.tree_spec, constants, result.is_tensor, result.grad_indices)), guard


def trace(
    root: HasBuild, call: Call, tensors: list[Tensor], optimizers: Iterable[Optimizer], dynamic_dims: Dims | None = None
) -> Trace:
    """Trace `root.build` for a call's arguments. Raises GraphError if a static graph cannot express `build`.

    tensors: parameters and buffers under `root`; tied tensors may repeat. dynamic_dims: None for a static-shape step.
    """
    leaves, inputs, leaf_names = call.leaves, call.inputs, name_arguments(root.build, call.arguments)
    names = map_tensor_names(root)
    _refuse_hooks(tensors, names, optimizers)
    tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    group_tensors = {
        id(value): (optimizer, name)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, Tensor)
    }
    result_spec: ResultSpec | None = None
    reads = ReadRecorder(root, leaves)

    def step(*fakes: Tensor) -> list[Tensor]:
        nonlocal result_spec
        arguments = list(leaves)
        for i, fake in zip(tensor_leaves, fakes, strict=False):
            arguments[i] = fake.detach().requires_grad_(leaves[i].requires_grad)
        swaps: dict[int, Tensor] = {}
        for fake, real in zip(fakes[len(inputs) :], tensors, strict=True):
            swaps.setdefault(id(real), _make_leaf(fake, real))
        args, kwargs = pytree.tree_unflatten(arguments, call.spec)
        grad_names = {id(grad): f"{names[real]}.grad" for real, grad in sentinels.items()}
        op_guard = _OpGuard(root, names | grad_names, group_tensors)
        with swap_tensors(root, optimizers, swaps, names), op_guard, _NoDataAssignment(), reads:
            result = root.build(*args, **kwargs)
        op_guard.check_seed()
        for i in tensor_leaves:
            if arguments[i].grad is not None:
                raise GraphError(
                    f"argument {leaf_names[i]} requires grad, but a graph keeps no "
                    "gradient of its arguments; pass it detached, or use torch.autograd.grad in build"
                )
        values, out_spec = pytree.tree_flatten(result)
        is_tensor = [isinstance(value, Tensor) for value in values]
        constants = [None if isinstance(value, Tensor) else value for value in values]
        for value in constants:
            if not is_plain(value):
                raise GraphError(
                    f"build returns a {type(value).__name__}; return tensors and plain values, also in "
                    f"lists, tuples or dicts, or {suggest_registration(value)}"
                )
        outputs = [value.detach() if value.requires_grad else value for value in compress(values, is_tensor)]
        grads = {real: swap.grad for real, swap in swaps.items() if swap.grad is not None}
        index_by_id = {id(real): i for i, real in enumerate(tensors) if id(real) in grads}
        result_spec = ResultSpec(out_spec, constants, is_tensor, [*index_by_id.values()])
        return outputs + [grads[real] for real in index_by_id]

    shape_env: ShapeEnv | None = None
    if dynamic_dims is not None:  # value-dependent ops raise, as in a static-shape trace
        shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
    free_dims = call.dynamic_dims if dynamic_dims else Dims()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
    grad_mode = torch.is_grad_enabled()  # inference_mode(False) turns gradients on
    # torch must neither assume nor test that containers' dynamic sizes differ from 0 and 1
    any_size_mode = symbolic.patch(backed_size_oblivious=bool(free_dims))  # type: ignore[attr-defined]
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode), any_size_mode:
        # `detach` gives a tensor that is passed twice two fakes, because a later call may pass two different tensors
        fakes = [_make_fake(mode, t.detach(), i, dynamic_dims, free_dims) for i, t in enumerate([*inputs, *tensors])]
        # trace the results of torch.compile as the modules that they wrap
        inlining = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
        with set_sentinel_grads(tensors) as sentinels, torch.random.fork_rng(devices=[]), inlining, _mute_log(), mode:
            try:  # torch 2.14 records detach as alias unless decomposition_table is empty
                module = make_fx(step, decomposition_table={}, _allow_non_fake_inputs=True)(*fakes)
            except Exception as error:
                if _is_data_dependent(error):
                    raise GraphError(
                        f"{_find_user_line(error)} needs a tensor's value, but a static graph is traced without "
                        f"values; {_suggest_remedy(error)}"
                    ) from error
                error_file = traceback.extract_tb(error.__traceback__)[-1].filename
                if isinstance(error, ZeroDivisionError) and error_file.startswith(_LIBRARY_FOLDERS):
                    raise GraphError(
                        f"{_find_user_line(error)} makes torch divide by a size that is 0 in this batch; skip such "
                        "batches, or use a sum instead of a mean"
                    ) from error
                raise
            _merge_attributes(module, mode)
    for node in module.graph.find_nodes(op="placeholder")[len(inputs) :]:
        node.meta[MODULE_TENSOR] = True
    assert result_spec is not None
    guard = None if shape_env is None else _make_shape_guard(shape_env, fakes[: len(inputs)])
    return Trace(module, result_spec, [leaf_names[i] for i in tensor_leaves], guard, reads)


def _make_fake(mode: FakeTensorMode, tensor: Tensor, index: int, dims: Dims | None, free_dims: Dims) -> FakeTensor:
    if dims is None:
        return mode.from_tensor(tensor)
    if (index, 0) in free_dims:  # not a view, because torch would use the size of the view's base
        size = len(tensor) + _ORDINARY_SIZE * (len(tensor) < 2)  # a size that torch does not treat as special
        tensor = tensor.new_empty((size, *tensor.shape[1:]))
    sizes = [DimDynamic.DYNAMIC if (index, d) in dims else DimDynamic.STATIC for d in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"input_{index}"))


def _make_shape_guard(shape_env: ShapeEnv, fakes: Sequence[Any]) -> ShapeGuard:
    """Return a function that tests whether inputs have sizes that the trace assumed."""
    code = shape_env.produce_guards_expression(fakes, ignore_static=False)
    if code is None:
        return lambda inputs: True
    code = _OFFSET_CHECK.sub("True", _INPUT_NAME.sub(r"L[\1]", code))
    return eval(f"lambda L: {code}", dict(SYMPY_INTERP))  # torch's function would parse the code at each call


def _merge_attributes(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Keep one node per closure tensor; the trace made one node per use."""
    first_node_by_target: dict[Any, fx.Node] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if first_node_by_target.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first_node_by_target[node.target])
            module.graph.erase_node(node)
        elif isinstance(value, Tensor):
            node.meta["val"] = mode.from_tensor(value)


def _make_leaf(fake: Tensor, real: Tensor) -> Tensor:
    """Return a substitute for a parameter or buffer. It is a leaf, so gradients never reach the real tensor."""
    if not isinstance(real, nn.Parameter):
        return fake
    leaf = nn.Parameter(fake, real.requires_grad)
    setattr(leaf, TRACED_ATTRIBUTE, (get_ident(), real))
    return leaf


def _refuse_hooks(tensors: list[Tensor], names: dict[int, str], optimizers: Iterable[Optimizer]) -> None:
    own_ids = [*map(id, optimizers)]
    for tensor in tensors:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise GraphError(
                f"{names[id(tensor)]} has a gradient hook, which a graph would skip; change gradients in build"
            )
        in_backward = getattr(tensor, "_in_backward_optimizers", None)
        if in_backward is not None and any(id(getattr(o, "optimizer", o)) not in own_ids for o in in_backward):
            raise GraphError(
                f"{names[id(tensor)]} was passed to apply_optimizer_in_backward, but a graph would not run that "
                "optimizer; create the module again, and call add_optimizer with an optimizer over its parameters"
            )


class _OpGuard(TorchDispatchMode):
    """Raises GraphError for ops that a trace would record wrongly, and sets `BACKWARD` on nodes that autograd adds.

    names: maps the id of each real tensor or gradient to its name.
    settings: maps the id of each tensor in a param group to (optimizer, name of the setting).
    """

    supports_higher_order_operators = True

    def __init__(self, root: HasBuild, names: dict[int, str], settings: dict[int, tuple[Optimizer, str]]) -> None:
        super().__init__()
        self._root, self._names, self._settings = root, names, settings
        self._seed = _SEED
        proxies = get_proxy_mode()
        assert proxies is not None
        self._graph = proxies.tracer.graph
        torch.default_generator.manual_seed(_SEED)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise GraphError(f"build uses torch's {func.name()}, which a static graph cannot use; use torch.where")
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.requires_grad:
                self._refuse_tensor(value)
        if func._schema.is_mutable and id(args[0]) in self._settings:
            raise make_setting_error(*self._settings[id(args[0])])
        for value in pytree.tree_leaves((kwargs or {}).get("out", args[:1])) if func._schema.is_mutable else ():
            is_strided = isinstance(value, Tensor) and value.layout == torch.strided
            if is_strided and (remedy := getattr(value.untyped_storage(), REMEDY_ATTRIBUTE, None)):  # for `weight`
                raise InputError(remedy)
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], FakeTensor):
            raise GraphError(
                f"build reads the value of the tensor {find_tensor_name(self._root, args[0])}, and the step would keep "
                "that value forever; compute with the tensor itself, or pass the number to the graph"
            )
        if is_random(func, args):
            self.check_seed()
            self._seed += 1
            torch.default_generator.manual_seed(self._seed)
        if torch._C._current_graph_task_id() == -1:
            return func(*args, **(kwargs or {}))
        last_node = next(iter(reversed(self._graph.nodes)), None)
        result = func(*args, **(kwargs or {}))
        for node in takewhile(lambda node: node is not last_node, reversed(self._graph.nodes)):
            node.meta[BACKWARD] = True
        return result

    def check_seed(self) -> None:
        """Raise GraphError if build reset the random generator. Only a reset changes `initial_seed()`."""
        if torch.default_generator.initial_seed() != self._seed:
            raise GraphError(
                "build sets the state of the random generator, which a compiled step does not repeat; leave out "
                "torch.manual_seed and fork_rng, and dropout inside torch.utils.checkpoint"
            )

    def _refuse_tensor(self, value: Tensor) -> None:
        frames = (frame for frame, _ in traceback.walk_stack(None))
        build_frames = takewhile(lambda frame: frame.f_code is not type(self._root).build.__code__, frames)
        owners = (frame.f_locals.get("self") for frame in build_frames)
        optimizer = next((owner for owner in owners if isinstance(owner, Optimizer)), None)
        if optimizer is not None:
            raise GraphError(
                f"build calls {type(optimizer).__name__}, an optimizer that the graph does not have; pass the "
                "optimizer to add_optimizer in __init__, and leave step() out, because the graph itself calls step()"
            )
        if id(value) in self._names:
            raise GraphError(
                f"build uses {self._names[id(value)]} through an older reference, such as a list of "
                "parameters; reach it through self.<module>"
            )
        raise GraphError(
            f"build uses the tensor {find_tensor_name(self._root, value)}, which requires grad but is in no module "
            "of the graph; assign its module to self in __init__, or detach it"
        )


class _NoDataAssignment(TorchFunctionMode):
    """Raises GraphError for an assignment to `.data`, because a trace does not see such assignments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise GraphError("build assigns to .data of a tensor; use copy_ under torch.no_grad() instead")
        return func(*args, **(kwargs or {}))


def _is_data_dependent(error: Exception) -> bool:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    messages = ("get value out of a tracing tensor", ".numpy() is not supported for tensor subclasses")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in messages)


def _suggest_remedy(error: Exception) -> str:
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(isinstance(owner, _BatchNorm) and owner.momentum is None for owner in owners):
        return "give the batch norm a momentum, such as 0.1: with momentum=None it divides by its batch count"
    return "use torch.where or a mask, or compute the value outside and pass it to the graph"


def _find_user_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([f for f in frames if not f.filename.startswith(_LIBRARY_FOLDERS)] or frames)[-1]
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: `{frame.line}`'


@contextmanager
def _mute_log() -> Iterator[None]:
    """Stop torch from logging this trace's exception with its stack, because the trace raises the exception anyway."""
    thread = get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.exc_info is None or record.thread != thread

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
