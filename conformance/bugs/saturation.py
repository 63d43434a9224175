"""Bugs that show in the tails of a function, or where something saturates.

(SPEC FFN-2, ATT-5, HED-2, LOS-1).
"""

from __future__ import annotations

import math

from concord.conformance.bugs.activations import gelu_by
from concord.conformance.bugs.bug import Edits
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.loss import clipped
from concord.conformance.bugs.operations import Array


def gelu_erf_by_series(m: Context) -> Array:
    """Sum ten terms of erf's series, and cut off what leaves -1 to 1."""
    z = m.x / math.sqrt(2.0)
    power, total = z, z
    for n in range(1, 11):
        power = power * z * z * (-1.0 / n)
        total = total + power * (1.0 / (2 * n + 1))
    return gelu_by(m, m.within(total * (2.0 / math.sqrt(math.pi)), -1.0, 1.0))


def at_least(m: Context, least: float) -> Array:
    """Return the tap with a number where it is smaller."""
    return m.where(m.y < least, m.y * 0.0 + least, m.y)


def at_most(m: Context, most: float) -> Array:
    """Return the tap with a number where it is larger."""
    return m.where(m.y > most, m.y * 0.0 + most, m.y)


def soft_cap(m: Context, cap: float) -> Array:
    return m.tanh(m.y / cap) * cap


def tanh_by_fraction(m: Context) -> Array:
    """Approximate tanh by a fraction that leaves -1 to 1, and cut it off there."""
    x = m.within(m.x, -3.0, 3.0)
    square = x * x
    return x * (square + 27.0) / (square * 9.0 + 27.0)


def softmax_least_weight(m: Context) -> Array:
    """Keep weights at least 1e-6, and divide by their sum again."""
    least = at_least(m, 1e-6)
    return least / m.sum(least, 3)


EDITS: Edits = {
    "probabilities_clipped": lambda m: clipped(m, 1e-7),
    "gelu_negative_tail_cut": lambda m: m.where(m.x < -2.5, m.x * 0.0, m.y),
    "gelu_positive_tail_straight": lambda m: m.where(m.x > 3.0, m.x, m.y),
    "gelu_tanh_argument_cut": lambda m: m.gelu_tanh(m.x, tanh=lambda z: m.tanh(m.within(z, -2.0, 2.0))),
    "softmax_powers_cut": lambda m: m.softmax_by(lambda x: m.where(x < -10.0, x * 0.0, m.exp(x))),
}
