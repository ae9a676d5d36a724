"""The optimizers of OneFlow's `one_embedding` that tierbed has under other names."""

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
    """An optimizer for a plain PyTorch loop, whose `step()` also updates the rows of `embeddings`.

    optimizer: of torch.optim or tierbed.optim, over the parameters of all embeddings and any others. embeddings: a list
    of embeddings. Methods and errors are those of `EagerOptimizer`; OptimizerError also if `embeddings` is not such a
    list.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, embeddings: Sequence[MultiTableMultiColumnEmbedding]) -> None:
        given = list(embeddings) if isinstance(embeddings, (list, tuple, nn.ModuleList)) else []
        if not given or not all(isinstance(one, MultiTableMultiColumnEmbedding) for one in given):
            raise OptimizerError(
                f"embeddings={embeddings!r}: give a list of the embeddings whose rows the optimizer is to train"
            )
        super().__init__(optimizer, nn.ModuleList(given))


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
    """A `CatchUpAdam`, which has the purpose of OneFlow's SmartDecayAdam but another formula.

    contiguous_params, fused: how OneFlow stores and updates dense parameters; they change no result. Raises
    OptimizerError for a weight decay, amsgrad, and do_bias_correction=False.
    """
    refusals: tuple[tuple[str, Any, Any, str], ...] = (
        ("weight_decay", weight_decay, 0, "it would move rows that no step touched"),
        ("amsgrad", amsgrad, False, "rows keep two moments"),
        ("do_bias_correction", do_bias_correction, True, "steps are those of torch.optim.Adam"),
    )
    for name, value, only, reason in refusals:
        if value != only:
            raise OptimizerError(f"SmartDecayAdam: {name}={value!r}; give {name}={only}: {reason}")
    return CatchUpAdam(params, lr, betas, eps)
