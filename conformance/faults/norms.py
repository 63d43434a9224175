"""Bugs in norms and residuals (SPEC NRM-1 to NRM-7, RES-1)."""

from __future__ import annotations

from typing import Any

from conformance.faults.fault import Array as Weight
from conformance.faults.fault import Fault, option, steps, weights
from conformance.faults.operations import Array
from conformance.mutants.rewrites import Encode, Norm, PostNorm, PreNorm
from conformance.mutants.surgery import Steps
from spec.config import EncoderConfig
from spec.parameters import Weights

NEAR = "a row whose variance is near epsilon"


def normalised_over_all(family: Steps, layer: Any, x: Array) -> Array:
    """Take mean and variance over tokens and features."""
    o = family.o

    def mean(values: Array) -> Array:
        return o.mean(o.mean(values, -1), -2)

    centered = x - mean(x)
    return centered / layer.deviation(mean(centered * centered), layer.epsilon) * o.gain(layer) + o.offset(layer)


def pre_for_post(family: Steps, layer: Any, number: int, x: Array, function: Any, tap: Any) -> Array:
    normed = tap(f"{layer.name}.norm{number}", getattr(layer, layer.norm_names[number - 1])(x))
    return tap(f"{layer.name}.residual{number}", x + function(normed))


def post_for_pre(family: Steps, layer: Any, number: int, x: Array, function: Any, tap: Any) -> Array:
    total = tap(f"{layer.name}.residual{number}", x + function(x))
    return tap(f"{layer.name}.norm{number}", getattr(layer, layer.norm_names[number - 1])(total))


def norm_before_residual(family: Steps, layer: Any, number: int, x: Array, function: Any, tap: Any) -> Array:
    """Norm what the sublayer gives, and add the residual to that."""
    result = function(x)
    tap(f"{layer.name}.residual{number}", x + result)
    return tap(f"{layer.name}.norm{number}", x + getattr(layer, layer.norm_names[number - 1])(result))


def second_norm_untrained(family: Steps, layer: Any, number: int, x: Array) -> Array:
    """Norm the second sublayer by a norm of its own, which has kept its initial gain 1 and offset 0."""
    norm = getattr(layer, layer.norm_names[number - 1])
    normed = norm(x)
    return normed if number == 1 else (normed - family.o.offset(norm)) / family.o.gain(norm)


def norms_alike(config: EncoderConfig, given: Weights) -> dict[str, Weight]:
    """Let the second norm of each layer have the weights of the first."""
    return {name: given[name.replace("norm2", "norm1")] for name in given if ".norm2." in name}


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(**{"name": name, "group": "norms", "what": what, "variant": "bert", "first": ("embeddings.norm",), **fields})


def epsilon(name: str, what: str, variant: str, **fields: Any) -> Fault:
    first = "embeddings.norm" if variant in ("bert", "nndl-paddle") else "layers.0.norm1"
    return mutant(name, what, **{"variant": variant, "scenario": "tiny", "first": (first,), "input": NEAR, **fields})


FAULTS = (
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
        change=steps(
            Norm, deviation=lambda family, layer, variance: family.o.sqrt(family.o.where(variance > layer.epsilon, variance, layer.epsilon))
        ),
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
    mutant("norm_mean_kept", "The mean is not taken off: a root-mean-square norm.", change=steps(Norm, center=lambda family, layer, x: x)),
    mutant(
        "norm_over_tokens_too",
        "Mean and variance are taken over tokens and features.",
        input="more than one token",
        change=steps(Norm, run=normalised_over_all),
    ),
    mutant("norm_gain_missing", "The norm has no gain.", change=steps(Norm, gain=lambda family, layer, normed: normed)),
    mutant("norm_offset_missing", "The norm has no offset.", change=steps(Norm, shift=lambda family, layer, gained: gained)),
    mutant(
        "norm_gain_from_zero",
        "The gain is taken for its distance from 1.",
        change=steps(Norm, gain=lambda family, layer, normed: normed * (family.o.gain(layer) + 1.0)),
    ),
    mutant(
        "norm_pre_for_post",
        "The sublayer's input is normed, where the source norms the sum.",
        variant="vanilla-encoder",
        first=("layers.0.attention.query",),
        change=steps(PostNorm, run=pre_for_post),
    ),
    mutant(
        "norm_post_for_pre",
        "The sum is normed, where the source norms the sublayer's input.",
        variant="bert-pytorch",
        first=("layers.0.norm1",),
        change=steps(PreNorm, run=post_for_pre),
    ),
    mutant(
        "norm_before_residual",
        "The sublayer's result is normed before the residual is added.",
        first=("layers.0.norm1",),
        change=steps(PostNorm, run=norm_before_residual),
    ),
    mutant(
        "norm_shared_for_separate",
        "Both sublayers use the first norm's weights.",
        variant="nndl-paddle-api",
        first=("layers.0.norm2",),
        change=weights(norms_alike),
    ),
    mutant(
        "norm_separate_for_shared",
        "The second sublayer has a norm of its own, for which no weights were found.",
        variant="nndl-paddle",
        first=("layers.0.norm2",),
        change=steps(PostNorm, norm=second_norm_untrained),
    ),
    mutant(
        "norm_second_missing",
        "The feed-forward sublayer has no norm.",
        first=("layers.0.norm2",),
        change=steps(PostNorm, norm=lambda family, layer, number, x: getattr(layer, layer.norm_names[0])(x) if number == 1 else x),
    ),
    mutant(
        "norm_final_missing",
        "No norm follows the last layer.",
        variant="bert-pytorch",
        scenario="ignored-label",
        first=("final_norm",),
        change=steps(Encode, norm=lambda family, model, x: x),
    ),
    mutant(
        "residual_missing",
        "The attention sublayer has no residual.",
        first=("layers.0.residual1",),
        change=steps(PostNorm, residual=lambda family, number, x, y: y if number == 1 else x + y),
    ),
    mutant(
        "residual_second_missing",
        "The feed-forward sublayer has no residual.",
        first=("layers.0.residual2",),
        change=steps(PostNorm, residual=lambda family, number, x, y: x + y if number == 1 else y),
    ),
    mutant(
        "residual_of_normed_input",
        "The residual is the sublayer's input after the norm, not before it.",
        variant="bert-pytorch",
        first=("layers.0.residual1",),
        change=steps(PreNorm, residual=lambda family, number, x, y, normed: normed + y),
    ),
    mutant(
        "residual_dropout_scaled",
        "Sublayers are multiplied by the share that dropout keeps, as if it did not enlarge it in training.",
        first=("layers.0.residual1",),
        change=steps(PostNorm, residual=lambda family, number, x, y: x + y * 0.9),
    ),
)
