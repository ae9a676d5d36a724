"""Row-wise Adagrad: one accumulator per row. The formula is FBGEMM's EXACT_ROWWISE_ADAGRAD
(https://github.com/pytorch/FBGEMM, split table batched embeddings):

    s += mean over the row of g * g
    w -= lr / (sqrt(s) + eps) * g

With `weight_decay_mode="l2"`, `g` is the gradient plus `weight_decay * w`, in both formulas. With "decoupled", `w`
is first multiplied by 1 - lr * weight_decay. If sqrt(s) + eps is 0 (eps = 0 and no gradient so far), `w` is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import OptimizerError
from .base import DenseOptimizer, ParamsT, read_choice, read_number
from .kernel import RuleKernel
from .rule import ParamGroup, Rule

ROWWISE_ADAGRAD = RuleKernel(
    name="rowwise_adagrad",
    hyperparams="lr weight_decay decay eps",
    row_states=("sum",),
    reduction_term="square(add_decay(g, w, weight_decay, 0.0f))",
    row_body="""
        sum = sum + total / dim;
        const float root = square_root(sum) + eps;
        multiplier = root == 0.0f ? 0.0f : lr / root;
    """,
    row_values=("multiplier",),
    element_body="""
        g = add_decay(g, w, weight_decay, 0.0f);
        w = w * decay - multiplier * g;
    """,
)


class RowWiseAdagrad(DenseOptimizer):
    """Adagrad with one accumulator per row. A row is a slice along a parameter's last dimension.

    The formula is FBGEMM's EXACT_ROWWISE_ADAGRAD; see docs/optimizers.md.

    Args:
        params: The parameters or param groups.
        lr: The learning rate.
        eps: Added to the divisor.
        weight_decay: The weight decay coefficient.
        weight_decay_mode: "l2" adds `weight_decay * w` to the gradient; "decoupled" scales w by 1 - lr * weight_decay.
        initial_accumulator_value: The initial value of the accumulator.

    Raises:
        OptimizerError: If a number is negative, or `weight_decay_mode` is neither "l2" nor "decoupled".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_decay_mode: str = "l2",
        initial_accumulator_value: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "weight_decay_mode": weight_decay_mode,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults)

    def update_parameter(self, w: Tensor, g: Tensor, state: dict[str, Any], group: ParamGroup) -> None:
        hyperparams = _compute_hyperparams(group, 1)
        if not state:
            state["sum"] = torch.full_like(w.sum(-1, keepdim=True), group["initial_accumulator_value"])
        g = g + hyperparams["weight_decay"] * w
        state["sum"] += g.square().mean(-1, keepdim=True)
        root = state["sum"].sqrt() + hyperparams["eps"]
        multiplier = torch.where(root == 0, 0, hyperparams["lr"] / root)
        w.mul_(hyperparams["decay"]).sub_(multiplier * g)


def _compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    lr, weight_decay = read_number(group, "lr"), read_number(group, "weight_decay")
    if "weight_decay_mode" in group:
        is_decoupled = read_choice(group, "weight_decay_mode", ("l2", "decoupled")) == "decoupled"
    else:  # TorchRec's class
        is_decoupled, lr = False, lr / (1.0 + (step - 1) * read_number(group, "lr_decay"))
        if group["maximize"]:
            raise OptimizerError("optimizer RowWiseAdagrad: maximize=True is not supported; minimize the negated loss")
    return {
        "lr": lr,
        "weight_decay": 0.0 if is_decoupled else weight_decay,
        "decay": 1.0 - lr * weight_decay if is_decoupled else 1.0,
        "eps": read_number(group, "eps"),
    }


def _compute_initial(group: ParamGroup) -> dict[str, float]:
    return {"sum": read_number(group, "initial_accumulator_value")}


TORCHREC_NAME = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
RULES = (Rule(ROWWISE_ADAGRAD, RowWiseAdagrad, _compute_hyperparams, _compute_initial, torchrec_name=TORCHREC_NAME),)
