"""What TorchRec's fused modules train rows with: FBGEMM's formulas and defaults, whatever an optimizer's class has."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...embedding.modules.embedding import MultiTableMultiColumnEmbedding
from ...embedding.optim.eager import IN_BACKWARD
from ...engine.errors import InputError, OptionError
from ..tbe.call_arguments import CONSTRUCTOR, idle, refuse
from ..tbe.enums import OptimType
from ..tbe.settings import DEFAULTS, settings_of

log = logging.getLogger("tierbed")
_KINDS = {  # by the name of a class of TorchRec's; torch has the first three
    "SGD": OptimType.EXACT_SGD,
    "Adagrad": OptimType.EXACT_ADAGRAD,
    "Adam": OptimType.ADAM,
    "RowWiseAdagrad": OptimType.EXACT_ROWWISE_ADAGRAD,
    "LarsSGD": OptimType.LARS_SGD,
    "LAMB": OptimType.LAMB,
    "PartialRowWiseLAMB": OptimType.PARTIAL_ROWWISE_LAMB,
    "PartialRowWiseAdam": OptimType.PARTIAL_ROWWISE_ADAM,
}
_NUMBERS = ("optimizer", "learning_rate", "weight_decay_mode", "max_norm", *DEFAULTS)
_CLIP = "limit rows by clip_grad_value in the param group of an EagerOptimizer"
_REFUSED: dict[str, tuple[Any, str]] = CONSTRUCTOR | {
    **dict.fromkeys(
        ("cache_algorithm", "cache_load_factor", "cache_params", "key_value_params"),
        (None, "give store_options= to the collection"),
    ),
    "weights_precision": (None, "give data_type= to the config of the table"),
    "output_dtype": ("fp32", "give output_dtype= to the collection"),
    "bounds_check_mode": (0, "give bad_ids= to the config of the table"),
    "optimizer_state_dtypes": (None, "give state_dtype= to the collection"),
    "gradient_clipping": (False, _CLIP),
    "max_gradient": (1.0, _CLIP),
}
_OF_PLAN = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")


def fuse(model: nn.Module, sharders: Any) -> None:
    """Give the rows of a model the optimizers that TorchRec would fuse. OptionError, InputError."""
    of_sharders = dict(_params_of(model, sharders))
    for embedding in (one for one in model.modules() if isinstance(one, MultiTableMultiColumnEmbedding)):
        try:
            _fuse(embedding, dict(of_sharders.get(embedding, {})))
        except OptionError as error:
            raise OptionError(f"fused optimizer of embedding {embedding.name!r}: {error}") from None


def check_sharding(where: str, sharding: Any) -> None:
    """OptionError for a setting of a table in a plan that is not followed."""
    given = {name: getattr(sharding, name, None) for name in (*_OF_PLAN, "key_value_params")}
    try:
        refuse({name: value for name, value in given.items() if value is not None}, _REFUSED, ())
    except OptionError as error:
        raise OptionError(f"plan: {where}: {error}") from None


def _params_of(model: nn.Module, sharders: Any) -> Iterator[tuple[nn.Module, Mapping[str, Any]]]:
    """The embeddings of collections whose sharder has `fused_params`. OptionError."""
    if not isinstance(sharders, (list, tuple, type(None))):
        raise OptionError(f"sharders={sharders!r}: give a list of TorchRec's sharders, or None")
    for sharder in sharders or ():
        if not hasattr(sharder, "module_type"):
            raise OptionError(f"sharders={sharders!r:.80}: give TorchRec's sharders")
        where = f"sharders: {type(sharder).__name__} has"
        if getattr(sharder, "qcomm_codecs_registry", None):
            raise OptionError(f"{where} a qcomm_codecs_registry; leave it out, and give env=World(rows=, grads=)")
        params, kind = getattr(sharder, "fused_params", None) or {}, sharder.module_type
        if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
            raise OptionError(f"{where} fused_params={params!r:.80}; give a dict of FBGEMM's arguments by their names")
        for module in model.modules() if params else ():
            if isinstance(module, kind):
                raise OptionError(f"{where} fused_params, and the model's {kind} stays as it is; leave them out")
            if any(base.__name__ == kind.__name__ for base in type(module).__mro__):
                yield from ((one, params) for one in module.modules())


def _fuse(embedding: MultiTableMultiColumnEmbedding, given: dict[str, Any]) -> None:
    shadow: Any = embedding.shadow
    classes, kwargs = getattr(shadow, "_optimizer_classes", []), getattr(shadow, "_optimizer_kwargs", [])
    if len(classes) == 1:
        kind, package = classes[0].__name__, classes[0].__module__.partition(".")[0]
        if package in ("torch", "torchrec") and kind in _KINDS:
            given |= {"optimizer": _KINDS[kind], **kwargs[0]}
        elif given.keys() & {*_NUMBERS}:
            raise OptionError(f"{kind} has its own numbers; leave those of fused_params out")
    if "lr" in given:
        given["learning_rate"] = given.pop("lr")
    if (betas := given.pop("betas", None)) is not None:  # which torch's Adam has, and FBGEMM lacks
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise OptionError(f"betas={betas!r}: give two numbers")
        given["beta1"], given["beta2"] = betas
    chosen = {name: given.pop(name) for name in _NUMBERS if name in given}
    unused = idle(given, getattr(torch, embedding.spec.dtype))
    refuse(given, _REFUSED, _NUMBERS)
    if chosen and shadow.requires_grad:
        if embedding.is_open:
            raise InputError(f"embedding {embedding.name!r} is open; make DistributedModelParallel before a lookup")
        if (settings := settings_of(chosen)) is None:
            raise OptionError("optimizer=OptimType.NONE: leave it out, and train the rows by an EagerOptimizer")
        unused += settings.idle(chosen)
        if classes:  # torch's hook steps the optimizers of this list
            getattr(shadow, IN_BACKWARD)[:] = [settings.make_optimizer([shadow])]
            classes[:], kwargs[:] = [settings.make_optimizer], [{}]
        else:
            from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

            _apply_optimizer_in_backward(settings.make_optimizer, [shadow], {})
    if unused:
        log.warning("embedding %r: settings that change nothing: %s", embedding.name, "; ".join(unused))
