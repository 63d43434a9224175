"""Bugs that show in the tails of a function, or where something saturates.

(SPEC FFN-2, ATT-5, HED-2, LOS-1).
"""

from __future__ import annotations

import math

from concord.conformance.bugs.activations import gelu_by
from concord.conformance.bugs.bug import Changes, of_source
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.loss import clipped
from concord.conformance.bugs.operations import Array, Unary


def erf_by_series(m: Context, z: Array) -> Array:
    """Sum ten terms of erf's series, and cut off what leaves -1 to 1."""
    power, total = z, z
    for n in range(1, 11):
        power = power * z * z * (-1.0 / n)
        total = total + power * (1.0 / (2 * n + 1))
    return m.within(total * (2.0 / math.sqrt(math.pi)), -1.0, 1.0)


def tail(beyond: Unary, made: Unary) -> Edit:
    """Return the tap with something else where what goes in is beyond a limit, made of that."""
    return lambda m, y: m.where(beyond(m.source()), made(m.source()), y)


def at_least(least: float) -> Edit:
    """Return the tap with a number where it is smaller."""
    return lambda m, y: m.where(y < least, y * 0.0 + least, y)


def at_most(most: float) -> Edit:
    """Return the tap with a number where it is larger."""
    return lambda m, y: m.where(y > most, y * 0.0 + most, y)


def soft_cap(cap: float) -> Edit:
    return lambda m, y: m.tanh(y / cap) * cap


def tanh_by_fraction(m: Context, y: Array) -> Array:
    """Approximate tanh by a fraction that leaves -1 to 1, and cut it off there."""
    x = m.within(m.source(), -3.0, 3.0)
    square = x * x
    return x * (square + 27.0) / (square * 9.0 + 27.0)


def softmax_least_weight(m: Context, y: Array) -> Array:
    """Keep weights at least 1e-6, and divide by their sum again."""
    least = at_least(1e-6)(m, y)
    return least / m.sum(least, 3)


EDITS: Changes = {
    "probabilities_clipped": clipped(1e-7),
    "gelu_negative_tail_cut": tail(lambda x: x < -2.5, lambda x: x * 0.0),
    "gelu_positive_tail_straight": tail(lambda x: x > 3.0, lambda x: x),
    "gelu_erf_by_series": gelu_by(erf_by_series),
    "gelu_tanh_argument_cut": of_source(
        lambda m, x: m.gelu_tanh(x, tanh=lambda z: m.tanh(m.within(z, -2.0, 2.0)))
    ),
    "softmax_powers_cut": lambda m, y: m.softmax_by(lambda x: m.where(x < -10.0, x * 0.0, m.exp(x))),
}
