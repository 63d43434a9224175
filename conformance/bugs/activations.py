"""Bugs in activations (SPEC FFN-1, FFN-2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from concord.conformance.bugs.bug import Bug, Change, edited, option
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array

ACTIVATION = "layers.0.feed_forward.activation"


def instead(function: Callable[[Context, Array], Array]) -> Change:
    """Return the change to another function of what goes into the activation."""
    return edited(lambda m, y: function(m, m.source()), "*.feed_forward.activation")


def leaky(m: Context, x: Array) -> Array:
    """Let a hundredth of what is negative through."""
    return m.o.where(x > 0.0, x, x * 0.01)


def bias_after(m: Context, x: Array) -> Array:
    """Add the bias to what the activation gives."""
    bias = m.weight(f"{m.scope}.inner.bias")
    return m.activation(x - bias) + bias


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{
            "name": name,
            "group": "activations",
            "what": what,
            "variant": "bert",
            "first": (ACTIVATION,),
            **fields,
        }
    )


BUGS = (
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
        change=instead(lambda m, x: x * m.o.sigmoid(x * 1.702)),
        cause="quick_gelu",
        clause="FFN-2",
    ),
    mutant(
        "gelu_without_root",
        "erf gets x instead of x / sqrt(2).",
        change=instead(lambda m, x: x * 0.5 * (m.o.erf(x) + 1.0)),
        cause="gelu_without_root",
        clause="FFN-2",
    ),
    mutant(
        "gelu_cubic_mistyped",
        "The cubic term has the factor 0.44715.",
        variant="bert-pytorch",
        change=instead(lambda m, x: m.gelu_tanh(x, cubic=0.44715)),
        cause="gelu_cubic_term",
        clause="FFN-2",
    ),
    mutant(
        "gelu_cubic_missing",
        "The cubic term is left out.",
        variant="bert-pytorch",
        change=instead(lambda m, x: m.gelu_tanh(x, cubic=0.0)),
        cause="gelu_cubic_term",
        clause="FFN-2",
    ),
    mutant(
        "gelu_inner_factor_squared",
        "tanh gets the factor 2/pi instead of its root.",
        variant="bert-pytorch",
        change=instead(lambda m, x: m.gelu_tanh(x, factor=2.0 / math.pi)),
        cause="gelu_inner_factor",
        clause="FFN-2",
    ),
    mutant(
        "silu_for_gelu",
        "The activation is x sigmoid(x).",
        change=instead(lambda m, x: x * m.o.sigmoid(x)),
        cause="silu",
        clause="FFN-2",
    ),
    mutant(
        "relu_for_gelu", "The activation is a ReLU.", cause="activation", change=option(activation="relu")
    ),
    mutant(
        "gelu_for_relu",
        "The activation is a GELU.",
        variant="nndl-paddle",
        cause="activation",
        change=option(activation="gelu_erf"),
    ),
    mutant(
        "relu_leaky",
        "The ReLU lets a hundredth of what is negative through.",
        variant="vanilla-encoder",
        change=instead(leaky),
        cause="leaky_relu",
        clause="FFN-2",
    ),
    mutant(
        "relu_clipped_at_six",
        "The ReLU is one that stops at 6.",
        variant="vanilla-encoder",
        scenario="extreme",
        input="inputs beyond 6",
        alone=True,
        change=instead(lambda m, x: m.o.relu(x) - m.o.relu(x - 6.0)),
        cause="relu6",
        clause="FFN-2",
    ),
    mutant(
        "activation_missing",
        "Nothing stands between the two linear layers.",
        variant="vanilla-encoder",
        change=instead(lambda m, x: x),
        cause="no_activation",
        clause="FFN-2",
    ),
    mutant(
        "activation_twice",
        "The activation follows the second linear layer too.",
        first=("layers.0.feed_forward.outer",),
        change=edited(lambda m, y: m.activation(y), "*.feed_forward.outer"),
        cause="activation_twice",
        clause="FFN-1",
    ),
    mutant(
        "activation_before_bias",
        "The bias of the first linear layer is added after the activation.",
        change=instead(bias_after),
        cause="activation_before_bias",
        clause="FFN-1",
    ),
)
