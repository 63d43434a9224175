"""Bugs in norms and residuals (SPEC NRM-1 to NRM-7, RES-1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from concord.conformance.bugs.bug import group, of_source, option, where
from concord.conformance.bugs.bug import weights as loaded
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array

NORMS = ("embeddings.norm", "*.norm1", "*.norm2", "final_norm")
RESIDUALS = ("*.residual1", "*.residual2")
NEAR = "a row whose variance is near epsilon"

OF_NORMS, OF_RESIDUALS = (
    group("norms", *NORMS, clause="NRM-2"),
    group("norms", *RESIDUALS, clause="RES-1"),
)
norm, residual = OF_NORMS.bug, OF_RESIDUALS.bug


def axes(*given: int) -> Edit:
    """Return a norm whose mean and variance are over some axes."""
    return of_source(lambda m, x: m.norm(x, axes=given))


def normed(**how: Callable[..., Array]) -> Edit:
    """Return the norm with some of its steps taken in another way, made of the context and what they take."""

    def edit(m: Context, y: Array) -> Array:
        steps: dict[str, Any] = {name: partial(step, m) for name, step in how.items()}
        return m.norm(m.source(), **steps)

    return edit


def one(m: Context, gain: Array) -> Array:
    return gain * 0.0 + 1.0


def zero(m: Context, offset: Array) -> Array:
    return offset * 0.0


def floored(m: Context, variance: Array) -> Array:
    """Take epsilon for the least that the variance can be, or the deviation."""
    epsilon = m.config.norm_epsilon
    if m.config.norm_epsilon_placement == "outside":
        root = m.o.sqrt(variance)
        return m.o.where(root > epsilon, root, epsilon)
    return m.o.sqrt(m.o.where(variance > epsilon, variance, epsilon))


def norm_before_residual(m: Context, y: Array) -> Array:
    """Norm what the sublayer gives, and add the residual to that."""
    of = m.tap.replace("norm", "residual")
    return m.source(of=of) + m.norm(m.source("result", of=of))


def total(made: Callable[[Array, Array], Array]) -> Edit:
    """Return something else than the sum of a sublayer's input and its result."""
    return lambda m, y: made(m.source(), m.source("result"))


def scaled(factor: float, whole: bool = False) -> Edit:
    """Return the sum whose second term is multiplied, or all of it."""
    return total(lambda x, result: (x + result) * factor if whole else x + result * factor)


NORMED = "*.norm1", "*.norm2"

BUGS = (
    *(
        norm(
            f"norm_epsilon_{name}",
            what,
            option(
                **{"norm_epsilon": value} if isinstance(value, float) else {"norm_epsilon_placement": value}
            ),
            variant=variant,
            scenario="tiny",
            first=(first,),
            input=NEAR,
            cause="norm_epsilon" if isinstance(value, float) else "norm_epsilon_placement",
            clause="NRM-2" if isinstance(value, float) else "NRM-3",
        )
        for name, what, value, variant, first in (
            (
                "1e5_for_1e12",
                "Epsilon is 1e-5, the default of torch, instead of 1e-12.",
                1e-5,
                "bert",
                NORMS[0],
            ),
            (
                "1e6_for_1e12",
                "Epsilon is 1e-6, the default of Flax, instead of 1e-12.",
                1e-6,
                "bert",
                NORMS[0],
            ),
            ("1e6_for_1e5", "Epsilon is 1e-6 instead of 1e-5.", 1e-6, "nndl-paddle", NORMS[0]),
            (
                "1e12_for_1e8",
                "Epsilon is 1e-12 instead of 1e-8.",
                1e-12,
                "tf1-text-classifier",
                "layers.0.norm1",
            ),
            ("1e5_for_1e6", "Epsilon is 1e-5 instead of 1e-6.", 1e-5, "keras-attention", "layers.0.norm1"),
            (
                "outside",
                "Epsilon is added to the deviation, not to the variance.",
                "outside",
                "bert",
                NORMS[0],
            ),
            (
                "inside",
                "Epsilon is added to the variance, not to the deviation.",
                "inside",
                "bert-pytorch",
                "layers.0.norm1",
            ),
        )
    ),
    norm(
        "norm_epsilon_as_floor",
        "The variance is at least epsilon, instead of having epsilon added.",
        normed(deviation=floored),
        scenario="tiny",
        input=NEAR,
        clause="NRM-3",
    ),
    norm(
        "norm_epsilon_lost",
        "Epsilon is 1e-12 in float16, which is 0.",
        normed(deviation=lambda m, variance: m.o.sqrt(variance)),
        scenario="tiny",
        input=NEAR,
        alone=True,
        cause="norm_without_epsilon",
        clause="NRM-3",
    ),
    OF_NORMS.also(
        "norm_of_variance",
        "a division by the variance instead of the deviation",
        normed(deviation=lambda m, variance: variance + m.config.norm_epsilon),
    ),
    norm(
        "norm_variance_biased",
        "The variance is divided by D, not by D - 1.",
        option(norm_variance="biased"),
        variant="bert-pytorch",
        first=("layers.0.norm1",),
        cause="norm_variance",
        clause="NRM-4",
    ),
    norm(
        "norm_variance_unbiased",
        "The variance is divided by D - 1, the default of torch.std, not by D.",
        option(norm_variance="unbiased"),
        cause="norm_variance",
        clause="NRM-4",
    ),
    norm(
        "norm_mean_kept",
        "The mean is not taken off: a root-mean-square norm.",
        normed(center=lambda m, x, mean: x),
    ),
    OF_NORMS.also(
        "norm_variance_about_zero",
        "a variance about zero: the mean of the squares, of what has its mean",
        of_source(lambda m, x: m.norm(x, variance=lambda variance: m.o.mean(x * x, -1))),
        clause="NRM-4",
    ),
    norm(
        "norm_over_tokens_too",
        "Mean and variance are taken over tokens and features.",
        axes(-1, -2),
        input="more than one token",
        cause="norm_axis",
    ),
    *(
        OF_NORMS.also("norm_axis", f"mean and variance over {text} instead of features", axes(*given))
        for text, given in (("tokens", (-2,)), ("samples", (-3,)), ("the whole batch", (-1, -2, -3)))
    ),
    norm("norm_gain_missing", "The norm has no gain.", normed(gain=one)),
    norm("norm_offset_missing", "The norm has no offset.", normed(offset=zero)),
    norm(
        "norm_separate_for_shared",
        "The second sublayer has a norm of its own, for which no weights were found.",
        normed(gain=one, offset=zero),
        "*.norm2",
        variant="nndl-paddle",
        cause="norm_gain_and_offset_missing",
        clause="NRM-5",
    ),
    norm(
        "norm_gain_from_zero",
        "The gain is taken for its distance from 1.",
        normed(gain=lambda m, gain: gain + 1.0),
    ),
    norm(
        "norm_pre_for_post",
        "The sublayer's input is normed, where the source norms the sum.",
        option(norm_placement="pre"),
        variant="vanilla-encoder",
        first=("layers.0.attention.query",),
        cause="norm_placement",
        clause="NRM-1",
    ),
    norm(
        "norm_post_for_pre",
        "The sum is normed, where the source norms the sublayer's input.",
        option(norm_placement="post"),
        variant="bert-pytorch",
        first=("layers.0.norm1",),
        cause="norm_placement",
        clause="NRM-1",
    ),
    norm(
        "norm_before_residual",
        "The sublayer's result is normed before the residual is added.",
        where(norm_before_residual, norm_placement="post"),
        *NORMED,
        clause="NRM-1",
    ),
    OF_NORMS.also(
        "residual_missing",
        "a norm of the sublayer's result alone, without the residual",
        where(
            lambda m, y: m.norm(m.source("result", of=m.tap.replace("norm", "residual"))),
            norm_placement="post",
        ),
        *NORMED,
        clause="RES-1",
    ),
    norm(
        "norm_shared_for_separate",
        "Both sublayers use the first norm's weights.",
        loaded(
            lambda config, given: {
                name: given[name.replace("norm2", "norm1")] for name in given if ".norm2." in name
            }
        ),
        variant="nndl-paddle-api",
        first=("layers.0.norm2",),
        cause="norm_sharing",
        clause="NRM-5",
    ),
    norm(
        "norm_second_missing",
        "The feed-forward sublayer has no norm.",
        of_source(lambda m, x: x),
        "*.norm2",
        cause="norm_missing",
        clause="NRM-1",
    ),
    norm(
        "embedding_norm_missing",
        "No norm follows the sum of the embeddings.",
        of_source(lambda m, x: x),
        "embeddings.norm",
        cause="norm_missing",
        clause="NRM-1",
    ),
    norm(
        "norm_final_missing",
        "No norm follows the last layer.",
        of_source(lambda m, x: x),
        "final_norm",
        variant="bert-pytorch",
        scenario="ignored-label",
        cause="norm_missing",
        clause="NRM-1",
    ),
    OF_NORMS.also("norm_missing", "no norm at all", of_source(lambda m, x: x), "*.norm1", clause="NRM-1"),
    residual(
        "residual_missing",
        "The attention sublayer has no residual.",
        total(lambda x, result: result),
        "*.residual1",
    ),
    residual(
        "residual_second_missing",
        "The feed-forward sublayer has no residual.",
        total(lambda x, result: result),
        "*.residual2",
        cause="residual_missing",
    ),
    residual(
        "residual_of_normed_input",
        "The residual is the sublayer's input after the norm, not before it.",
        where(
            lambda m, y: m.now[m.tap.replace("residual", "norm")] + m.source("result"), norm_placement="pre"
        ),
        variant="bert-pytorch",
    ),
    OF_RESIDUALS.also(
        "residual_of_layer_input",
        "the residual taken from the input of the layer",
        lambda m, y: m.source(of=m.tap.replace("residual2", "residual1")) + m.source("result"),
        "*.residual2",
    ),
    OF_RESIDUALS.also(
        "residual_before_norm",
        "the residual taken from before the norm",
        where(lambda m, y: m.now[f"{m.scope}.residual1"] + m.source("result"), norm_placement="post"),
        "*.residual2",
    ),
    residual(
        "residual_dropout_scaled",
        "Sublayers are multiplied by the share that dropout keeps, as if it did not enlarge it in training.",
        scaled(0.9),
        cause="sublayer_scaled",
        clause="DRP-1",
    ),
    *(
        OF_RESIDUALS.also(
            "sublayer_scaled",
            f"the sublayer's result multiplied by {factor:.4g}",
            scaled(factor),
        )
        for factor in (0.8, 0.5, 1 / 0.9, 1 / 0.8, 2.0)
    ),
    *(
        OF_RESIDUALS.also(
            "residual_scaled",
            f"the sum multiplied by {text}",
            scaled(factor, whole=True),
        )
        for text, factor in (("sqrt(1/2)", math.sqrt(0.5)), ("1/2", 0.5))
    ),
    OF_RESIDUALS.also(
        "sublayer_missing", "the residual alone, without the sublayer's result", total(lambda x, result: x)
    ),
    OF_RESIDUALS.also(
        "residual_subtracted", "the residual less the sublayer's result", total(lambda x, result: x - result)
    ),
    OF_RESIDUALS.also("residual_twice", "the residual added twice", total(lambda x, result: x + x + result)),
    OF_RESIDUALS.also(
        "sublayers_in_parallel",
        "the input of the layer instead of its first sublayer's",
        lambda m, y: m.linear(m.tap, m.source(of=f"layers.{m.layer}.residual1")),
        "*.feed_forward.inner",
    ),
)
