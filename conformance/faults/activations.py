"""Bugs in activations (SPEC FFN-1, FFN-2)."""

from __future__ import annotations

import math
from typing import Any

from conformance.faults.fault import Fault, option, steps
from conformance.faults.operations import Array
from conformance.mutants.rewrites import FeedForward, GeluErf, GeluTanh
from conformance.mutants.surgery import Steps

ACTIVATION = "layers.0.feed_forward.activation"


def leaky(family: Steps, layer: Any, inner: Array) -> Array:
    """Let a hundredth of what is negative through."""
    return family.o.where(inner > 0.0, inner, inner * 0.01)


def bias_after(family: Steps, layer: Any, inner: Array) -> Array:
    """Add the bias to what the activation gives."""
    bias = family.o.bias(layer.inner)
    return layer.activation(inner - bias) + bias


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(**{"name": name, "group": "activations", "what": what, "variant": "bert", "first": (ACTIVATION,), **fields})


FAULTS = (
    mutant(
        "gelu_tanh_for_erf",
        "GELU is approximated with tanh, where the source uses erf.",
        cause="activation",
        change=option(activation="gelu_tanh"),
    ),
    mutant(
        "gelu_erf_for_tanh",
        "GELU is computed with erf, where the source approximates it.",
        variant="bert-pytorch",
        cause="activation",
        change=option(activation="gelu_erf"),
    ),
    mutant(
        "gelu_quick",
        "GELU is approximated as x sigmoid(1.702 x).",
        change=steps(GeluErf, run=lambda family, x: x * family.o.sigmoid(x * 1.702)),
    ),
    mutant(
        "gelu_without_root",
        "erf gets x instead of x / sqrt(2).",
        change=steps(GeluErf, run=lambda family, x: x * 0.5 * (family.o.erf(x) + 1.0)),
    ),
    mutant(
        "gelu_cubic_mistyped",
        "The cubic term has the factor 0.44715.",
        variant="bert-pytorch",
        change=steps(GeluTanh, cubic=lambda family: 0.44715),
    ),
    mutant("gelu_cubic_missing", "The cubic term is left out.", variant="bert-pytorch", change=steps(GeluTanh, cubic=lambda family: 0.0)),
    mutant(
        "gelu_inner_factor_squared",
        "tanh gets the factor 2/pi instead of its root.",
        variant="bert-pytorch",
        change=steps(GeluTanh, run=lambda family, x: x * 0.5 * (family.o.tanh((x + x * x * x * 0.044715) * (2 / math.pi)) + 1.0)),
    ),
    mutant("silu_for_gelu", "The activation is x sigmoid(x).", change=steps(GeluErf, run=lambda family, x: x * family.o.sigmoid(x))),
    mutant("relu_for_gelu", "The activation is a ReLU.", cause="activation", change=option(activation="relu")),
    mutant("gelu_for_relu", "The activation is a GELU.", variant="nndl-paddle", cause="activation", change=option(activation="gelu_erf")),
    mutant(
        "relu_leaky",
        "The ReLU lets a hundredth of what is negative through.",
        variant="vanilla-encoder",
        change=steps(FeedForward, activate=leaky),
    ),
    mutant(
        "relu_clipped_at_six",
        "The ReLU is one that stops at 6.",
        variant="vanilla-encoder",
        scenario="extreme",
        input="inputs beyond 6",
        alone=True,
        change=steps(FeedForward, activate=lambda family, layer, inner: family.o.relu(inner) - family.o.relu(inner - 6.0)),
    ),
    mutant(
        "activation_missing",
        "Nothing stands between the two linear layers.",
        variant="vanilla-encoder",
        change=steps(FeedForward, activate=lambda family, layer, inner: inner),
    ),
    mutant(
        "activation_twice",
        "The activation follows the second linear layer too.",
        first=("layers.0.feed_forward.outer",),
        change=steps(FeedForward, outer=lambda family, layer, active: layer.activation(layer.outer(active))),
    ),
    mutant(
        "activation_before_bias",
        "The bias of the first linear layer is added after the activation.",
        change=steps(FeedForward, activate=bias_after),
    ),
)
