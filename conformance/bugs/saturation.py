"""Bugs that show in the tails of a function, or where something saturates.

(SPEC FFN-2, ATT-5, HED-2, LOS-1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from concord.conformance.bugs.activations import gelu_by
from concord.conformance.bugs.bug import group, of_source
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.losses import clipped
from concord.conformance.bugs.operations import Array

ACTIVATION, WEIGHTS, SCORES = "*.feed_forward.activation", "*attention.weights", "*attention.scores"


def erf_by_series(m: Context, z: Array) -> Array:
    """Sum ten terms of erf's series, and cut off what leaves -1 to 1."""
    power, total = z, z
    for n in range(1, 11):
        power = power * z * z * (-1.0 / n)
        total = total + power * (1.0 / (2 * n + 1))
    return m.o.within(total * (2.0 / math.sqrt(math.pi)), -1.0, 1.0)


def tail(beyond: Callable[[Array], Array], made: Callable[[Array], Array]) -> Edit:
    """Return the tap with something else where what goes in is beyond a limit, made of that."""
    return lambda m, y: m.o.where(beyond(m.source()), made(m.source()), y)


def at_least(least: float) -> Edit:
    """Return the tap with a number where it is smaller."""
    return lambda m, y: m.o.where(y < least, y * 0.0 + least, y)


def at_most(most: float) -> Edit:
    """Return the tap with a number where it is larger."""
    return lambda m, y: m.o.where(y > most, y * 0.0 + most, y)


def soft_cap(cap: float) -> Edit:
    return lambda m, y: m.o.tanh(y / cap) * cap


def tanh_by_fraction(m: Context, y: Array) -> Array:
    """Approximate tanh by a fraction that leaves -1 to 1, and cut it off there."""
    x = m.o.within(m.source(), -3.0, 3.0)
    square = x * x
    return x * (square + 27.0) / (square * 9.0 + 27.0)


def clipped_weights(m: Context, y: Array) -> Array:
    """Keep weights at least 1e-6, and divide by their sum again."""
    least = at_least(1e-6)(m, y)
    return least / m.o.sum(least, 3)


bug = group("saturation").bug

BUGS = (
    bug(
        "relu_to_six",
        "The ReLU is one that saturates at 6.",
        at_most(6.0),
        ACTIVATION,
        variant="vanilla-encoder",
        scenario="extreme",
        input="activations beyond 6",
        cause="relu6 or clamped",
        source="MPolaris/onnx2tflite/issues/14",
    ),
    bug(
        "gelu_negative_tail_cut",
        "GELU is zero below -2.5.",
        tail(lambda x: x < -2.5, lambda x: x * 0.0),
        ACTIVATION,
        scenario="extreme",
        input="activations below -2.5",
        source="tenstorrent/tt-metal/issues/5578",
    ),
    bug(
        "gelu_positive_tail_straight",
        "GELU is x beyond 3.",
        tail(lambda x: x > 3.0, lambda x: x),
        ACTIVATION,
        scenario="extreme",
        input="activations beyond 3",
        source="tenstorrent/tt-metal/issues/20562",
    ),
    bug(
        "gelu_erf_by_series",
        "erf is summed up from ten terms of its series.",
        gelu_by(erf_by_series),
        ACTIVATION,
        scenario="extreme",
        input="activations beyond 3",
        source="sonos/tract/pull/2633",
    ),
    bug(
        "gelu_tanh_argument_cut",
        "The argument of tanh in GELU is kept within 2.",
        of_source(lambda m, x: m.gelu_tanh(x, tanh=lambda z: m.o.tanh(m.o.within(z, -2.0, 2.0)))),
        ACTIVATION,
        variant="bert-pytorch",
        scenario="extreme",
        input="activations beyond 2",
        source="pytorch/executorch/pull/22324",
    ),
    bug(
        "tanh_by_fraction",
        "tanh is approximated by a fraction and cut off at 3.",
        tanh_by_fraction,
        "pooler.output",
        source="sonos/tract/pull/2633",
    ),
    bug(
        "softmax_powers_cut",
        "Powers below e^-10 are taken for zero.",
        lambda m, y: m.softmax(lambda x: m.o.where(x < -10.0, x * 0.0, m.o.exp(x))),
        WEIGHTS,
        scenario="peaked",
        input="scores that differ by more than 10",
        source="openvinotoolkit/openvino/pull/37857",
    ),
    bug(
        "softmax_least_weight",
        "Weights are at least 1e-6.",
        clipped_weights,
        WEIGHTS,
        scenario="peaked",
        source="keras-team/keras/pull/1368",
    ),
    bug(
        "scores_soft_capped",
        "Scores are capped at 50 by a tanh.",
        soft_cap(50.0),
        SCORES,
        source="vllm-project/vllm-metal/issues/665",
    ),
    bug(
        "logits_soft_capped",
        "Logits are capped at 30 by a tanh.",
        soft_cap(30.0),
        "logits",
        source="unslothai/unsloth-zoo/pull/593",
    ),
    bug(
        "probabilities_clipped",
        "The loss is of probabilities between 1e-7 and 1 - 1e-7.",
        clipped(1e-7),
        "log_probabilities",
        scenario="extreme",
        input="logits that differ by more than 16",
        source="keras-team/keras/issues/17634",
    ),
    bug(
        "log_probabilities_cut",
        "Logarithms of probabilities are at least -20.",
        at_least(-20.0),
        "log_probabilities",
        scenario="extreme",
        input="logits that differ by more than 20",
        cause="clamped",
        source="keras-team/keras/issues/6338",
    ),
    bug(
        "losses_capped",
        "Losses are at most 10.",
        at_most(10.0),
        "losses",
        scenario="extreme",
        input="losses beyond 10",
        cause="clamped",
        source="keras-team/keras/issues/6983",
    ),
)
