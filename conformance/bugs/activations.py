"""Bugs in activations (SPEC FFN-1, FFN-2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from concord.conformance.bugs.bug import group, of_source, option, where
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array

GROUP = group("activations", "*.feed_forward.activation", clause="FFN-2")
bug, also = GROUP.bug, GROUP.also


def gelu(**constants: Any) -> Edit:
    """Return GELU with tanh, with other constants."""
    return of_source(lambda m, x: m.gelu_tanh(x, **constants))


def gelu_by(erf: Callable[[Context, Array], Array], root: float = math.sqrt(2.0)) -> Edit:
    """Return GELU with something else for erf, or another number for sqrt(2)."""
    return of_source(lambda m, x: x * 0.5 * (erf(m, x / root) + 1.0))


def gelu_of(root: float) -> Edit:
    return gelu_by(lambda m, z: m.o.erf(z), root)


def softplus(m: Context, x: Array) -> Array:
    """Return log(1 + exp(x)), without an exponential that overflows."""
    return m.o.relu(x) + m.o.log(m.o.exp(-m.o.abs(x)) + 1.0)


def leaky(slope: float) -> Edit:
    """Return a ReLU that lets some of what is negative through."""
    return of_source(lambda m, x: m.o.where(x > 0.0, x, x * slope))


def bias_after(m: Context, x: Array) -> Array:
    """Add the bias to what the activation gives."""
    bias = m.weight(f"{m.scope}.inner.bias")
    return m.activation(x - bias) + bias


BUGS = (
    bug(
        "gelu_tanh_for_erf",
        "GELU is approximated with tanh, where the source uses erf.",
        option(activation="gelu_tanh"),
        cause="activation",
    ),
    bug(
        "gelu_erf_for_tanh",
        "GELU is computed with erf, where the source approximates it.",
        option(activation="gelu_erf"),
        variant="bert-pytorch",
        cause="activation",
    ),
    bug("relu_for_gelu", "The activation is a ReLU.", option(activation="relu"), cause="activation"),
    bug(
        "gelu_for_relu",
        "The activation is a GELU.",
        option(activation="gelu_erf"),
        variant="nndl-paddle",
        cause="activation",
    ),
    bug(
        "gelu_quick",
        "GELU is approximated as x sigmoid(1.702 x).",
        of_source(lambda m, x: x * m.o.sigmoid(x * 1.702)),
        cause="quick_gelu",
    ),
    bug(
        "gelu_without_root",
        "erf gets x instead of x / sqrt(2).",
        gelu_of(1.0),
    ),
    bug(
        "gelu_cubic_mistyped",
        "The cubic term has the factor 0.44715.",
        gelu(cubic=0.44715),
        variant="bert-pytorch",
        cause="gelu_cubic_term",
    ),
    bug(
        "gelu_cubic_missing",
        "The cubic term is left out.",
        gelu(cubic=0.0),
        variant="bert-pytorch",
        cause="gelu_cubic_term",
    ),
    *(
        also("gelu_cubic_term", f"a GELU whose cubic term has the factor {cubic:g}", gelu(cubic=cubic))
        for cubic in (0.0044715, 0.044715**2, 0.04715, 0.0447)
    ),
    bug(
        "gelu_inner_factor_squared",
        "tanh gets the factor 2/pi instead of its root.",
        gelu(factor=2.0 / math.pi),
        variant="bert-pytorch",
        cause="gelu_inner_factor",
    ),
    *(
        also("gelu_inner_factor", f"a GELU whose tanh has the factor {text}", gelu(factor=factor))
        for factor, text in (
            (math.sqrt(math.pi / 2), "sqrt(pi / 2)"),
            (1.0, "1"),
            (math.sqrt(2) / math.pi, "sqrt(2) / pi"),
        )
    ),
    *(
        also(
            "gelu_inner_factor",
            f"a GELU whose tanh has the factor {factor}",
            where(gelu(factor=factor), activation="gelu_tanh"),
        )
        for factor in (0.8, 0.798, 0.7979, 0.79788, 0.797885)
    ),
    *(
        also(
            "gelu_root_of_few_digits",
            f"a GELU that divides by {root} instead of sqrt(2)",
            where(gelu_of(root), activation="gelu_erf"),
        )
        for root in (1.4, 1.41, 1.414, 1.4142, 1.41421, 1.414214)
    ),
    bug(
        "silu_for_gelu",
        "The activation is x sigmoid(x).",
        of_source(lambda m, x: x * m.o.sigmoid(x)),
        cause="silu",
    ),
    bug(
        "relu_leaky",
        "The ReLU lets a hundredth of what is negative through.",
        leaky(0.01),
        variant="vanilla-encoder",
        cause="leaky_relu",
    ),
    *(
        also("leaky_relu", f"a ReLU that lets {slope} of what is negative through", leaky(slope))
        for slope in (0.1, 0.2)
    ),
    also("elu", "an ELU", of_source(lambda m, x: m.o.where(x > 0.0, x, m.o.exp(-m.o.relu(-x)) - 1.0))),
    also("relu_squared", "the square of a ReLU", of_source(lambda m, x: m.o.relu(x) * m.o.relu(x))),
    also("mish", "Mish, x tanh(log(1 + exp(x)))", of_source(lambda m, x: x * m.o.tanh(softplus(m, x)))),
    also("softplus", "a softplus", of_source(softplus)),
    also("hard_swish", "x relu6(x + 3) / 6", of_source(lambda m, x: x * m.o.within(x + 3.0, 0.0, 6.0) / 6.0)),
    also("tanh_activation", "tanh", of_source(lambda m, x: m.o.tanh(x))),
    bug(
        "relu_clipped_at_six",
        "The ReLU is one that stops at 6.",
        where(of_source(lambda m, x: m.o.relu(x) - m.o.relu(x - 6.0)), activation="relu"),
        variant="vanilla-encoder",
        scenario="extreme",
        input="inputs beyond 6",
        alone=True,
        cause="relu6",
    ),
    bug(
        "activation_missing",
        "Nothing stands between the two linear layers.",
        of_source(lambda m, x: x),
        variant="vanilla-encoder",
        cause="no_activation",
    ),
    bug(
        "activation_twice",
        "The activation follows the second linear layer too.",
        lambda m, y: m.activation(y),
        "*.feed_forward.outer",
        clause="FFN-1",
    ),
    also(
        "activation_skipped",
        "what goes into the activation instead of what comes out of it",
        lambda m, y: m.linear(m.tap, m.now[f"{m.scope}.inner"]),
        "*.feed_forward.outer",
    ),
    bug(
        "activation_before_bias",
        "The bias of the first linear layer is added after the activation.",
        of_source(bias_after),
        clause="FFN-1",
    ),
)
