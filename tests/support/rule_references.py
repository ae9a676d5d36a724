"""One step of each optimizer's rule in NumPy, which the kernels in engine/optim have to equal bit for bit.

Every operation is rounded to float32, as in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.arithmetic import power, power_by_squaring, row_sum
from tierbed.engine.optim.kernel import RuleKernel
from tierbed.engine.optim.past_rates import interpolate, read_knots

# The arguments of a reference, by the names that a kernel's body uses: `w` and element states [n, dim] and row states
# [n, 1], float32, updated in place; `g` [n, dim], `first` [n, 1], `step`, `dim`; hyper-parameters as NumPy scalars.
Row = Any


def decayed(
    g: NDArray[np.float32], w: NDArray[np.float32], weight_decay: np.float32, maximize: np.float32
) -> NDArray[np.float32]:
    """g, negated for `maximize`, with L2 weight decay added."""
    g = -g if maximize else g
    return g + weight_decay * w if weight_decay != 0 else g


def quotient(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """a / b, and 0 where b is 0. b is 0 only if a is 0, or so small that its square underflowed."""
    divisor: NDArray[np.float32] = np.where(b == 0, np.float32(2.0**127), b)
    return a / divisor


def sgd(x: Row) -> None:
    x.w -= x.lr * decayed(x.g, x.w, x.weight_decay, x.maximize)


def sgd_momentum(x: Row) -> None:
    g = decayed(x.g, x.w, x.weight_decay, x.maximize)
    x.momentum_buffer[:] = np.where(x.first, g, x.momentum * x.momentum_buffer + x.one_minus_dampening * g)
    x.w -= x.lr * (g + x.momentum * x.momentum_buffer if x.nesterov else x.momentum_buffer)


def adagrad(x: Row) -> None:
    g = decayed(x.g, x.w, x.weight_decay, x.maximize)
    x.sum += g * g
    x.w -= x.lr * quotient(g, np.sqrt(x.sum) + x.eps)


def adam(x: Row) -> None:
    moments(x, decayed(x.g, x.w, x.weight_decay, x.maximize))


def adamw(x: Row) -> None:
    x.w *= x.decay
    moments(x, decayed(x.g, x.w, np.float32(0), x.maximize))


def moments(x: Row, g: np.ndarray) -> None:
    _average(x, g)
    x.w -= x.step_size * quotient(x.exp_avg, np.sqrt(x.exp_avg_sq) / x.sqrt_correction2 + x.eps)


def _average(x: Row, g: np.ndarray) -> None:
    x.exp_avg += (g - x.exp_avg) * x.one_minus_beta1
    x.exp_avg_sq[:] = x.beta2 * x.exp_avg_sq + (x.one_minus_beta2 * g) * g


def catch_up_adam(x: Row) -> None:
    moments(x, decayed(x.g, x.w, np.float32(0), x.maximize))


class PastRates:
    """The learning rates in the numbers of a rule that catches up, as `Rates` of kernels/rule.h has them."""

    def __init__(self, kernel: RuleKernel, numbers: Sequence[float]) -> None:
        self.knots, self.now = read_knots(kernel, numbers)

    def at(self, step: int) -> float:
        """The rate of a step."""
        index = self._index(step)
        if index == len(self.knots):
            return self.now
        return self.knots[index][1] if index == 0 else interpolate(self.knots[index - 1], self.knots[index], step)

    def last(self, step: int) -> float:
        """The last step whose rate is on one line with that of `step`."""
        index = self._index(step)
        return self.knots[index][0] if index < len(self.knots) else 2.0**32

    def _index(self, step: int) -> int:
        return sum(knot < step for knot, _ in self.knots)


def missed_steps(x: Row, coupled: bool = False, decoupled: bool = False) -> None:
    """The steps that a row missed. coupled, decoupled: how its weight decays."""
    singly = x.missed if coupled else min(x.missed, int(x.terms))
    decay = x.weight_decay if decoupled else 0.0
    power1, power2 = power_by_squaring(x.decay1, x.last), power_by_squaring(x.decay2, x.last)
    taken = 0
    while taken < singly and (coupled or not x.first):
        rate = x.rates.at(x.last + 1 + taken)
        power1, power2 = power1 * x.decay1, power2 * x.decay2
        size, correction2 = np.float32(rate / (1.0 - power1)), np.float32(math.sqrt(1.0 - power2))
        g = x.weight_decay * x.w if coupled else np.float32(0)
        x.w *= np.float32(1.0 - rate * decay)
        _average(x, g)
        x.w -= size * (x.exp_avg / (np.sqrt(x.exp_avg_sq) / correction2 + x.eps))
        taken += 1
    while taken < x.missed:
        begin = x.last + 1 + taken
        count = 1 if taken < singly else int(min(x.rates.last(begin) - begin + 1, x.missed - taken))
        first, last = x.rates.at(begin), x.rates.at(begin + count - 1)
        left = 1.0 - 0.5 * (first + last) * decay
        x.w *= np.float32(power_by_squaring(float(np.float32(left)) if first == last else left, count))
        x.exp_avg *= np.float32(power_by_squaring(x.decay1, count))
        x.exp_avg_sq *= np.float32(power_by_squaring(x.decay2, count))
        taken += count


def rmsprop(x: Row) -> None:
    g = decayed(x.g, x.w, x.weight_decay, x.maximize)
    x.square_avg[:] = x.alpha * x.square_avg + (x.one_minus_alpha * g) * g
    x.w -= x.lr * quotient(g, np.sqrt(x.square_avg) + x.eps)


def ftrl(x: Row) -> None:
    g = decayed(x.g, x.w, x.weight_decay, np.float32(0))
    before = power(x.sum, x.power_of_sum)
    x.sum += g * g
    after = power(x.sum, x.power_of_sum)
    x.z += g - (after - before) / x.lr * x.w
    shrunk = np.where(x.z > 0, x.z - x.lambda1, x.z + x.lambda1)
    scale = (x.beta + after) / x.lr + x.lambda2
    updated = np.where(scale == 0, x.w, -shrunk / scale)
    x.w[:] = np.where(np.abs(x.z) <= x.lambda1, np.float32(0), updated)


def rowwise_adagrad(x: Row) -> None:
    g = decayed(x.g, x.w, x.weight_decay, np.float32(0))
    x.sum += row_sum(g * g) / x.dim
    root = np.sqrt(x.sum) + x.eps
    multiplier = np.where(root == 0, np.float32(0), x.lr / root)
    x.w[:] = x.w * x.decay - multiplier * g


def lars_sgd(x: Row) -> None:
    g = decayed(x.g, x.w, np.float32(0), x.maximize)
    weights = row_sum(x.w * x.w)
    norm = np.sqrt(weights)
    divisor = np.sqrt(row_sum(g * g)) + x.weight_decay * norm
    size = np.where((weights == 0) | (divisor == 0), x.lr, x.lr * x.eta * norm / divisor)
    x.momentum_buffer[:] = x.momentum * x.momentum_buffer + size * (g + x.weight_decay * x.w)
    x.w -= x.momentum_buffer


def partial_rowwise_adam(x: Row) -> None:
    x.exp_avg_sq[:] = x.beta2 * x.exp_avg_sq + x.one_minus_beta2 * (row_sum(x.g * x.g) / x.dim)
    size = quotient(x.step_size, np.sqrt(x.exp_avg_sq) / x.sqrt_correction2 + x.eps)
    g = decayed(x.g, x.w, np.float32(0), x.maximize)
    x.exp_avg += (g - x.exp_avg) * x.one_minus_beta1
    x.w[:] = x.w * x.decay - size * x.exp_avg


def lamb(x: Row) -> None:
    g = decayed(x.g, x.w, np.float32(0), x.maximize)
    _average(x, g)
    _take(x)


def partial_rowwise_lamb(x: Row) -> None:
    x.exp_avg_sq[:] = x.beta2 * x.exp_avg_sq + x.one_minus_beta2 * (row_sum(x.g * x.g) / x.dim)
    g = decayed(x.g, x.w, np.float32(0), x.maximize)
    x.exp_avg += (g - x.exp_avg) * x.one_minus_beta1
    _take(x)


def _take(x: Row) -> None:
    """The step of a row, given its moments."""
    r = quotient(x.exp_avg / x.correction1, np.sqrt(x.exp_avg_sq) / x.sqrt_correction2 + x.eps) + x.weight_decay * x.w
    weights, steps = row_sum(x.w * x.w), row_sum(r * r)
    trust = np.sqrt(weights) / np.sqrt(steps)
    x.w -= np.where((weights == 0) | (steps == 0), x.lr, x.lr * trust) * r


_RULES = (
    sgd, sgd_momentum, adagrad, adam, adamw, catch_up_adam, rmsprop, ftrl, rowwise_adagrad, lars_sgd,
    partial_rowwise_adam, lamb, partial_rowwise_lamb,
)  # fmt: skip
REFERENCES: dict[str, Callable[[Row], None]] = {  # by the name of the kernel
    **{rule.__name__: rule for rule in _RULES},
    "catch_up_adam_l2": adam,
    "catch_up_adamw": adamw,
}
CATCH_UPS: dict[str, Callable[[Row], None]] = {  # for one row
    "catch_up_adam": missed_steps,
    "catch_up_adam_l2": partial(missed_steps, coupled=True),
    "catch_up_adamw": partial(missed_steps, decoupled=True),
}
