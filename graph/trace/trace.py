"""Traces `build`: one run on fake tensors, which gives its forward and backward as aten calls."""

from __future__ import annotations

import itertools
import logging
import os
import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from ...engine.ops.rows_contract import REMEDY, TRACED
from .alias import is_random
from .names import HasBuild, name_of, tensor_names
from .reads import Reads
from .signature import Call, Dims, argument_names, is_plain, registered
from .swap import changed_setting, swapped, unused_grads

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        *(Path(__file__).parents[2] / own for own in ("engine", "embedding", "graph")),
    )
)
_INPUT = re.compile(r"L\['t(\d+)'\]")  # input tensor number \1 in a guard of torch
_OFFSET = re.compile(r"L\[\d+\]\.storage_offset\(\) == \d+")  # a step does not depend on where a view begins
_COMMON = 64
_SEED = 0x7165_7262_6564
BACKWARD = "backward"  # in the meta of nodes that autograd added
LIVE = "live"  # in the meta of placeholders that are parameters or buffers

ShapeGuard = Callable[[Sequence[Tensor]], bool]  # whether a step accepts inputs of these sizes


@dataclass(frozen=True)
class Returned:
    """What build returned, and which live tensors it gave a gradient."""

    spec: pytree.TreeSpec
    constants: list[Any]  # the leaves of the result, None for tensors, which the trace returns
    is_tensor: list[bool]
    with_grad: list[int]  # live tensors whose gradients follow the results in the trace's output


@dataclass(frozen=True)
class Trace:
    """A traced step. Its placeholders are the input tensors, then the live tensors; its output is one flat list."""

    module: fx.GraphModule
    returned: Returned
    inputs: list[str]  # names of the input tensors
    guard: ShapeGuard | None  # whether the step accepts other inputs; None for a static-shape step
    reads: Reads  # the Python values that are constants of it

    def program(self) -> Hashable:
        """What is equal for traces of one signature that give equal steps, as long as no pass has changed them."""
        graph, returned = self.module.graph, self.returned
        grads = graph.find_nodes(op="call_function", target=torch.ops.tierbed.lookup_grad.default)
        orders = sorted(node.args[-2] for node in grads)  # counted over all calls of the process
        nodes = []
        for node in graph.nodes:
            args: Any = node.args
            if node in grads:
                args = *args[:-2], orders.index(args[-2]), args[-1]
            constant = getattr(self.module, node.target) if node.op == "get_attr" else None
            if isinstance(constant, Tensor) and all("lift_fresh" in str(user.target) for user in node.users):
                constant = repr(constant.tolist())  # made by build: another one with each trace
            else:
                constant = id(constant)  # read at each call
            nodes.append((node.op, node.name, str(node.target), repr(args), repr(node.kwargs), constant))
        constants = [(type(value), repr(value)) for value in returned.constants]
        guard = self.guard and self.guard.__code__
        return tuple(nodes), repr((returned.spec, constants, returned.is_tensor, returned.with_grad)), guard


def trace(
    root: HasBuild, call: Call, tensors: list[Tensor], optimizers: Iterable[Optimizer], dynamic: Dims | None = None
) -> Trace:
    """Trace `root.build` for the arguments of a call. GraphError for what a static graph cannot hold.

    tensors: the parameters and buffers under `root`; a tied one may be repeated. dynamic: the dynamic dimensions, for a
    dynamic-shape step; None for a static-shape step.
    """
    leaves, inputs, arguments_of = call.leaves, call.inputs, argument_names(root.build, call.given)
    names = tensor_names(root)
    _refuse_hooks(tensors, names, optimizers)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    settings = {
        id(value): (optimizer, name)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, Tensor)
    }
    returned: Returned | None = None
    reads = Reads(root, leaves)

    def step(*flat: Tensor) -> list[Tensor]:
        nonlocal returned
        arguments = list(leaves)
        for i, fake in zip(where, flat, strict=False):
            arguments[i] = fake.detach().requires_grad_(leaves[i].requires_grad)
        swaps: dict[int, Tensor] = {}
        for fake, live in zip(flat[len(inputs) :], tensors, strict=True):
            swaps.setdefault(id(live), _leaf(fake, live))
        args, kwargs = pytree.tree_unflatten(arguments, call.spec)
        op_guard = _OpGuard(
            root, {**names, **{id(grad): f"{names[live]}.grad" for live, grad in unused.items()}}, settings
        )
        with swapped(root, optimizers, swaps, names), op_guard, _NoData(), reads:
            result = root.build(*args, **kwargs)
        op_guard.check_seed()
        for i in where:
            if arguments[i].grad is not None:
                raise GraphError(
                    f"argument {arguments_of[i]} requires grad, but a graph keeps no "
                    "gradient of its arguments; pass it detached, or use torch.autograd.grad in build"
                )
        values, out_spec = pytree.tree_flatten(result)
        for value in values:
            if not isinstance(value, Tensor) and not is_plain(value):
                raise GraphError(
                    f"build returns a {type(value).__name__}; return tensors, plain values, and lists, tuples and "
                    f"dicts of them, or {registered(value)}"
                )
        outputs = [value for value in values if isinstance(value, Tensor)]
        grads = {live: swap.grad for live, swap in swaps.items() if swap.grad is not None}
        with_grad = {id(live): i for i, live in enumerate(tensors) if id(live) in grads}
        returned = Returned(
            out_spec,
            [None if isinstance(value, Tensor) else value for value in values],
            [isinstance(value, Tensor) for value in values],
            list(with_grad.values()),
        )
        return [value.detach() if value.requires_grad else value for value in outputs] + [
            grads[live] for live in with_grad
        ]

    shapes: ShapeEnv | None = None
    if dynamic is not None:  # what depends on values raises, as in a static-shape trace
        shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
    from_start = call.dynamic_dims if dynamic else Dims()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    grad_mode = torch.is_grad_enabled()  # inference_mode(False) turns gradients on
    # torch neither assumes that dynamic sizes of containers are not 0 or 1, nor compares them with these
    any_size = symbolic.patch(backed_size_oblivious=bool(from_start))  # type: ignore[attr-defined]
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode), any_size:
        # detach: a tensor that is passed twice gets two fakes, since another call may pass two tensors
        fakes = [_fake(mode, tensor.detach(), i, dynamic, from_start) for i, tensor in enumerate([*inputs, *tensors])]
        # modules under torch.compile are traced as what they wrap
        inlined = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
        with unused_grads(tensors) as unused, torch.random.fork_rng(devices=[]), inlined, _raised_alone(), mode:
            try:  # an empty table: without one torch 2.14 records detach as alias
                module = make_fx(step, decomposition_table={}, _allow_non_fake_inputs=True)(*fakes)
            except Exception as error:
                if _is_data_dependent(error):
                    raise GraphError(
                        f"{_line(error)} needs the value of a tensor, and a static graph is traced without values; "
                        f"{_remedy(error)}"
                    ) from error
                raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
                if isinstance(error, ZeroDivisionError) and raised_in.startswith(_LIBRARIES):
                    raise GraphError(
                        f"{_line(error)} has torch divide by a size that is 0 in this batch; leave such batches out, "
                        "or sum where it takes a mean"
                    ) from error
                raise
            _merge_attributes(module, mode)
    for node in module.graph.find_nodes(op="placeholder")[len(inputs) :]:
        node.meta[LIVE] = True
    assert returned is not None
    guard = None if shapes is None else _shape_guard(shapes, fakes[: len(inputs)])
    return Trace(module, returned, [arguments_of[i] for i in where], guard, reads)


def _fake(mode: FakeTensorMode, tensor: Tensor, index: int, dynamic: Dims | None, from_start: Dims) -> FakeTensor:
    if dynamic is None:
        return mode.from_tensor(tensor)
    if (index, 0) in from_start:  # no view: torch would take the size from its base
        size = len(tensor) + _COMMON * (len(tensor) < 2)  # torch reads a size that may be any
        tensor = tensor.new_empty((size, *tensor.shape[1:]))
    sizes = [DimDynamic.DYNAMIC if (index, d) in dynamic else DimDynamic.STATIC for d in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"input_{index}"))


def _shape_guard(shapes: ShapeEnv, fakes: Sequence[Any]) -> ShapeGuard:
    """A function that checks whether inputs have the sizes that the trace assumed."""
    code = shapes.produce_guards_expression(fakes, ignore_static=False)
    if code is None:
        return lambda inputs: True
    code = _OFFSET.sub("True", _INPUT.sub(r"L[\1]", code))
    # once: torch's own function parses it at each call
    guard: ShapeGuard = eval(f"lambda L: {code}", dict(SYMPY_INTERP))
    return guard


def _merge_attributes(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Make one node for each closure tensor: the trace made a node for each use."""
    first: dict[Any, fx.Node] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            module.graph.erase_node(node)
        elif isinstance(value, Tensor):
            node.meta["val"] = mode.from_tensor(value)


def _leaf(fake: Tensor, live: Tensor) -> Tensor:
    """A tensor for build instead of a parameter or buffer: a leaf, so that no gradient reaches the live tensor."""
    if not isinstance(live, nn.Parameter):
        return fake
    leaf = nn.Parameter(fake, live.requires_grad)
    setattr(leaf, TRACED, (get_ident(), live))
    return leaf


def _refuse_hooks(tensors: list[Tensor], names: dict[int, str], optimizers: Iterable[Optimizer]) -> None:
    own = [*map(id, optimizers)]
    for tensor in tensors:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise GraphError(
                f"{names[id(tensor)]} has a gradient hook, which a graph would skip; change gradients in build"
            )
        in_backward = getattr(tensor, "_in_backward_optimizers", None)
        if in_backward is not None and any(id(getattr(one, "optimizer", one)) not in own for one in in_backward):
            raise GraphError(
                f"{names[id(tensor)]} was given to apply_optimizer_in_backward, which a graph would skip; make the "
                "module again, and give its parameters to an optimizer that add_optimizer takes"
            )


class _OpGuard(TorchDispatchMode):
    """Raises GraphError for ops that a trace would get wrong.

    Such ops work on trainable tensors that are not traced, reseed random numbers, or write to a learning rate. It also
    sets `BACKWARD` on the nodes that autograd adds, hooks included.

    names: the names of the live tensors, and of their gradients during the trace, by id. settings: the tensors in param
    groups.
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
            raise GraphError(f"build uses torch's {func.name()}, which a static graph does not hold; use torch.where")
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.requires_grad:
                self._refuse(value)
        if func._schema.is_mutable and id(args[0]) in self._settings:
            raise changed_setting(*self._settings[id(args[0])])
        for value in pytree.tree_leaves((kwargs or {}).get("out", args[:1])) if func._schema.is_mutable else ():
            is_strided = isinstance(value, Tensor) and value.layout == torch.strided
            if is_strided and (remedy := getattr(value.untyped_storage(), REMEDY, None)):  # a table's weight
                raise InputError(remedy)
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], FakeTensor):
            raise GraphError(
                f"build reads the value of the tensor {name_of(self._root, args[0])}, which would be frozen into the "
                "step; compute with the tensor itself, or pass the number to the graph"
            )
        if is_random(func, args):
            self.check_seed()
            self._seed += 1
            torch.default_generator.manual_seed(self._seed)
        if torch._C._current_graph_task_id() == -1:
            return func(*args, **(kwargs or {}))
        last = next(iter(reversed(self._graph.nodes)), None)
        result = func(*args, **(kwargs or {}))
        for node in itertools.takewhile(lambda node: node is not last, reversed(self._graph.nodes)):
            node.meta[BACKWARD] = True
        return result

    def check_seed(self) -> None:
        """GraphError if build reset the random generator. Fake tensors draw nothing, so the seed shows it."""
        if torch.default_generator.initial_seed() != self._seed:
            raise GraphError(
                "build sets the state of the random numbers, which a compiled step does not repeat; leave out "
                "torch.manual_seed and fork_rng, and dropout inside torch.utils.checkpoint"
            )

    def _refuse(self, value: Tensor) -> None:
        frames = (frame for frame, _ in traceback.walk_stack(None))
        below = itertools.takewhile(lambda frame: frame.f_code is not type(self._root).build.__code__, frames)
        owners = (frame.f_locals.get("self") for frame in below)
        optimizer = next((owner for owner in owners if isinstance(owner, Optimizer)), None)
        if optimizer is not None:
            raise GraphError(
                f"build calls {type(optimizer).__name__}, an optimizer that the graph does not have; give it to "
                "add_optimizer in __init__, and do not call its step() in build: the graph does at the end of each call"
            )
        if id(value) in self._names:
            raise GraphError(
                f"build uses {self._names[id(value)]} by a reference that was made earlier, such as a list of "
                "parameters; reach it through self.<module>"
            )
        raise GraphError(
            f"build uses the tensor {name_of(self._root, value)}, which requires grad but is in no module "
            "of the graph; assign its module to self in __init__, or detach it"
        )


class _NoData(TorchFunctionMode):
    """Raises GraphError for an assignment to `.data`, which a trace does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise GraphError("build assigns to .data of a tensor; write to it in place under torch.no_grad(), by copy_")
        return func(*args, **(kwargs or {}))


def _is_data_dependent(error: Exception) -> bool:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    messages = ("get value out of a tracing tensor", ".numpy() is not supported for tensor subclasses")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in messages)


def _remedy(error: Exception) -> str:
    """The remedy for a step that needs the value of a tensor."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(isinstance(owner, _BatchNorm) and owner.momentum is None for owner in owners):
        return "give the batch norm a momentum, such as 0.1: with momentum=None it divides by a count of its batches"
    return "use torch.where or a mask, or compute it outside and pass it to the graph"


def _line(error: Exception) -> str:
    """The user's line that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames)[-1]
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: `{frame.line}`'


@contextmanager
def _raised_alone() -> Iterator[None]:
    """Keep torch from logging an exception of this trace with its whole stack, since it is also raised."""
    thread = get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.exc_info is None or record.thread != thread

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
