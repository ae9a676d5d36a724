"""`DistributedModelParallel`: a model whose embeddings share rows over ranks, and whose other parameters are equal.

TorchRec's replaces modules by sharded ones. Here an embedding that has a world is spread over its ranks by the hash of
ids, so the modules stay, and torch's DistributedDataParallel keeps the others equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...distributed.world import World
from ...embedding.modules.embedding import MultiTableMultiColumnEmbedding
from ...embedding.optim.ddp_guard import LEAVES_ROWS
from ...embedding.optim.eager import IN_BACKWARD
from ...embedding.tables.names import name_embeddings
from ...engine.checks import checked_arguments
from ...engine.errors import InputError, OptionError
from .fused_settings import check_sharding, fuse


class DistributedModelParallel(nn.Module):
    """TorchRec's wrapper of a model for many processes. It has the names of the model in its state, as TorchRec's.

    module: its embeddings that have no world get that of `env`, or of torch's default group; they must not be open yet.
    With one process they have none. env: TorchRec's ShardingEnv, a process group, or a World.
    device: where the module is moved. What is on meta begins there, by `reset_parameters()` of its module.
    plan: taken where it asks for row-wise sharding, and for nothing else. sharders: their `fused_params` choose the
    optimizer of rows, and its numbers; what else they ask for is refused. An optimizer of torch's or TorchRec's that
    `apply_optimizer_in_backward` gave rows has FBGEMM's formula and defaults, as in TorchRec (docs/torchrec.md).
    init_data_parallel: whether the dense part is wrapped now, by DistributedDataParallel, or when
    `init_data_parallel()` is called.

    Every rank makes it, and all of its calls, as the others. Raises OptionError, InputError.
    """

    @checked_arguments("module", "init_data_parallel", "init_parameters")
    def __init__(
        self,
        module: nn.Module,
        env: Any = None,
        device: torch.device | str | None = None,
        plan: Any = None,
        sharders: Any = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        **refused: Any,
    ) -> None:
        super().__init__()
        for name in (name for name, given in refused.items() if given is not None):
            raise OptionError(
                f"{name}={refused[name]!r}: torch's DistributedDataParallel wraps the model; leave it out"
            )
        _check_plan(plan)
        self.plan, self.sharders, self.init_parameters = plan, sharders, init_parameters
        self.device = torch.device("cpu" if device is None else device)
        self._world, self._group = _world_of(env)
        self._wrapped: nn.Module = module
        name_embeddings(module)
        for embedding in self._embeddings():
            if embedding.world is None and self._world.size > 1:
                if embedding.is_open:
                    raise InputError(
                        f"embedding {embedding.name!r} is open, with the rows of this process alone; make the "
                        "DistributedModelParallel before the first lookup, or give world= to the collection"
                    )
                embedding.world = self._world
        fuse(module, sharders)
        if init_parameters:
            _leave_meta(module, self.device)
            module.to(self.device)
        if init_data_parallel:
            self.init_data_parallel()
        self.register_load_state_dict_pre_hook(_find_wrapped)

    @property
    def module(self) -> nn.Module:
        """The model, as it was given."""
        return get_unwrapped_module(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the model."""
        return self._wrapped(*args, **kwargs)

    def init_data_parallel(self) -> None:
        """Let the dense parameters of all ranks be those of rank 0, and equal from then on. May be called again."""
        if isinstance(self._wrapped, DistributedDataParallel):
            return
        _leave_meta(self._wrapped, self.device)
        shadows = {id(embedding.shadow) for embedding in self._embeddings()}
        dense = [one for one in self._wrapped.parameters() if id(one) not in shadows and one.requires_grad]
        if self._world.size > 1 and dense:
            left = [name for name, one in self._wrapped.named_parameters() if id(one) in shadows]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._wrapped, left)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch rename broadcast_buffers
                wrapped = DistributedDataParallel(self._wrapped, process_group=self._group, broadcast_buffers=False)
            setattr(wrapped, LEAVES_ROWS, True)
            self._wrapped = wrapped

    @property
    def fused_optimizer(self) -> InBackward:
        """The optimizers that `apply_optimizer_in_backward` gave parameters, by their names."""
        return InBackward(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As of the model."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def _embeddings(self) -> list[MultiTableMultiColumnEmbedding]:
        return [one for one in self._wrapped.modules() if isinstance(one, MultiTableMultiColumnEmbedding)]


class InBackward:
    """Optimizers that torch steps in backward: `params` by name, `param_groups`, and `state_dict()` of each.

    TorchRec's CombinedOptimizer takes it among others: it unpacks to a pair of a name and an optimizer.
    """

    def __init__(self, module: nn.Module) -> None:
        self.defaults = {"_save_param_groups": False}
        self.state: dict[nn.Parameter, Any] = {}  # that of rows is with the rows
        self.params = {name: one for name, one in module.named_parameters() if hasattr(one, IN_BACKWARD)}
        self.optimizers = {name: given for name, one in self.params.items() for given in getattr(one, IN_BACKWARD)}

    def __getitem__(self, index: int) -> Any:
        return ("", self)[index]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of all, whose numbers may be changed."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def step(self, *given: Any, **named: Any) -> None:
        """Nothing, as what follows: backward() steps them, and drops the gradients that a step took."""

    zero_grad = save_param_groups = post_load_state_dict = step

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name. The state of rows is with the rows."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. KeyError."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict[name])


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """The module in a DistributedModelParallel or DistributedDataParallel."""
    while isinstance(module, DistributedModelParallel | DistributedDataParallel):
        module = module._wrapped if isinstance(module, DistributedModelParallel) else module.module
    return module


def get_module(module: nn.Module) -> nn.Module:
    """The module in a DistributedModelParallel, in its DistributedDataParallel if there is one."""
    while isinstance(module, DistributedModelParallel):
        module = module._wrapped
    return module


def _find_wrapped(parallel: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Let a module around a DistributedModelParallel load its state_dict(), which has the names of the model."""
    inner = prefix + ("_wrapped.module." if isinstance(parallel._wrapped, DistributedDataParallel) else "_wrapped.")
    for name in [name for name in state_dict if name.startswith(prefix) and not name.startswith(inner)]:
        state_dict[inner + name.removeprefix(prefix)] = state_dict.pop(name)


def _world_of(env: Any) -> tuple[World, dist.ProcessGroup | None]:
    """The world of embeddings, and the process group of the dense part; None is torch's default one."""
    if isinstance(env, World):
        return env, None
    group = getattr(env, "process_group", env)
    if hasattr(env, "sharding_pg"):
        raise OptionError("env=ShardingEnv2D: replicas would drift apart between averages; give a ShardingEnv, or none")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise OptionError(f"env={type(env).__name__}: give a World, a process group, TorchRec's ShardingEnv, or None")
    if group is None and not dist.is_initialized():
        return World.of_one(), None
    return World(group), group


def _check_plan(plan: Any) -> None:
    """OptionError for what is no plan of TorchRec, for other than row-wise sharding and for settings of a sharding."""
    of_modules = {} if plan is None else getattr(plan, "plan", plan)
    try:
        shardings = {f"{path}.{name}": one for path, of in of_modules.items() for name, one in of.items()}
        kinds = {path: one.sharding_type for path, one in shardings.items()}
    except AttributeError:
        raise OptionError(f"plan={plan!r:.200}: give TorchRec's ShardingPlan, or leave it out") from None
    for path, kind in kinds.items():
        if (kind := getattr(kind, "value", kind)) != "row_wise":
            raise OptionError(
                f"plan: {path} is {kind!r}; rows are spread over all ranks by the hash of their ids, "
                "'row_wise', since no table is known to be small and no rank may have more than its share: leave "
                "the plan out (docs/distributed.md)"
            )
        check_sharding(path, shardings[path])


def _leave_meta(root: nn.Module, device: torch.device) -> None:
    """Move what is on meta to a device, where parameters get their first values. InputError."""
    modules, resets = dict(root.named_modules()), {}
    moved: dict[int, torch.Tensor] = {}  # by the id of the tensor on meta
    for path, module in modules.items():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        on_meta = [(name, tensor) for name, tensor in own if tensor.device.type == "meta"]
        if on_meta and not isinstance(module, MultiTableMultiColumnEmbedding):
            around = [".".join(path.split(".")[:end]) for end in range(path.count(".") + 1, -1, -1)]
            owner = next((one for one in around if hasattr(modules[one], "reset_parameters")), None)
            if owner is None:
                raise InputError(
                    f"{path or 'module'} is on meta, and has no reset_parameters(); add one, or make it here"
                )
            resets[owner] = modules[owner]
        for name, tensor in on_meta:
            new = torch.zeros_like(tensor, device=device)
            new = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            setattr(module, name, moved.setdefault(id(tensor), new))  # tied ones stay tied
            if hasattr(tensor, IN_BACKWARD) and moved[id(tensor)] is new:
                from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

                for kind, settings in zip(tensor._optimizer_classes, tensor._optimizer_kwargs, strict=True):
                    _apply_optimizer_in_backward(kind, [new], settings)
    for module in resets.values():
        module.reset_parameters()
