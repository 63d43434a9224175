"""Constants of each step, fitted to the tensor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from concord.conformance.bugs.activations import gelu, gelu_of, leaky
from concord.conformance.bugs.attention import PROJECTIONS, SCORES, WEIGHTS
from concord.conformance.bugs.bug import Change, fits
from concord.conformance.bugs.context import Context, parameters_of
from concord.conformance.bugs.lookups import table_of
from concord.conformance.bugs.loss import smoothed
from concord.conformance.bugs.norms import NORMS, RESIDUALS, result
from concord.conformance.bugs.rounding import LINEAR
from concord.conformance.explain.fitting import fitted, shortest
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.explain.question import Question
from concord.conformance.wording import instead_of, multiple
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig


@dataclass(frozen=True)
class Number:
    """A constant of a step.

    Attributes:
        text: words after "is explained by".
        right: the correct value; None if the model has no such constant.
        activation: the only activation with this constant; empty for any.
    """

    taps: tuple[str, ...]
    clause: str
    text: str
    right: float | Callable[[EncoderConfig], float | None]
    edit: Callable[[Context, float], Any]
    activation: str = ""


def _times(m: Context, factor: float) -> Any:
    return m.y * factor


def _part(name: str) -> Number:
    text = f"{name} vectors multiplied by {{}}"
    return Number(
        ("embeddings.sum",), "EMB-6", text, 1.0, lambda m, share: m.y + m.beside(name) * (share - 1.0)
    )


def _bias(m: Context, share: float) -> Any:
    more = m.weight(f"{parameters_of(m.tap)}.bias") * (share - 1.0)
    return m.y + (m.reshape(more, tuple(m.y.shape)[2:]) if fits(m.tap, PROJECTIONS) else more)


def _mean(m: Context, more: float) -> Any:
    count = m.real.sum(1)[:, None]
    return m.y * m.constant(count / np.maximum(count + more, 1.0 / m.size(d_model=1)), m.y)


def _count(config: EncoderConfig) -> float:
    return float(config.d_model - (config.norm_variance == "unbiased"))


def _variance(m: Context, count: float) -> Any:
    return m.norm(m.x, variance=lambda variance: variance * (_count(m.config) / count))


ACTIVATION, MASKED = ("*.feed_forward.activation",), ("*.masked_scores",)
CUBIC, INNER = 0.044715, math.sqrt(2 / math.pi)
ERF, TANH, RELU = "gelu_erf", "gelu_tanh", "relu"

KNOWN = (
    Number(("embeddings.token",), "EMB-2", "token vectors with an extra factor of {}", 1.0, _times),
    *map(_part, ("token", "position", "segment")),
    Number(
        ("embeddings.position",),
        "POS-4",
        "a base of {} for the wavelengths",
        lambda config: config.position_base,
        lambda m, base: table_of(m, position_base=base),
    ),
    Number(
        (SCORES,),
        "ATT-4",
        "scores divided by {}",
        lambda config: math.sqrt(config.head_dim),
        lambda m, divisor: m.scores(divisor=divisor),
    ),
    Number(
        MASKED,
        "MSK-3",
        "scores of masked keys multiplied by {}",
        1.0,
        lambda m, factor: m.where(m.visible, m.y, m.beside("scores") * factor),
    ),
    *(
        Number((WEIGHTS,), "ATT-5", text, right, edit)
        for text, right, edit in (
            ("a softmax of scores divided by {}", 1.0, lambda m, by: m.softmax(m.unnormalised / by, 3)),
            (
                "a softmax that adds {} to its sum",
                0.0,
                lambda m, more: m.softmax_by(total=lambda sum: sum + more),
            ),
        )
    ),
    Number(NORMS, "NRM-4", "a variance divided by {}", _count, _variance),
    Number(
        NORMS,
        "NRM-2",
        "an offset multiplied by {}",
        1.0,
        lambda m, share: m.norm(m.x, offset=lambda offset: offset * share),
    ),
    Number(
        NORMS, "NRM-2", "{} added to a gain", 0.0, lambda m, more: m.norm(m.x, gain=lambda gain: gain + more)
    ),
    *(
        Number(RESIDUALS, "RES-1", text, 1.0, edit)
        for text, edit in (
            ("a residual multiplied by {}", lambda m, share: m.y + m.x * (share - 1.0)),
            ("a sublayer multiplied by {}", lambda m, share: m.y + result(m) * (share - 1.0)),
        )
    ),
    Number(LINEAR, "WGT-2", "a bias multiplied by {}", 1.0, _bias),
    *(
        Number(ACTIVATION, "FFN-2", text, right, edit, activation)
        for text, right, edit, activation in (
            ("a GELU that divides by {}", math.sqrt(2.0), gelu_of, ERF),
            ("x sigmoid({} x)", 1.0, lambda m, by: m.x * m.sigmoid(m.x * by), ""),
            ("a GELU whose cubic term has the factor {}", CUBIC, lambda m, cubic: gelu(m, cubic=cubic), TANH),
            ("a GELU whose tanh has the factor {}", INNER, lambda m, factor: gelu(m, factor=factor), TANH),
            ("a ReLU that passes {} of its negative inputs", 0.0, leaky, RELU),
            ("a ReLU that starts at {}", 0.0, lambda m, start: m.relu(m.x - start), RELU),
        )
    ),
    Number(("pooling",), "HED-1", "a mean that adds {} to the number of tokens", 0.0, _mean),
    Number(("pooler.output",), "HED-2", "a tanh of {} times its input", 1.0, lambda m, by: m.tanh(m.x * by)),
    Number(("logits",), "HED-3", "logits multiplied by {}", 1.0, _times),
    Number(
        ("log_probabilities",),
        "LOS-1",
        "a softmax of logits divided by {}",
        1.0,
        lambda m, by: m.log_softmax(m.x / by, 1),
    ),
    Number(("losses",), "LOS-1", "labels smoothed by {}", 0.0, smoothed),
    Number(("losses",), "LOS-1", "losses multiplied by {}", 1.0, _times),
    Number(("normalized",), "HED-5", "a vector with an extra factor of {}", 1.0, _times),
)


def of_numbers(question: Question, tap: str) -> Iterator[Hypothesis]:
    config = question.config
    finite = (
        np.isfinite(question.right.value) & (question.right.sigma > 0) & np.isfinite(question.right.sigma)
    )
    # No weighting by sigma: a mask constant's spacing is so wide that hidden scores would have no weight.
    scale = 1.0 if question.is_tap(MASKED) else question.right.sigma[finite]
    for number in KNOWN:
        right = number.right(config) if callable(number.right) else number.right
        if right is None or not fits(tap, number.taps) or number.activation not in ("", config.activation):
            continue

        def named(value: float, number: Number = number, right: float = right) -> Hypothesis:
            words = multiple(value) if right in (0.0, 1.0) else instead_of(value, right)
            change = Change(taps=(tap,), edit=lambda m: number.edit(m, value))
            return Hypothesis("number", number.text.format(words), number.clause, change=change, rare=True)

        def left(values: Array, named: Callable[[float], Hypothesis] = named) -> Array:
            return ((question.actual - question.values(named(float(values[0]))))[finite] / scale).reshape(-1)

        with contextlib.suppress(*INAPPLICABLE):
            yield named(shortest(left, *fitted(left, right)))
