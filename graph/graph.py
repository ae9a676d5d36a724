"""`Graph`: the class that a user subclasses."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..engine.errors import GraphError
from .compiled import CompiledStep, compile_step
from .optimizers import OptimizerSet
from .signature import Structure, call_key, modes
from .swap import one_trace
from .trace import trace

STEPS = 64


class Graph(nn.Module):
    """A training or evaluation step, traced once an input signature and then run without autograd.

    A subclass sets its modules in `__init__`, calls `add_optimizer` there, and defines `build`, which computes a loss
    and calls `loss.backward()`, and reaches parameters through `self`. Calling the graph runs one step: forward,
    backward, the update of embedding rows, and `step()` of every optimizer. It returns what `build` returns, tensors
    detached; after a training step `grad` of every parameter that an optimizer holds is None. A graph whose `build`
    never calls `backward()`, or on which `eval()` was called, trains nothing.

    `build` runs again, on tensors without values, when a call has another signature: shapes, strides, dtypes and
    devices of tensors, values of other arguments, `training` flags, `requires_grad`, gradient and autocast mode,
    optimizers, hooks, tensors assigned to attributes. All other Python values are frozen into the step, such as which
    object a global names, or the `p` of a dropout; the values of parameters, buffers and closure tensors are read at
    every call. The 64 steps used last are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__optimizers = OptimizerSet()
        self.__steps: OrderedDict[Hashable, CompiledStep] = OrderedDict()
        # two underscores: a subclass may have attributes of any name
        self.__structure: Structure | None = None
        self.__last: tuple[Hashable, Any] = (None, None)  # the step of the previous call, found without hashing

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Let an ordinary torch optimizer update the parameters that it holds, and rows by the shadows that it holds.

        Its parameter groups are read at every step, so learning rate schedulers work. Raises OptimizerError for what
        is no torch optimizer, one that rows cannot follow, and a parameter that another optimizer of this graph holds.
        """
        self.__optimizers.add(optimizer)
        try:
            self.__optimizers.attach(self)
        except BaseException:
            self.__optimizers.discard(optimizer)
            raise

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step, written by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} defines no build(self, ...)")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step and return what `build` returns, tensors detached.

        Raises GraphError for a `build` that a static graph cannot hold, OptimizerError where backward() reaches a
        parameter without optimizer, and whatever `build`, an op or a store raises; the graph stays usable.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        signature, tensors = self.__signature(leaves, spec)
        known, step = self.__last
        if signature != known:
            with one_trace:
                signature, tensors = self.__signature(leaves, spec)  # a trace in another thread may have been under way
                step = self.__step_for(signature, leaves, spec, tensors)
            self.__last = signature, step
        return step.run([leaf for leaf in leaves if isinstance(leaf, Tensor)] + tensors)

    def __signature(self, leaves: list[Any], spec: pytree.TreeSpec) -> tuple[Hashable, list[Tensor]]:
        while self.__structure is None or (live := self.__structure.live()) is None:
            self.__structure = Structure(self)
            self.__steps.clear()  # none can fit again, and they would keep replaced modules alive
        tensors, state = live
        return (spec, call_key(leaves, self.build, spec), state, modes(), self.__optimizers.key()), tensors

    def __step_for(
        self, signature: Hashable, leaves: list[Any], spec: pytree.TreeSpec, tensors: list[Tensor]
    ) -> CompiledStep:
        if signature in self.__steps:
            self.__steps.move_to_end(signature)
        else:
            if detect_fake_mode(tensors):
                raise GraphError(
                    f"build calls the graph {type(self).__name__}, and a graph cannot run inside another; call its "
                    "build(), and add its optimizers to the outer graph"
                )
            self.__optimizers.attach(self)
            self.__optimizers.refuse_foreign(self)
            traced = trace(self, leaves, spec, tensors, self.__optimizers)
            self.__steps[signature] = compile_step(self, traced, self.__optimizers, tensors)
            self.__bound()
        return self.__steps[signature]

    def __bound(self) -> None:
        if len(self.__steps) > STEPS:
            self.__steps.popitem(last=False)
            warnings.warn(
                f"{type(self).__name__} was compiled for more than {STEPS} signatures and drops the oldest; "
                "pass numbers that change at each call as tensors, and pad inputs to few shapes",
                stacklevel=6,
            )

    def __repr__(self) -> str:
        """The modules; after the first call, the code of every compiled step too."""
        modules = super().__repr__()
        if not self.__steps:
            return f"{modules}\n# not compiled yet: the first call compiles it"
        steps = (f"# compiled step {i}\n{step.code()}" for i, step in enumerate(self.__steps.values()))
        return "\n\n".join([modules, *steps])
