"""OneFlow's `FusedMLP`, of torch's modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.checks import checked_arguments
from ..engine.errors import OptionError
from ..engine.ops.rows_contract import NoTorchScript


class FusedMLP(NoTorchScript, nn.Module):
    """Linear layers with ReLU between them, and dropout where its rate is not 0.

    in_features, hidden_features, out_features: widths. hidden_dropout_rates: one for each hidden layer, None for 0.
    out_dropout_rate: of the last layer. skip_final_activation: whether the last layer has no ReLU. The parameters are
    `weight_<i>` [out, in] and `bias_<i>` [out], as OneFlow's. Raises OptionError.
    """

    @checked_arguments(
        "in_features",
        "hidden_features",
        "out_features",
        "hidden_dropout_rates",
        "out_dropout_rate",
        "skip_final_activation",
    )
    def __init__(
        self,
        in_features: int,
        hidden_features: Sequence[int],
        out_features: int,
        hidden_dropout_rates: Sequence[float] | None = None,
        out_dropout_rate: float = 0.0,
        skip_final_activation: bool = False,
    ) -> None:
        super().__init__()
        rates = [0.0] * len(hidden_features) if hidden_dropout_rates is None else [*hidden_dropout_rates]
        if len(rates) != len(hidden_features):
            raise OptionError(
                f"hidden_dropout_rates={hidden_dropout_rates!r}: give a rate for each of {len(hidden_features)} layers"
            )
        self._rates, self.skip_final_activation = [*rates, out_dropout_rate], skip_final_activation
        for number, shape in enumerate(pairwise([in_features, *hidden_features, out_features])):
            layer: Any = nn.Linear(*shape)
            self.register_parameter(f"weight_{number}", layer.weight)
            self.register_parameter(f"bias_{number}", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        for number, rate in enumerate(self._rates):
            x = nn.functional.linear(x, getattr(self, f"weight_{number}"), getattr(self, f"bias_{number}"))
            if number < len(self._rates) - 1 or not self.skip_final_activation:
                x = torch.relu(x)
            if rate:
                x = nn.functional.dropout(x, rate, self.training)
        return x
