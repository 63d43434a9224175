"""Interchangeable activations, and bugs of each (SPEC FFN-1, FFN-2, HED-2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from concord.conformance.bugs.context import Array, Context, Edits, in_last_layer


def softplus(m: Context, x: Array) -> Array:
    return m.relu(x) + m.log(m.exp(-m.abs(x)) + 1.0)


USUAL: Mapping[str, Callable[[Context, Array], Array]] = {
    "none": lambda m, x: x,
    "ReLU": lambda m, x: m.relu(x),
    "erf GELU": lambda m, x: m.activation(x, "gelu_erf"),
    "tanh GELU": lambda m, x: m.gelu_tanh(x),
    "quick GELU (x sigmoid(1.702 x))": lambda m, x: x * m.sigmoid(x * 1.702),
    "SiLU": lambda m, x: x * m.sigmoid(x),
    "tanh": lambda m, x: m.tanh(x),
}
"""Interchangeable functions in text models."""

FUNCTIONS: Mapping[str, Callable[[Context, Array], Array]] = {
    **USUAL,
    "sigmoid": lambda m, x: m.sigmoid(x),
    "hard sigmoid (0.2 x + 0.5)": lambda m, x: m.within(x * 0.2 + 0.5, 0.0, 1.0),
    "hard sigmoid (x / 6 + 0.5)": lambda m, x: m.within(x / 6.0 + 0.5, 0.0, 1.0),
    "leaky ReLU": lambda m, x: m.where(x > 0.0, x, x * 0.01),
    "ELU": lambda m, x: m.where(x > 0.0, x, m.exp(-m.relu(-x)) - 1.0),
    "squared ReLU": lambda m, x: m.relu(x) * m.relu(x),
    "ReLU6": lambda m, x: m.relu(x) - m.relu(x - 6.0),
    "Mish": lambda m, x: x * m.tanh(softplus(m, x)),
    "softplus": softplus,
    "hardswish": lambda m, x: x * m.within(x + 3.0, 0.0, 6.0) / 6.0,
    "softmax": lambda m, x: m.softmax(x, len(tuple(x.shape)) - 1),
}
"""Every replacement function by name."""


def gelu(m: Context, **constants: Any) -> Array:
    return m.gelu_tanh(m.x, **constants)


def gelu_by(m: Context, erf: Array) -> Array:
    return m.x * 0.5 * (erf + 1.0)


def gelu_of(m: Context, root: float) -> Array:
    return gelu_by(m, m.erf(m.x / root))


def leaky(m: Context, slope: float) -> Array:
    return m.where(m.x > 0.0, m.x, m.x * slope)


def gelu_erf_by_series(m: Context) -> Array:
    z = m.x / math.sqrt(2.0)
    power, total = z, z
    for n in range(1, 11):
        power = power * z * z * (-1.0 / n)
        total = total + power * (1.0 / (2 * n + 1))
    return gelu_by(m, m.within(total * (2.0 / math.sqrt(math.pi)), -1.0, 1.0))


EDITS: Edits = {
    "gelu_quick": lambda m: m.x * m.sigmoid(m.x * 1.702),
    "layer_last_gelu_by_tanh": in_last_layer(gelu),
    "gelu_negative_tail_cut": lambda m: m.where(m.x < -2.5, m.x * 0.0, m.y),
    "gelu_erf_in_bfloat16": lambda m: gelu_by(m, m.round_to(m.erf(m.x / math.sqrt(2.0)), "bfloat16")),
}
