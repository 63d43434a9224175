"""Numbers of a step that nobody would guess, each fitted to what was delivered (SPEC: the clause of each)."""

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
from concord.conformance.bugs.loss import smoothed
from concord.conformance.bugs.norms import NORMS, RESIDUALS, result
from concord.conformance.bugs.positions import table_of
from concord.conformance.bugs.precision import LINEAR
from concord.conformance.explain.description import FEW, wrong_elements
from concord.conformance.explain.fitting import fitted, shortest
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.explain.question import Question
from concord.conformance.wording import instead, multiple
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig


@dataclass(frozen=True)
class Number:
    """A number of a step.

    Attributes:
        taps: patterns of the taps that show it.
        clause: that another number breaks.
        text: what another number would be, in words that follow "is explained by".
        right: what it is, None where the model has none; with ``nowhere``, where the search for it begins.
        edit: the tap with another number.
        nowhere: whether only a wrong step has it.
        activation: the only one that has it.
    """

    taps: tuple[str, ...]
    clause: str
    text: str
    right: Callable[[EncoderConfig], float | None]
    edit: Callable[[Context, float], Any]
    nowhere: bool = False
    activation: str = ""


def _times(m: Context, factor: float) -> Any:
    return m.y * factor


def _part(name: str) -> Callable[[Context, float], Any]:
    return lambda m, share: m.y + m.beside(name) * (share - 1.0)


def _bias(m: Context, share: float) -> Any:
    more = m.weight(f"{parameters_of(m.tap)}.bias") * (share - 1.0)
    return m.y + (m.reshape(more, tuple(m.y.shape)[2:]) if fits(m.tap, PROJECTIONS) else more)


def _mean(m: Context, more: float) -> Any:
    count = m.real.sum(1)[:, None]
    return m.y * m.constant(count / np.maximum(count + more, 1.0 / m.size(d_model=1)), m.y)


def _count(config: EncoderConfig) -> float:
    return float(config.d_model - (config.norm_variance == "unbiased"))


def _one(_: EncoderConfig) -> float:
    return 1.0


def _none(_: EncoderConfig) -> float:
    return 0.0


ACTIVATION = ("*.feed_forward.activation",)

MASKED = ("*.masked_scores",)

KNOWN = (
    Number(("embeddings.token",), "EMB-2", "token vectors that are multiplied by {} besides", _one, _times),
    *(
        Number(("embeddings.sum",), "EMB-6", f"{part} vectors that are multiplied by {{}}", _one, _part(part))
        for part in ("token", "position", "segment")
    ),
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
        "scores that are divided by {}",
        lambda config: math.sqrt(config.head_dim),
        lambda m, divisor: m.scores(divisor=divisor),
    ),
    Number(
        MASKED,
        "MSK-3",
        "scores of masked keys that are multiplied by {}",
        _one,
        lambda m, factor: m.where(m.visible, m.y, m.beside("scores") * factor),
        nowhere=True,
    ),
    Number(
        (WEIGHTS,),
        "ATT-5",
        "a softmax of scores that are divided by {}",
        _one,
        lambda m, by: m.softmax(m.unnormalised / by, 3),
    ),
    Number(
        (WEIGHTS,),
        "ATT-5",
        "a softmax that adds {} to its sum",
        _none,
        lambda m, more: m.softmax_by(total=lambda total: total + more),
    ),
    Number(
        NORMS,
        "NRM-4",
        "a variance that is divided by {}",
        _count,
        lambda m, count: m.norm(m.x, variance=lambda variance: variance * (_count(m.config) / count)),
    ),
    Number(
        NORMS,
        "NRM-2",
        "an offset that is multiplied by {}",
        _one,
        lambda m, share: m.norm(m.x, offset=lambda offset: offset * share),
    ),
    Number(
        RESIDUALS,
        "RES-1",
        "a residual that is multiplied by {}",
        _one,
        lambda m, share: m.y + m.x * (share - 1.0),
    ),
    Number(
        RESIDUALS,
        "RES-1",
        "a sublayer that is multiplied by {}",
        _one,
        lambda m, share: m.y + result(m) * (share - 1.0),
    ),
    Number(LINEAR, "WGT-2", "a bias that is multiplied by {}", _one, _bias),
    Number(
        ACTIVATION,
        "FFN-2",
        "a GELU that divides by {}",
        lambda _: math.sqrt(2.0),
        gelu_of,
        activation="gelu_erf",
    ),
    Number(
        ACTIVATION,
        "FFN-2",
        "x sigmoid({} x)",
        lambda _: 1.7,
        lambda m, by: m.x * m.sigmoid(m.x * by),
        nowhere=True,
    ),
    Number(
        ACTIVATION,
        "FFN-2",
        "a GELU whose cubic term has the factor {}",
        lambda _: 0.044715,
        lambda m, cubic: gelu(m, cubic=cubic),
        activation="gelu_tanh",
    ),
    Number(
        ACTIVATION,
        "FFN-2",
        "a GELU whose tanh has the factor {}",
        lambda _: math.sqrt(2 / math.pi),
        lambda m, factor: gelu(m, factor=factor),
        activation="gelu_tanh",
    ),
    Number(
        ACTIVATION,
        "FFN-2",
        "a ReLU that lets {} of what is negative through",
        _none,
        leaky,
        activation="relu",
    ),
    Number(
        ACTIVATION,
        "FFN-2",
        "a ReLU that begins at {}",
        _none,
        lambda m, start: m.relu(m.x - start),
        activation="relu",
    ),
    Number(("pooling",), "HED-1", "a mean that adds {} to the number of tokens", _none, _mean),
    Number(
        ("pooler.output",),
        "HED-2",
        "a tanh of {} times what goes in",
        _one,
        lambda m, factor: m.tanh(m.x * factor),
    ),
    Number(("logits",), "HED-3", "logits that are multiplied by {}", _one, _times),
    Number(
        ("log_probabilities",),
        "LOS-1",
        "a softmax of logits that are divided by {}",
        _one,
        lambda m, by: m.log_softmax(m.x / by, 1),
    ),
    Number(("losses",), "LOS-1", "labels that are smoothed by {}", _none, smoothed),
    Number(("losses",), "LOS-1", "losses that are multiplied by {}", _one, _times),
    Number(("normalized",), "HED-5", "a vector that is multiplied by {} besides", _one, _times),
)
"""The numbers of every step."""


def of_numbers(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield the number that a step must have had, of each of its numbers."""
    config = question.config
    known = np.isfinite(question.right.value) & (question.right.sigma > 0) & np.isfinite(question.right.sigma)
    # The spacing of a mask constant would hide all else.
    scale = 1.0 if question.is_tap(MASKED) else question.right.sigma[known]
    if wrong_elements(question).sum() < FEW:  # one number makes a few of them whatever one likes
        return
    for number in KNOWN:
        right = number.right(config)
        if right is None or not fits(tap, number.taps) or number.activation not in ("", config.activation):
            continue

        def named(value: float, number: Number = number, right: float = right) -> Hypothesis:
            words = multiple(value) if right in (0.0, 1.0) or number.nowhere else instead(value, right)
            change = Change(taps=(tap,), edit=lambda m: number.edit(m, value))
            return Hypothesis("number", number.text.format(words), number.clause, change=change, rare=True)

        def left(values: Array, named: Callable[[float], Hypothesis] = named) -> Array:
            return ((question.actual - question.values(named(float(values[0]))))[known] / scale).reshape(-1)

        with contextlib.suppress(*INAPPLICABLE):
            yield named(shortest(left, *fitted(left, right)))
