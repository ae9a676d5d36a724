"""Optimizers whose names in OneFlow's `one_embedding` differ from tierbed's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from ..embedding.modules.embedding import MultiTableMultiColumnEmbedding
from ..embedding.optim.eager import EagerOptimizer
from ..engine.errors import OptimizerError
from ..engine.optim import CatchUpAdam


class Optimizer(EagerOptimizer):
    """An `EagerOptimizer` with OneFlow's arguments: its `step()` also updates embedding rows.

    Args:
        optimizer: An optimizer from torch.optim or tierbed.optim that trains all embeddings of the model.
        embeddings: List of embeddings to train.

    Raises:
        OptimizerError: If `embeddings` is not a list of embeddings. `EagerOptimizer` raises further errors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, embeddings: Sequence[MultiTableMultiColumnEmbedding]) -> None:
        modules = list(embeddings) if isinstance(embeddings, (list, tuple, nn.ModuleList)) else []
        if not modules or not all(isinstance(module, MultiTableMultiColumnEmbedding) for module in modules):
            raise OptimizerError(f"embeddings={embeddings!r}: give a list of the embeddings to train")
        super().__init__(optimizer, nn.ModuleList(modules))


def SmartDecayAdam(
    params: ParamsT,
    lr: float | torch.Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    do_bias_correction: bool = True,
    contiguous_params: bool = False,
    fused: bool = False,
) -> CatchUpAdam:
    """Return a `CatchUpAdam`: it serves the same purpose as OneFlow's SmartDecayAdam, but with another formula.

    Args:
        params, lr, betas, eps: As in torch.optim.Adam.
        weight_decay, amsgrad, do_bias_correction: Only the defaults are supported.
        contiguous_params, fused: Ignored, because in OneFlow they only concern dense parameters and change no result.

    Raises:
        OptimizerError: If weight_decay, amsgrad or do_bias_correction is not the default.
    """
    required_values: tuple[tuple[str, Any, Any, str], ...] = (
        ("weight_decay", weight_decay, 0, "weight decay would change rows that no step used"),
        ("amsgrad", amsgrad, False, "a row stores only Adam's two moments"),
        ("do_bias_correction", do_bias_correction, True, "steps always equal torch.optim.Adam's"),
    )
    for name, value, default, reason in required_values:
        if value != default:
            raise OptimizerError(f"SmartDecayAdam: {name}={value!r} is refused: {reason}; give {name}={default}")
    return CatchUpAdam(params, lr, betas, eps)
