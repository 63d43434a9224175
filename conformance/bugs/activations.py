"""Bugs in activations (SPEC FFN-1, FFN-2)."""

from __future__ import annotations

import math
from typing import Any

from concord.conformance.bugs.bug import Changes, of_source, where
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array


def gelu(**constants: Any) -> Edit:
    """Return GELU with tanh, with other constants."""
    return of_source(lambda m, x: m.gelu_tanh(x, **constants))


def gelu_cubic(factor: float) -> Edit:
    return gelu(cubic=factor)


def gelu_by(erf: Edit, root: float = math.sqrt(2.0)) -> Edit:
    """Return GELU with something else for erf, or another number for sqrt(2)."""
    return of_source(lambda m, x: x * 0.5 * (erf(m, x / root) + 1.0))


def gelu_of(root: float) -> Edit:
    return gelu_by(lambda m, z: m.erf(z), root)


def softplus(m: Context, x: Array) -> Array:
    """Return log(1 + exp(x)), without an exponential that overflows."""
    return m.relu(x) + m.log(m.exp(-m.abs(x)) + 1.0)


def leaky(slope: float) -> Edit:
    """Return a ReLU that lets some of what is negative through."""
    return of_source(lambda m, x: m.where(x > 0.0, x, x * slope))


def bias_after(m: Context, x: Array) -> Array:
    """Add the bias to what the activation gives."""
    bias = m.weight(f"{m.scope}.inner.bias")
    return m.activation(x - bias) + bias


EDITS: Changes = {
    "gelu_quick": of_source(lambda m, x: x * m.sigmoid(x * 1.702)),
    "gelu_inner_factor_squared": gelu(factor=2.0 / math.pi),
    "gelu_inner_factor": {
        "sqrt(pi / 2)": gelu(factor=math.sqrt(math.pi / 2)),
        "1": gelu(factor=1.0),
        "sqrt(2) / pi": gelu(factor=math.sqrt(2) / math.pi),
        **{
            f"{factor}": where(gelu(factor=factor), activation="gelu_tanh")
            for factor in (0.8, 0.798, 0.7979, 0.79788, 0.797885)
        },
    },
    "silu_for_gelu": of_source(lambda m, x: x * m.sigmoid(x)),
    "elu": of_source(lambda m, x: m.where(x > 0.0, x, m.exp(-m.relu(-x)) - 1.0)),
    "relu_squared": of_source(lambda m, x: m.relu(x) * m.relu(x)),
    "mish": of_source(lambda m, x: x * m.tanh(softplus(m, x))),
    "softplus": of_source(softplus),
    "hard_swish": of_source(lambda m, x: x * m.within(x + 3.0, 0.0, 6.0) / 6.0),
    "relu_clipped_at_six": of_source(lambda m, x: m.relu(x) - m.relu(x - 6.0)),
    "activation_skipped": lambda m, y: m.linear(m.tap, m.now[f"{m.scope}.inner"]),
    "activation_before_bias": of_source(bias_after),
}
