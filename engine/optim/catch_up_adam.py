"""Lazy Adam and AdamW. A row that is updated late still gets the values that torch's dense Adam or AdamW would give it.

A row is written only in steps that touch the row. When the row is next looked up or updated, in step t, its missed
steps are applied first. A missed step s < t has a gradient of zero, and uses the lr of step s:

    CatchUpAdam     g  = weight_decay * w
                    m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
                    w -= lr / (1 - beta1^s) * (m / (sqrt(v) / sqrt(1 - beta2^s) + eps))
    CatchUpAdamW    w *= 1 - lr * weight_decay, then CatchUpAdam without weight decay

With weight decay, a row that was never written has missed all steps before t.

CatchUpAdam with weight decay applies all missed steps one by one: each step depends on w, and no closed form is known.
The other rules apply at most `terms` steps one by one. For the remaining steps, they multiply m and v by powers of
beta1 and beta2, and w by a power of the decay. The remaining steps change w only by the decay; their other changes are
dropped as negligible. Suppose the first missed step changes w by d, and r = beta1 / sqrt(beta2). The j-th later step
changes w by at most d * r^j * sqrt(1 + j). The factor sqrt(1 + j) bounds the growth of sqrt(1 - beta2^s). With `terms`
steps, the dropped changes sum to less than d * 2^-24. This is less than the rounding error of the first step. The bias
corrections keep beta1^s and beta2^s as doubles, and update them in each step. OneFlow's SmartDecayAdam is similar.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from functools import cache

import torch

from .adam import compute_hyperparams as compute_adam_hyperparams
from .adam import is_decoupled
from .base import MIN_VALUE, CheckedOptimizer, read_number
from .kernel import CatchUp, RuleKernel
from .rule import ParamGroup, Rule

MAX_MISSED = 2**32 - 2**8  # the largest count of missed steps that float32 holds

MISSED_STEPS = CatchUp(
    limit="terms",
    doubles=("beta1_power", "beta2_power"),
    values=("missed_step_size", "missed_correction2", "beta1_factor", "beta2_factor"),
    begin_body="""
        beta1_power = power(decay1, last);
        beta2_power = power(decay2, last);
    """,
    step_body="""
        beta1_power = beta1_power * decay1;
        beta2_power = beta2_power * decay2;
        missed_step_size = static_cast<float>(rate / (1.0 - beta1_power));
        missed_correction2 = static_cast<float>(square_root(1.0 - beta2_power));
    """,
    element_body="""
        exp_avg = exp_avg - exp_avg * one_minus_beta1;
        exp_avg_sq = beta2 * exp_avg_sq;
        w = w - missed_step_size * (exp_avg / (square_root(exp_avg_sq) / missed_correction2 + eps));
    """,
    combined_body="""
        beta1_factor = static_cast<float>(power(decay1, num_combined));
        beta2_factor = static_cast<float>(power(decay2, num_combined));
    """,
    combined_element_body="""
        exp_avg = exp_avg * beta1_factor;
        exp_avg_sq = exp_avg_sq * beta2_factor;
    """,
)

CATCH_UP_ADAM = RuleKernel(
    name="catch_up_adam",
    hyperparams="step_size maximize one_minus_beta1 beta2 one_minus_beta2 sqrt_correction2 eps terms",
    doubles="lr decay1 decay2",
    element_states=("exp_avg", "exp_avg_sq"),
    element_body="""
        g = add_decay(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        exp_avg_sq = beta2 * exp_avg_sq + (one_minus_beta2 * g) * g;
        w = w - step_size * (exp_avg / (square_root(exp_avg_sq) / sqrt_correction2 + eps));
    """,
    catch_up=MISSED_STEPS,
)

CATCH_UP_ADAM_L2 = replace(
    CATCH_UP_ADAM,
    name="catch_up_adam_l2",
    hyperparams="step_size weight_decay maximize one_minus_beta1 beta2 one_minus_beta2 sqrt_correction2 eps",
    element_body=CATCH_UP_ADAM.element_body.replace("0.0f", "weight_decay"),
    catch_up=replace(
        MISSED_STEPS,
        limit="4294967040.0f",
        values=("missed_step_size", "missed_correction2"),
        element_body="""
            const float g = weight_decay * w;
            exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
            exp_avg_sq = beta2 * exp_avg_sq + (one_minus_beta2 * g) * g;
            w = w - missed_step_size * (exp_avg / (square_root(exp_avg_sq) / missed_correction2 + eps));
        """,
        combined_body="",
        combined_element_body="",
        unwritten_rows="steps",
    ),
)

CATCH_UP_ADAMW = replace(
    CATCH_UP_ADAM,
    name="catch_up_adamw",
    hyperparams="step_size decay maximize one_minus_beta1 beta2 one_minus_beta2 sqrt_correction2 eps terms",
    doubles="lr weight_decay decay1 decay2",
    element_body="w = w * decay;" + CATCH_UP_ADAM.element_body,
    catch_up=replace(
        MISSED_STEPS,
        values=("missed_step_size", "missed_correction2", "missed_decay", "beta1_factor", "beta2_factor"),
        step_body=MISSED_STEPS.step_body + "missed_decay = static_cast<float>(1.0 - rate * weight_decay);",
        element_body="w = w * missed_decay;" + MISSED_STEPS.element_body,
        combined_body=MISSED_STEPS.combined_body
        + """
            const double decay_of_one = 1.0 - rate * weight_decay;
            const double rounded = static_cast<double>(static_cast<float>(decay_of_one));
            missed_decay = static_cast<float>(power(is_constant ? rounded : decay_of_one, num_combined));
        """,
        combined_element_body="w = w * missed_decay;" + MISSED_STEPS.combined_element_body,
        unwritten_rows="combined",
    ),
)


class CatchUpAdam(CheckedOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` that gives rows the values of dense Adam, however rarely their ids occur.

    The arguments are the same as for `torch.optim.Adam`, and dense parameters train in the same way. Rows are updated
    lazily: when a row is next looked up or updated, the steps that it missed are applied first. With `weight_decay`
    (L2), all missed steps are applied one by one.

    Raises:
        OptimizerError: If `amsgrad=True`, or `eps=0`. With `eps=0`, a row whose moments are 0 would become NaN.
    """


class CatchUpAdamW(CheckedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` that gives rows the values of dense AdamW, however rarely their ids occur.

    The arguments are the same as for `torch.optim.AdamW`, and dense parameters train in the same way. Rows are updated
    lazily, and errors are raised, as in `CatchUpAdam`.
    """


@cache
def count_terms(beta1: float, beta2: float) -> int:
    """Return the number of missed steps to apply one by one; `MAX_MISSED` if later steps never become negligible."""
    ratio = beta1 / math.sqrt(beta2) if beta2 else math.inf

    def is_negligible(count: int) -> bool:  # a geometric series bounds the steps after the first `count`
        growth = ratio * math.sqrt((count + 2) / (count + 1))
        return growth < 1.0 and ratio**count * math.sqrt(count + 1) <= 2.0**-24 * (1.0 - growth)

    return bisect_left(range(MAX_MISSED), True, key=is_negligible)


def _compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    beta1, beta2 = map(float, group["betas"])
    settings = {name: read_number(group, name) for name in ("lr", "weight_decay")}
    settings["eps"] = read_number(group, "eps", low=MIN_VALUE)
    return {
        **settings,
        **compute_adam_hyperparams(group, step),
        "decay1": beta1,
        "decay2": beta2,
        "terms": float(count_terms(beta1, beta2)),
    }


RULES = tuple(
    rule
    for optimizer in (CatchUpAdam, CatchUpAdamW)
    for rule in (
        Rule(CATCH_UP_ADAMW, optimizer, _compute_hyperparams, applies_to=is_decoupled),
        Rule(CATCH_UP_ADAM_L2, optimizer, _compute_hyperparams, applies_to=lambda group: bool(group["weight_decay"])),
        Rule(CATCH_UP_ADAM, optimizer, _compute_hyperparams),
    )
)
