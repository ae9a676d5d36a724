"""OneFlow's `FusedMLP`, built from torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.checks import validate_arguments
from ..engine.errors import OptionError
from ..engine.ops.embedding_base import Unscriptable


class FusedMLP(Unscriptable, nn.Module):
    """A stack of linear layers, each followed by ReLU and dropout.

    Parameters are named as in OneFlow: `weight_<i>` [out, in] and `bias_<i>` [out].

    Args:
        in_features: Width of the input.
        hidden_features: Widths of the hidden layers.
        out_features: Width of the output.
        hidden_dropout_rates: Dropout rate of each hidden layer. None means 0.
        out_dropout_rate: Dropout rate of the last layer.
        skip_final_activation: If True, the last layer is linear (without ReLU).

    Raises:
        OptionError: If the numbers of dropout rates and hidden layers differ.
    """

    @validate_arguments(
        "in_features", "hidden_features", "out_features", "hidden_dropout_rates", "out_dropout_rate",
        "skip_final_activation",
    )  # fmt: skip
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
        num_layers = len(hidden_features)
        rates = [0.0] * num_layers if hidden_dropout_rates is None else [*hidden_dropout_rates]
        if len(rates) != num_layers:
            raise OptionError(f"hidden_dropout_rates={hidden_dropout_rates!r}: give {num_layers} rates, one per layer")
        self._rates, self.skip_final_activation = [*rates, out_dropout_rate], skip_final_activation
        for index, shape in enumerate(pairwise([in_features, *hidden_features, out_features])):
            layer: Any = nn.Linear(*shape)
            self.register_parameter(f"weight_{index}", layer.weight)
            self.register_parameter(f"bias_{index}", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        for index, rate in enumerate(self._rates):
            x = nn.functional.linear(x, getattr(self, f"weight_{index}"), getattr(self, f"bias_{index}"))
            if index < len(self._rates) - 1 or not self.skip_final_activation:
                x = torch.relu(x)
            if rate:
                x = nn.functional.dropout(x, rate, self.training)
        return x
