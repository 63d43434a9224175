"""Bugs that show in the tails of a function, or where something saturates.

(SPEC FFN-2, ATT-5, HED-2, LOS-1).
"""

from __future__ import annotations

import math

from concord.conformance.bugs.bug import group
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array

ACTIVATION, WEIGHTS, SCORES = "*.feed_forward.activation", "*attention.weights", "*attention.scores"


def relu_to_six(m: Context, y: Array) -> Array:
    return m.o.where(y > 6.0, y * 0.0 + 6.0, y)


def negative_tail_cut(m: Context, y: Array) -> Array:
    return m.o.where(m.source() < -2.5, y * 0.0, y)


def positive_tail_straight(m: Context, y: Array) -> Array:
    x = m.source()
    return m.o.where(x > 3.0, x, y)


def erf_by_series(m: Context, y: Array) -> Array:
    """Sum ten terms of erf's series, and cut off what leaves -1 to 1."""
    x = m.source()
    z = x / math.sqrt(2.0)
    power, total = z, z
    for n in range(1, 11):
        power = power * z * z * (-1.0 / n)
        total = total + power * (1.0 / (2 * n + 1))
    return x * 0.5 * (m.o.within(total * (2.0 / math.sqrt(math.pi)), -1.0, 1.0) + 1.0)


def tanh_argument_cut(m: Context, y: Array) -> Array:
    x = m.source()
    inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (m.o.tanh(m.o.within(inner, -2.0, 2.0)) + 1.0)


def tanh_by_fraction(m: Context, y: Array) -> Array:
    """Approximate tanh by a fraction that leaves -1 to 1, and cut it off there."""
    x = m.o.within(m.source(), -3.0, 3.0)
    square = x * x
    return x * (square + 27.0) / (square * 9.0 + 27.0)


def exponential_cut(m: Context, y: Array) -> Array:
    """Take powers below e^-10 for zero."""
    scores = m.unnormalised
    shifted = scores - m.o.max(scores, 3)
    powers = m.o.where(shifted < -10.0, shifted * 0.0, m.o.exp(shifted))
    return powers / m.o.sum(powers, 3)


def soft_cap(cap: float) -> Edit:
    return lambda m, y: m.o.tanh(y / cap) * cap


def clipped_weights(m: Context, y: Array) -> Array:
    """Keep weights at least 1e-6, and divide by their sum again."""
    least = m.o.where(y < 1e-6, y * 0.0 + 1e-6, y)
    return least / m.o.sum(least, 3)


def keras_clip(m: Context, y: Array) -> Array:
    """Take the logarithm of probabilities that are kept between 1e-7 and 1 - 1e-7."""
    shares = m.o.softmax(m.source(), -1)
    return m.o.log(m.o.within(shares, 1e-7, 1.0 - 1e-7))


def gap_cut(m: Context, y: Array) -> Array:
    return m.o.where(y < -20.0, y * 0.0 - 20.0, y)


def losses_capped(m: Context, y: Array) -> Array:
    return m.o.where(y > 10.0, y * 0.0 + 10.0, y)


bug = group("saturation").bug

BUGS = (
    bug(
        "relu_to_six",
        "The ReLU is one that saturates at 6.",
        relu_to_six,
        ACTIVATION,
        clause="FFN-2",
        variant="vanilla-encoder",
        scenario="extreme",
        input="activations beyond 6",
        cause="relu6 or clamped",
        source="MPolaris/onnx2tflite/issues/14",
    ),
    bug(
        "gelu_negative_tail_cut",
        "GELU is zero below -2.5.",
        negative_tail_cut,
        ACTIVATION,
        clause="FFN-2",
        scenario="extreme",
        input="activations below -2.5",
        source="tenstorrent/tt-metal/issues/5578",
    ),
    bug(
        "gelu_positive_tail_straight",
        "GELU is x beyond 3.",
        positive_tail_straight,
        ACTIVATION,
        clause="FFN-2",
        scenario="extreme",
        input="activations beyond 3",
        source="tenstorrent/tt-metal/issues/20562",
    ),
    bug(
        "gelu_erf_by_series",
        "erf is summed up from ten terms of its series.",
        erf_by_series,
        ACTIVATION,
        clause="FFN-2",
        scenario="extreme",
        input="activations beyond 3",
        source="sonos/tract/pull/2633",
    ),
    bug(
        "gelu_tanh_argument_cut",
        "The argument of tanh in GELU is kept within 2.",
        tanh_argument_cut,
        ACTIVATION,
        clause="FFN-2",
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
        clause="HED-2",
        source="sonos/tract/pull/2633",
    ),
    bug(
        "softmax_powers_cut",
        "Powers below e^-10 are taken for zero.",
        exponential_cut,
        WEIGHTS,
        clause="ATT-5",
        scenario="peaked",
        input="scores that differ by more than 10",
        source="openvinotoolkit/openvino/pull/37857",
    ),
    bug(
        "softmax_least_weight",
        "Weights are at least 1e-6.",
        clipped_weights,
        WEIGHTS,
        clause="ATT-5",
        scenario="peaked",
        source="keras-team/keras/pull/1368",
    ),
    bug(
        "scores_soft_capped",
        "Scores are capped at 50 by a tanh.",
        soft_cap(50.0),
        SCORES,
        clause="ATT-4",
        source="vllm-project/vllm-metal/issues/665",
    ),
    bug(
        "logits_soft_capped",
        "Logits are capped at 30 by a tanh.",
        soft_cap(30.0),
        "logits",
        clause="HED-3",
        source="unslothai/unsloth-zoo/pull/593",
    ),
    bug(
        "probabilities_clipped",
        "The loss is of probabilities between 1e-7 and 1 - 1e-7.",
        keras_clip,
        "log_probabilities",
        clause="LOS-1",
        scenario="extreme",
        input="logits that differ by more than 16",
        source="keras-team/keras/issues/17634",
    ),
    bug(
        "log_probabilities_cut",
        "Logarithms of probabilities are at least -20.",
        gap_cut,
        "log_probabilities",
        clause="LOS-1",
        scenario="extreme",
        input="logits that differ by more than 20",
        cause="clamped",
        source="keras-team/keras/issues/6338",
    ),
    bug(
        "losses_capped",
        "Losses are at most 10.",
        losses_capped,
        "losses",
        clause="LOS-1",
        scenario="extreme",
        input="losses beyond 10",
        cause="clamped",
        source="keras-team/keras/issues/6983",
    ),
)
