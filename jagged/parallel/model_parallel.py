"""`DistributedModelParallel`: embedding rows are sharded across ranks, and the dense part is replicated.

TorchRec replaces modules by sharded modules. In tierbed, an embedding with a world shards its own rows by the hash of
their ids. torch's DistributedDataParallel keeps the dense parameters equal.
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
from ...embedding.optim.ddp_guard import IGNORES_EMBEDDINGS_ATTR
from ...embedding.optim.eager import IN_BACKWARD
from ...embedding.tables.names import name_embeddings
from ...engine.checks import validate_arguments
from ...engine.errors import InputError, OptionError
from .fused_settings import check_sharding, fuse_optimizers


class DistributedModelParallel(nn.Module):
    """TorchRec's wrapper for training a model in many processes. Its state dict uses the model's names.

    All ranks must construct the wrapper and make the same calls in order. If `apply_optimizer_in_backward` gave rows an
    optimizer of torch or TorchRec, rows are updated with FBGEMM's formula and defaults. See docs/torchrec.md.

    Args:
        module: The model. Embeddings without a world get the world of `env`, and must not be open yet. If there is only
            one process, they get no world.
        env: TorchRec's ShardingEnv, a process group or a World. None means torch's default process group.
        device: Device to move the module to. Parameters on meta are initialized there by `reset_parameters()`.
        plan: TorchRec's ShardingPlan. Only row-wise sharding is accepted.
        sharders: TorchRec's sharders. Their `fused_params` choose the rows' optimizer; other settings are refused.
        init_data_parallel: If False, the dense part is wrapped in DistributedDataParallel only when
            `init_data_parallel()` is called.
        init_parameters: If False, the module is not moved to `device`.

    Raises:
        OptionError: If an argument is invalid or not supported.
        InputError: If an embedding is already open, or a module on meta has no `reset_parameters()`.
    """

    @validate_arguments("module", "init_data_parallel", "init_parameters")
    def __init__(
        self,
        module: nn.Module,
        env: Any = None,
        device: torch.device | str | None = None,
        plan: Any = None,
        sharders: Any = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        **unsupported: Any,
    ) -> None:
        super().__init__()
        for name, value in unsupported.items():
            if value is not None:
                raise OptionError(f"{name}={value!r}: torch's DistributedDataParallel wraps the model; leave it out")
        _check_plan(plan)
        self.plan, self.sharders, self.init_parameters = plan, sharders, init_parameters
        self.device = torch.device("cpu" if device is None else device)
        self._world, self._process_group = _make_world(env)
        self._wrapped: nn.Module = module
        name_embeddings(module)
        for embedding in self._find_embeddings():
            if embedding.world is None and self._world.size > 1:
                if embedding.is_open:
                    remedy = "make DistributedModelParallel before the first lookup, or give world= to the collection"
                    raise InputError(f"embedding {embedding.name!r} is already open without a world; {remedy}")
                embedding.world = self._world
        fuse_optimizers(module, sharders)
        if init_parameters:
            _materialize(module, self.device)
            module.to(self.device)
        if init_data_parallel:
            self.init_data_parallel()
        self.register_load_state_dict_pre_hook(_add_wrapper_prefix)

    @property
    def module(self) -> nn.Module:
        """The model without wrappers."""
        return get_unwrapped_module(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self._wrapped(*args, **kwargs)

    def init_data_parallel(self) -> None:
        """Copy rank 0's dense parameters to all ranks, and keep them equal from then on. Further calls do nothing."""
        if isinstance(self._wrapped, DistributedDataParallel):
            return
        _materialize(self._wrapped, self.device)
        shadow_ids = {id(embedding.shadow) for embedding in self._find_embeddings()}
        params = [param for param in self._wrapped.parameters() if id(param) not in shadow_ids and param.requires_grad]
        if self._world.size > 1 and params:
            ignored_names = [name for name, param in self._wrapped.named_parameters() if id(param) in shadow_ids]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._wrapped, ignored_names)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch rename broadcast_buffers
                ddp = DistributedDataParallel(self._wrapped, process_group=self._process_group, broadcast_buffers=False)
            setattr(ddp, IGNORES_EMBEDDINGS_ATTR, True)
            self._wrapped = ddp

    @property
    def fused_optimizer(self) -> InBackwardOptimizers:
        """The optimizers that `apply_optimizer_in_backward` attached to parameters."""
        return InBackwardOptimizers(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the model."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the model's parameters."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def _find_embeddings(self) -> list[MultiTableMultiColumnEmbedding]:
        return [module for module in self._wrapped.modules() if isinstance(module, MultiTableMultiColumnEmbedding)]


class InBackwardOptimizers:
    """The optimizers that torch steps during backward. Offers `params`, `param_groups` and `state_dict()`.

    An instance can be an item of TorchRec's CombinedOptimizer, because it unpacks to a (name, optimizer) pair.
    """

    def __init__(self, module: nn.Module) -> None:
        self.defaults = {"_save_param_groups": False}
        self.state: dict[nn.Parameter, Any] = {}  # empty: row state is stored with the rows
        self.params = {name: param for name, param in module.named_parameters() if hasattr(param, IN_BACKWARD)}
        self.optimizers = {name: opt for name, param in self.params.items() for opt in getattr(param, IN_BACKWARD)}

    def __getitem__(self, index: int) -> Any:
        return ("", self)[index]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers. You may change the groups' values."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: backward() already steps the optimizers and drops the gradients they used."""

    zero_grad = save_param_groups = post_load_state_dict = step

    def state_dict(self) -> dict[str, Any]:
        """Return {parameter name: optimizer state dict}. Row state is not included; it is stored with the rows."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`. Raises KeyError for a missing parameter."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict[name])


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the module inside any DistributedModelParallel and DistributedDataParallel."""
    while isinstance(module, DistributedModelParallel | DistributedDataParallel):
        module = module._wrapped if isinstance(module, DistributedModelParallel) else module.module
    return module


def get_module(module: nn.Module) -> nn.Module:
    """Return the module inside a DistributedModelParallel, with its DistributedDataParallel wrapper if it has one."""
    while isinstance(module, DistributedModelParallel):
        module = module._wrapped
    return module


def _add_wrapper_prefix(parallel: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Add the wrapper's path to the names in a state dict. Then the wrapper's parent module can load the state dict."""
    inner = prefix + ("_wrapped.module." if isinstance(parallel._wrapped, DistributedDataParallel) else "_wrapped.")
    for name in [name for name in state_dict if name.startswith(prefix) and not name.startswith(inner)]:
        state_dict[inner + name.removeprefix(prefix)] = state_dict.pop(name)


def _make_world(env: Any) -> tuple[World, dist.ProcessGroup | None]:
    """Return (the embeddings' world, the dense part's process group). None means torch's default group."""
    if isinstance(env, World):
        return env, None
    process_group = getattr(env, "process_group", env)
    if hasattr(env, "sharding_pg"):
        raise OptionError("env=ShardingEnv2D: its copies of a row would differ in some steps; give ShardingEnv or None")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise OptionError(f"env={type(env).__name__}: give a World, a process group, TorchRec's ShardingEnv, or None")
    if process_group is None and not dist.is_initialized():
        return World.single(), None
    return World(process_group), process_group


def _check_plan(plan: Any) -> None:
    """Raise OptionError unless this is TorchRec's plan, with row-wise sharding and no unsupported settings."""
    modules = {} if plan is None else getattr(plan, "plan", plan)
    try:
        shardings = {f"{path}.{name}": entry for path, entries in modules.items() for name, entry in entries.items()}
        sharding_types = {path: entry.sharding_type for path, entry in shardings.items()}
    except AttributeError:
        raise OptionError(f"plan={plan!r:.200}: give TorchRec's ShardingPlan, or leave it out") from None
    for path, sharding_type in sharding_types.items():
        if (sharding_type := getattr(sharding_type, "value", sharding_type)) != "row_wise":
            problem = f"{path} has sharding type {sharding_type!r}, but tierbed shards all tables 'row_wise'"
            raise OptionError(f"plan: {problem}; leave the plan out (docs/distributed.md)")
        check_sharding(path, shardings[path])


def _materialize(root: nn.Module, device: torch.device) -> None:
    """Move tensors from meta to a device, and initialize their modules there. Raises InputError."""
    modules, modules_to_reset = dict(root.named_modules()), {}
    new_tensors: dict[int, torch.Tensor] = {}  # {id of the tensor on meta: the new tensor}
    for path, module in modules.items():
        own_tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        meta_tensors = [(name, tensor) for name, tensor in own_tensors if tensor.device.type == "meta"]
        if meta_tensors and not isinstance(module, MultiTableMultiColumnEmbedding):
            enclosing_paths = [".".join(path.split(".")[:end]) for end in range(path.count(".") + 1, -1, -1)]
            owner_path = next((outer for outer in enclosing_paths if hasattr(modules[outer], "reset_parameters")), None)
            if owner_path is None:
                name = path or "module"
                raise InputError(f"{name} is on meta, and has no reset_parameters(); add it, or make it on {device}")
            modules_to_reset[owner_path] = modules[owner_path]
        for name, tensor in meta_tensors:
            target = torch.zeros_like(tensor, device=device)
            target = nn.Parameter(target, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else target
            setattr(module, name, new_tensors.setdefault(id(tensor), target))  # tied parameters stay tied
            if hasattr(tensor, IN_BACKWARD) and new_tensors[id(tensor)] is target:
                from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

                for optimizer_class, settings in zip(tensor._optimizer_classes, tensor._optimizer_kwargs, strict=True):
                    _apply_optimizer_in_backward(optimizer_class, [target], settings)
    for module in modules_to_reset.values():
        module.reset_parameters()
