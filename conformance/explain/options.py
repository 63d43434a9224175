"""Which option would explain a tensor: other values of configuration fields (SPEC: the clause of each)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.bug import fits
from concord.conformance.bugs.norms import NORMS, RESIDUALS
from concord.conformance.explain.fitting import power
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis, options
from concord.conformance.explain.question import Question
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig
from concord.spec.masks import visible_keys
from concord.spec.tensors import OF_IDS

EPSILONS = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
RARE_EPSILONS = tuple(factor * epsilon for epsilon in EPSILONS for factor in (2.0, 5.0))
LOWEST = -3.4028234663852886e38
CONSTANTS = (
    *(-1e4, -1e5, -1e6, -1e9, -1e10, -1e12, -4294967295.0, -4294967296.0),
    *(-65504.0, -1e30, -100.0, -1000.0, LOWEST),
)
BY_IDS = (*OF_IDS, "stack")

Choice = tuple[tuple[str, ...], str, Sequence[Any], str]

PLACEMENT = ("norm_placement", ("post", "pre"), "NRM-1")
CHOICES: tuple[Choice, ...] = (
    (("embeddings.token",), "embedding_scale", ("one", "sqrt_d_model"), "EMB-2"),
    (NORMS, "norm_epsilon", EPSILONS, "NRM-2"),
    (NORMS, "norm_epsilon_placement", ("inside", "outside"), "NRM-3"),
    (NORMS, "norm_variance", ("biased", "unbiased"), "NRM-4"),
    ((*RESIDUALS, "*.norm1", "*.norm2", *PROJECTIONS, "*.feed_forward.inner"), *PLACEMENT),
    (PROJECTIONS, "qkv_activation", ("none", "relu"), "ATT-1"),
    (("*.masked_scores",), "mask_value", CONSTANTS, "MSK-2"),
    (("*.masked_weights",), "mask_value", CONSTANTS, "MSK-8"),
    (("*.masked_scores",), "mask_fill", ("replace", "add"), "MSK-3"),
    (("*.masked_scores",), "mask_assignment", ("per_sample", "batch_major"), "MSK-7"),
    (("*.context",), "query_mask", ("none", "overwrite"), "MSK-8"),
    (("*.feed_forward.activation",), "activation", ("relu", "gelu_erf", "gelu_tanh"), "FFN-2"),
    (("normalized",), "length_epsilon", EPSILONS[:-2], "HED-5"),
)
"""The taps (patterns) that show it, the field, its values and the clause."""

DIFFERENTIATED = (
    "norm_epsilon",
    "norm_epsilon_placement",
    "norm_variance",
    "qkv_activation",
    "mask_fill",
    "activation",
)
"""Fields that a derivative may have another value of."""


def of_options(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield the options that may be others at a tap."""
    config = question.config
    for taps, name, values, clause in CHOICES:
        if fits(tap, taps):
            yield from options(config, name, values, clause)
    if fits(tap, NORMS):
        for hypothesis in options(config, "norm_epsilon", RARE_EPSILONS, "NRM-2"):
            yield dataclasses.replace(hypothesis, rare=True)
    if tap == "embeddings.token":
        yield from _of_padding_vector(question)
    if fits(tap, ("*.masked_scores", "*.masked_weights")) and question.case.part in BY_IDS:
        # One that does not occur would mask nothing.
        yield from options(config, "pad_id", sorted(_occurring(question) & {0, 1, 2, 3}), "MSK-1")
    if tap == "loss" and question.case.part == "model":
        yield from _of_loss(config, (0.1, 0.01, 0.001, 1e-4))


def _occurring(question: Question) -> set[int]:
    return set(question.case.batch.required("input_ids").reshape(-1).tolist())


def _of_padding_vector(question: Question) -> Iterator[Hypothesis]:
    config, occurring = question.config, _occurring(question)
    row = config.pad_id if config.token_padding_row is None else config.token_padding_row
    yield from options(config, "token_padding_forward", ("stored", "zero"), "EMB-3", token_padding_row=row)
    others = sorted(occurring & {0, 1, 2, 3} - {row})
    yield from options(config, "token_padding_row", others, "EMB-3", token_padding_forward="zero")


def _of_loss(config: EncoderConfig, others: tuple[float, ...] = ()) -> Iterator[Hypothesis]:
    classes = range(config.num_classes if config.num_classes > 1 else 0)
    yield from options(config, "ignore_label", (None, *classes), "LOS-3")
    weight = config.l2_weight
    yield from options(config, "l2_weight", (0.0, 2 * weight, 0.5 * weight, *others), "LOS-4")


def of_derivatives(question: Question) -> Iterator[Hypothesis]:
    """Yield options that a derivative may have other values of."""
    config = question.config
    for _, name, values, clause in CHOICES:
        if name in DIFFERENTIATED:
            yield from options(config, name, values, clause)
    if question.case.part == "model":
        yield from _of_loss(config)
    table = str(question.parameter).removesuffix(".weight")
    rows = (None, *sorted({0, 1, config.pad_id}))
    segments = (None, *range(config.num_segments or 0))
    for tap, name, values, clause in (
        ("embeddings.token", "token_padding_row", rows, "EMB-4"),
        ("embeddings.position", "position_padding_row", rows, "POS-7"),
        ("embeddings.segment", "segment_padding_row", segments, "EMB-5"),
    ):
        if table == tap:
            yield from options(config, name, values, clause)


def of_fitted_epsilon(question: Question) -> Iterator[Hypothesis]:
    """Yield the epsilon that a norm must have had."""
    for placement in ("inside", "outside"):

        def left(exponent: Array, placement: str = placement) -> Array:
            fields = {"norm_epsilon": 10.0 ** float(exponent[0]), "norm_epsilon_placement": placement}
            return (question.actual - question.values(Hypothesis("", "", "", fields))).reshape(-1)

        with contextlib.suppress(*INAPPLICABLE):
            value = float(f"{10.0 ** power(left):.4g}")
            for one in options(
                question.config, "norm_epsilon", (value,), "NRM-2", norm_epsilon_placement=placement
            ):
                said = "" if placement == question.config.norm_epsilon_placement else f" {placement} the root"
                yield dataclasses.replace(one, text=f"{one.text}{said}", rare=True)


def of_other_constants(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what mask_value must have been, read off the masked scores themselves."""
    exact = question.exact
    scores = exact.now[f"{tap.rpartition('.')[0]}.scores"].value
    visible = visible_keys(question.config, exact.context.real, scores.shape[1])
    hidden = ~np.broadcast_to(visible, scores.shape)
    if question.tensor != tap or not hidden.any() or not np.isfinite(question.actual).all():
        return
    for fill, shown in (("replace", question.actual), ("add", question.actual - scores)):
        # No mean of two: of the lowest numbers it is infinite.
        constant, width = float(np.sort(shown[hidden])[hidden.sum() // 2]), float(np.ptp(shown[hidden]))
        # The shortest number that all may be made of; near the end of the range a shorter one may be
        # infinite.
        shorter = (float(f"{constant:.{digits}g}") for digits in range(1, 18))
        value = next(
            (short for short in shorter if abs(short - constant) <= width and math.isfinite(short)), constant
        )
        for option in options(question.config, "mask_value", (value,), "MSK-2", mask_fill=fill):
            said = "" if fill == question.config.mask_fill else f" and mask_fill = {fill}"
            yield dataclasses.replace(option, text=f"{option.text}{said}", rare=True)
