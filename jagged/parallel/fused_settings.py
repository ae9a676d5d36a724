"""Gives rows the optimizers that TorchRec would fuse into its sharded modules.

TorchRec passes a fused optimizer's settings to FBGEMM, so FBGEMM's formulas apply to any class the user named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...embedding.modules.embedding import MultiTableMultiColumnEmbedding
from ...embedding.optim.eager import IN_BACKWARD
from ...engine.errors import InputError, OptionError
from ..tbe.call_arguments import REFUSED_ARGS, check_arguments, pop_ignored_arguments
from ..tbe.enums import OptimType
from ..tbe.settings import DEFAULT_ARGS, make_optimizer_settings

log = logging.getLogger("tierbed")
_OPTIM_TYPES = {  # keys are class names in TorchRec; the first three are also torch's
    "SGD": OptimType.EXACT_SGD,
    "Adagrad": OptimType.EXACT_ADAGRAD,
    "Adam": OptimType.ADAM,
    "RowWiseAdagrad": OptimType.EXACT_ROWWISE_ADAGRAD,
    "LarsSGD": OptimType.LARS_SGD,
    "LAMB": OptimType.LAMB,
    "PartialRowWiseLAMB": OptimType.PARTIAL_ROWWISE_LAMB,
    "PartialRowWiseAdam": OptimType.PARTIAL_ROWWISE_ADAM,
}
_OPTIMIZER_ARGUMENTS = ("optimizer", "learning_rate", "weight_decay_mode", "max_norm", *DEFAULT_ARGS)
_CLIPPING_REMEDY = "limit rows by clip_grad_value in the param group of an EagerOptimizer"
_REFUSED_SETTINGS: dict[str, tuple[Any, str]] = REFUSED_ARGS | {
    **dict.fromkeys(
        ("cache_algorithm", "cache_load_factor", "cache_params", "key_value_params"),
        (None, "give store_options= to the collection"),
    ),
    "weights_precision": (None, "give data_type= to the config of the table"),
    "output_dtype": ("fp32", "give output_dtype= to the collection"),
    "bounds_check_mode": (0, "give bad_ids= to the config of the table"),
    "optimizer_state_dtypes": (None, "give state_dtype= to the collection"),
    "gradient_clipping": (False, _CLIPPING_REMEDY),
    "max_gradient": (1.0, _CLIPPING_REMEDY),
}
_PLAN_SETTINGS = (
    "cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype", "key_value_params",
)  # fmt: skip


def fuse_optimizers(model: nn.Module, sharders: Any) -> None:
    """Give a model's rows the optimizers that TorchRec would fuse. Raises OptionError, InputError."""
    fused_params = dict(_find_fused_params(model, sharders))
    for embedding in (module for module in model.modules() if isinstance(module, MultiTableMultiColumnEmbedding)):
        try:
            _fuse_embedding(embedding, dict(fused_params.get(embedding, {})))
        except OptionError as error:
            raise OptionError(f"fused optimizer of embedding {embedding.name!r}: {error}") from None


def check_sharding(subject: str, sharding: Any) -> None:
    """Raise OptionError if a table's entry in a plan contains a setting that tierbed does not follow."""
    settings = {name: value for name in _PLAN_SETTINGS if (value := getattr(sharding, name, None)) is not None}
    try:
        check_arguments(settings, _REFUSED_SETTINGS, ())
    except OptionError as error:
        raise OptionError(f"plan: {subject}: {error}") from None


def _find_fused_params(model: nn.Module, sharders: Any) -> Iterator[tuple[nn.Module, Mapping[str, Any]]]:
    """Yield (module, `fused_params` of its sharder) for each module inside a sharded collection. Raises OptionError."""
    if not isinstance(sharders, (list, tuple, type(None))):
        raise OptionError(f"sharders={sharders!r}: give a list of TorchRec's sharders, or None")
    for sharder in sharders or ():
        if not hasattr(sharder, "module_type"):
            raise OptionError(f"sharders={sharders!r:.80}: give TorchRec's sharders")
        subject = f"sharders: {type(sharder).__name__} has"
        if getattr(sharder, "qcomm_codecs_registry", None):
            raise OptionError(f"{subject} a qcomm_codecs_registry; leave it out, and give env=World(rows=, grads=)")
        params, module_type = getattr(sharder, "fused_params", None) or {}, sharder.module_type
        if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
            raise OptionError(f"{subject} fused_params={params!r:.80}; give a dict of FBGEMM's arguments by name")
        for module in model.modules() if params else ():
            if isinstance(module, module_type):
                raise OptionError(f"{subject} fused_params, but tierbed does not replace {module_type}; leave them out")
            if any(base_class.__name__ == module_type.__name__ for base_class in type(module).__mro__):
                yield from ((inner, params) for inner in module.modules())


def _fuse_embedding(embedding: MultiTableMultiColumnEmbedding, params: dict[str, Any]) -> None:
    """Make an embedding's backward use FBGEMM's optimizer. Changes `params`, a dict of FBGEMM's arguments."""
    shadow: Any = embedding.shadow
    classes, kwargs = getattr(shadow, "_optimizer_classes", []), getattr(shadow, "_optimizer_kwargs", [])
    if len(classes) == 1:
        class_name, package = classes[0].__name__, classes[0].__module__.partition(".")[0]
        if package in ("torch", "torchrec") and class_name in _OPTIM_TYPES:
            params |= {"optimizer": _OPTIM_TYPES[class_name], **kwargs[0]}
        elif params.keys() & {*_OPTIMIZER_ARGUMENTS}:
            raise OptionError(f"{class_name} has its own settings; leave the optimizer's settings out of fused_params")
    if "lr" in params:
        params["learning_rate"] = params.pop("lr")
    if (betas := params.pop("betas", None)) is not None:  # torch's Adam has betas; FBGEMM has beta1 and beta2
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise OptionError(f"betas={betas!r}: give two numbers")
        params["beta1"], params["beta2"] = betas
    optimizer_args = {name: params.pop(name) for name in _OPTIMIZER_ARGUMENTS if name in params}
    unused_settings = pop_ignored_arguments(params, getattr(torch, embedding.spec.dtype))
    check_arguments(params, _REFUSED_SETTINGS, _OPTIMIZER_ARGUMENTS)
    if optimizer_args and shadow.requires_grad:
        if embedding.is_open:
            raise InputError(f"embedding {embedding.name!r} is open; make DistributedModelParallel before a lookup")
        if (settings := make_optimizer_settings(optimizer_args)) is None:
            raise OptionError("optimizer=OptimType.NONE: leave it out, and train the rows with an EagerOptimizer")
        unused_settings += settings.find_unused(optimizer_args)
        if classes:  # torch's backward hook steps the optimizers in this list
            getattr(shadow, IN_BACKWARD)[:] = [settings.make_optimizer([shadow])]
            classes[:], kwargs[:] = [settings.make_optimizer], [{}]
        else:
            from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

            _apply_optimizer_in_backward(settings.make_optimizer, [shadow], {})
    if unused_settings:
        log.warning("embedding %r: settings that change nothing: %s", embedding.name, "; ".join(unused_settings))
