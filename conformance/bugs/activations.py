"""Bugs in activations (SPEC FFN-1, FFN-2)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from concord.conformance.bugs.bug import Edits, where
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array


def gelu(m: Context, **constants: Any) -> Array:
    """Return GELU with tanh, with other constants."""
    return m.gelu_tanh(m.x, **constants)


def gelu_cubic(m: Context, factor: float) -> Array:
    return gelu(m, cubic=factor)


def gelu_by(m: Context, erf: Array) -> Array:
    """Return GELU with something else for erf."""
    return m.x * 0.5 * (erf + 1.0)


def gelu_of(m: Context, root: float) -> Array:
    """Return GELU with another number for sqrt(2)."""
    return gelu_by(m, m.erf(m.x / root))


def softplus(m: Context) -> Array:
    """Return log(1 + exp(x)), without an exponential that overflows."""
    return m.relu(m.x) + m.log(m.exp(-m.abs(m.x)) + 1.0)


def leaky(m: Context, slope: float) -> Array:
    """Return a ReLU that lets some of what is negative through."""
    return m.where(m.x > 0.0, m.x, m.x * slope)


def activation_before_bias(m: Context) -> Array:
    """Add the bias to what the activation gives."""
    bias = m.weight(f"{m.scope}.inner.bias")
    return m.activation(m.x - bias) + bias


EDITS: Edits = {
    "gelu_quick": lambda m: m.x * m.sigmoid(m.x * 1.702),
    "gelu_inner_factor_squared": partial(gelu, factor=2.0 / math.pi),
    "gelu_inner_factor": {
        "sqrt(pi / 2)": partial(gelu, factor=math.sqrt(math.pi / 2)),
        "1": partial(gelu, factor=1.0),
        "sqrt(2) / pi": partial(gelu, factor=math.sqrt(2) / math.pi),
        **{
            f"{factor}": where(partial(gelu, factor=factor), activation="gelu_tanh")
            for factor in (0.8, 0.798, 0.7979, 0.79788, 0.797885)
        },
    },
    "silu_for_gelu": lambda m: m.x * m.sigmoid(m.x),
    "elu": lambda m: m.where(m.x > 0.0, m.x, m.exp(-m.relu(-m.x)) - 1.0),
    "relu_squared": lambda m: m.relu(m.x) * m.relu(m.x),
    "mish": lambda m: m.x * m.tanh(softplus(m)),
    "hard_swish": lambda m: m.x * m.within(m.x + 3.0, 0.0, 6.0) / 6.0,
    "relu_clipped_at_six": lambda m: m.relu(m.x) - m.relu(m.x - 6.0),
    "activation_skipped": lambda m: m.linear(m.tap, m.now[f"{m.scope}.inner"]),
}
