"""Bugs in norms and residuals (SPEC NRM-1 to NRM-7, RES-1)."""

from __future__ import annotations

from typing import Any

from concord.conformance.bugs.bug import Array as Weight
from concord.conformance.bugs.bug import Bug, Change, edited, option, weights
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights

NEAR = "a row whose variance is near epsilon"


def of_norms(edit: Edit) -> Change:
    """Return the change of every norm."""
    return edited(edit, "embeddings.norm", "*.norm1", "*.norm2", "final_norm")


def floored(m: Context, y: Array) -> Array:
    """Take epsilon for the least that the variance can be."""
    epsilon = m.config.norm_epsilon
    return m.norm(
        m.source(), deviation=lambda variance: m.o.sqrt(m.o.where(variance > epsilon, variance, epsilon))
    )


def norm_before_residual(m: Context, y: Array) -> Array:
    """Norm what the sublayer gives, and add the residual to that."""
    residual = m.tap.replace("norm", "residual")
    return m.source(of=residual) + m.norm(m.source("result", of=residual))


def norms_alike(config: EncoderConfig, given: Weights) -> dict[str, Weight]:
    """Let the second norm of each layer have the weights of the first."""
    return {name: given[name.replace("norm2", "norm1")] for name in given if ".norm2." in name}


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{
            "name": name,
            "group": "norms",
            "what": what,
            "variant": "bert",
            "first": ("embeddings.norm",),
            **fields,
        }
    )


def epsilon(name: str, what: str, variant: str, **fields: Any) -> Bug:
    first = "embeddings.norm" if variant in ("bert", "nndl-paddle") else "layers.0.norm1"
    return mutant(
        name, what, **{"variant": variant, "scenario": "tiny", "first": (first,), "input": NEAR, **fields}
    )


BUGS = (
    epsilon(
        "norm_epsilon_1e5_for_1e12",
        "Epsilon is 1e-5, the default of torch, instead of 1e-12.",
        "bert",
        cause="norm_epsilon",
        change=option(norm_epsilon=1e-5),
    ),
    epsilon(
        "norm_epsilon_1e6_for_1e12",
        "Epsilon is 1e-6, the default of Flax, instead of 1e-12.",
        "bert",
        cause="norm_epsilon",
        change=option(norm_epsilon=1e-6),
    ),
    epsilon(
        "norm_epsilon_1e6_for_1e5",
        "Epsilon is 1e-6 instead of 1e-5.",
        "nndl-paddle",
        cause="norm_epsilon",
        change=option(norm_epsilon=1e-6),
    ),
    epsilon(
        "norm_epsilon_1e12_for_1e8",
        "Epsilon is 1e-12 instead of 1e-8.",
        "tf1-text-classifier",
        cause="norm_epsilon",
        change=option(norm_epsilon=1e-12),
    ),
    epsilon(
        "norm_epsilon_1e5_for_1e6",
        "Epsilon is 1e-5 instead of 1e-6.",
        "keras-attention",
        cause="norm_epsilon",
        change=option(norm_epsilon=1e-5),
    ),
    epsilon(
        "norm_epsilon_outside",
        "Epsilon is added to the deviation, not to the variance.",
        "bert",
        cause="norm_epsilon_placement",
        change=option(norm_epsilon_placement="outside"),
    ),
    epsilon(
        "norm_epsilon_inside",
        "Epsilon is added to the variance, not to the deviation.",
        "bert-pytorch",
        cause="norm_epsilon_placement",
        change=option(norm_epsilon_placement="inside"),
    ),
    epsilon(
        "norm_epsilon_as_floor",
        "The variance is at least epsilon, instead of having epsilon added.",
        "bert",
        change=of_norms(floored),
        cause="norm_epsilon_as_floor",
        clause="NRM-3",
    ),
    mutant(
        "norm_variance_biased",
        "The variance is divided by D, not by D - 1.",
        variant="bert-pytorch",
        first=("layers.0.norm1",),
        cause="norm_variance",
        change=option(norm_variance="biased"),
    ),
    mutant(
        "norm_variance_unbiased",
        "The variance is divided by D - 1, the default of torch.std, not by D.",
        cause="norm_variance",
        change=option(norm_variance="unbiased"),
    ),
    mutant(
        "norm_mean_kept",
        "The mean is not taken off: a root-mean-square norm.",
        change=of_norms(lambda m, y: m.norm(m.source(), center=lambda x, mean: x)),
        cause="norm_mean_kept",
        clause="NRM-2",
    ),
    mutant(
        "norm_over_tokens_too",
        "Mean and variance are taken over tokens and features.",
        input="more than one token",
        change=of_norms(lambda m, y: m.norm(m.source(), axes=(-1, -2))),
        cause="norm_axis",
        clause="NRM-2",
    ),
    mutant(
        "norm_gain_missing",
        "The norm has no gain.",
        change=of_norms(lambda m, y: m.norm(m.source(), gain=lambda gain: gain * 0.0 + 1.0)),
        cause="norm_gain_missing",
        clause="NRM-2",
    ),
    mutant(
        "norm_offset_missing",
        "The norm has no offset.",
        change=of_norms(lambda m, y: m.norm(m.source(), offset=lambda offset: offset * 0.0)),
        cause="norm_offset_missing",
        clause="NRM-2",
    ),
    mutant(
        "norm_gain_from_zero",
        "The gain is taken for its distance from 1.",
        change=of_norms(lambda m, y: m.norm(m.source(), gain=lambda gain: gain + 1.0)),
        cause="norm_gain_from_zero",
        clause="NRM-2",
    ),
    mutant(
        "norm_pre_for_post",
        "The sublayer's input is normed, where the source norms the sum.",
        variant="vanilla-encoder",
        first=("layers.0.attention.query",),
        change=option(norm_placement="pre"),
        cause="norm_placement",
        clause="NRM-1",
    ),
    mutant(
        "norm_post_for_pre",
        "The sum is normed, where the source norms the sublayer's input.",
        variant="bert-pytorch",
        first=("layers.0.norm1",),
        change=option(norm_placement="post"),
        cause="norm_placement",
        clause="NRM-1",
    ),
    mutant(
        "norm_before_residual",
        "The sublayer's result is normed before the residual is added.",
        first=("layers.0.norm1",),
        change=edited(norm_before_residual, "*.norm1", "*.norm2"),
        cause="norm_before_residual",
        clause="NRM-1",
    ),
    mutant(
        "norm_shared_for_separate",
        "Both sublayers use the first norm's weights.",
        variant="nndl-paddle-api",
        first=("layers.0.norm2",),
        change=weights(norms_alike),
        cause="norm_sharing",
        clause="NRM-5",
    ),
    mutant(
        "norm_separate_for_shared",
        "The second sublayer has a norm of its own, for which no weights were found.",
        variant="nndl-paddle",
        first=("layers.0.norm2",),
        change=edited(
            lambda m, y: m.norm(
                m.source(), gain=lambda gain: gain * 0.0 + 1.0, offset=lambda offset: offset * 0.0
            ),
            "*.norm2",
        ),
        cause="norm_gain_and_offset_missing",
        clause="NRM-5",
    ),
    mutant(
        "norm_second_missing",
        "The feed-forward sublayer has no norm.",
        first=("layers.0.norm2",),
        change=edited(lambda m, y: m.source(), "*.norm2"),
        cause="norm_missing",
        clause="NRM-1",
    ),
    mutant(
        "norm_final_missing",
        "No norm follows the last layer.",
        variant="bert-pytorch",
        scenario="ignored-label",
        first=("final_norm",),
        change=edited(lambda m, y: m.source(), "final_norm"),
        cause="norm_missing",
        clause="NRM-1",
    ),
    mutant(
        "residual_missing",
        "The attention sublayer has no residual.",
        first=("layers.0.residual1",),
        change=edited(lambda m, y: m.source("result"), "*.residual1"),
        cause="residual_missing",
        clause="RES-1",
    ),
    mutant(
        "residual_second_missing",
        "The feed-forward sublayer has no residual.",
        first=("layers.0.residual2",),
        change=edited(lambda m, y: m.source("result"), "*.residual2"),
        cause="residual_missing",
        clause="RES-1",
    ),
    mutant(
        "residual_of_normed_input",
        "The residual is the sublayer's input after the norm, not before it.",
        variant="bert-pytorch",
        first=("layers.0.residual1",),
        change=edited(
            lambda m, y: m.now[m.tap.replace("residual", "norm")] + m.source("result"),
            "*.residual1",
            "*.residual2",
        ),
        cause="residual_of_normed_input",
        clause="RES-1",
    ),
    mutant(
        "residual_dropout_scaled",
        "Sublayers are multiplied by the share that dropout keeps, as if it did not enlarge it in training.",
        first=("layers.0.residual1",),
        change=edited(lambda m, y: m.source() + m.source("result") * 0.9, "*.residual1", "*.residual2"),
        cause="sublayer_scaled",
        clause="DRP-1",
    ),
)
