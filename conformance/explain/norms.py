"""Mistakes in norms and residuals (SPEC NRM-1 to NRM-7, RES-1)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from concord.conformance.explain.hypothesis import Hypothesis, both, changed, loaded, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Step
from concord.spec.parameters import parameters
from concord.spec.tape import Node

NORMS = ("embeddings.norm", "layers.*.norm1", "layers.*.norm2", "final_norm")
RESIDUALS = ("layers.*.residual1", "layers.*.residual2")

EPSILONS = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
RARE_EPSILONS = tuple(factor * epsilon for epsilon in EPSILONS for factor in (2.0, 5.0))

Deviation = Callable[[Step, Node], Node]
"""Makes the deviation of the variance."""


def usual_center(m: Step, x: Node, mean: Node) -> Node:
    """NRM-2."""
    return m.a.subtract(x, mean)


def usual_parameter(m: Step, name: str) -> Node:
    """Return a gain or offset."""
    return m.weights[name]


def usual_deviation(m: Step, variance: Node) -> Node:
    """NRM-3."""
    epsilon = m.config.norm_epsilon
    return (
        m.a.sqrt(m.a.shift(variance, epsilon))
        if m.config.norm_epsilon_placement == "inside"
        else m.a.shift(m.a.sqrt(variance), epsilon)
    )


def normalised(
    m: Step,
    tap: str,
    x: Node,
    center: Callable[[Step, Node, Node], Node] = usual_center,
    deviation: Deviation = usual_deviation,
    axes: tuple[int, ...] = (-1,),
    parameter: Callable[[Step, str], Node] = usual_parameter,
) -> Node:
    """Return gain * (x - mean) / deviation + offset, in some other way than the specification's.

    Args:
        center: takes the mean off.
        deviation: is divided by.
        axes: that mean and variance are taken over.
        parameter: gives gain and offset.
    """
    a, name = m.a, owner(m.config.norm_sharing, tap)
    count = math.prod(x.shape[axis] for axis in axes)

    def total(values: Node) -> Node:
        for axis in axes:
            values = a.sum(values, axis)
        return values

    centered = center(m, x, a.divide_by(total(x), count))
    variance = a.divide_by(
        total(a.multiply(centered, centered)), count - (m.config.norm_variance == "unbiased")
    )
    return a.add(
        a.multiply(a.divide(centered, deviation(m, variance)), parameter(m, f"{name}.weight")),
        parameter(m, f"{name}.bias"),
    )


def owner(sharing: str, tap: str) -> str:
    """Return what the names of a norm's parameters begin with."""
    return tap[:-1] if sharing == "shared" and tap.startswith("layers.") else tap


def options_of_norm(question: Question) -> list[list[Hypothesis]]:
    """Return what else the options of a norm may be, a list for each."""
    config = question.config
    return [
        list(options(config, "norm_epsilon", EPSILONS, "NRM-2")),
        list(options(config, "norm_epsilon_placement", ("inside", "outside"), "NRM-3")),
        list(options(config, "norm_variance", ("biased", "unbiased"), "NRM-4")),
    ]


def two_options(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield pairs of wrong options of a norm."""
    for first, second in itertools.combinations(options_of_norm(question), 2):
        for one, other in itertools.product(first, second):
            yield both(one, other)


def of_norm(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with a norm."""
    yield from itertools.chain(*options_of_norm(question))
    for hypothesis in options(question.config, "norm_epsilon", RARE_EPSILONS, "NRM-2"):
        yield dataclasses.replace(hypothesis, rare=True)
    if question.case.dtype == "float64":
        yield Hypothesis(
            name="norm_epsilon_in_float32",
            text="an epsilon that was rounded to float32",
            clause="NRM-2",
            deviations={"norm_epsilon_bits": 24},
        )
    yield from of_statistics()
    yield from of_gain_and_offset(question, tap)
    if tap.startswith("layers."):
        yield from of_place(question, tap)


def of_statistics() -> Iterator[Hypothesis]:
    """Yield other ways to center and scale."""

    def norm(name: str, text: str, clause: str = "NRM-2", **how: Any) -> Hypothesis:
        return changed(name, text, clause, lambda m, tap, y: normalised(m, tap, m.x, **how))

    def at_least(m: Step, variance: Node) -> Node:
        epsilon = m.config.norm_epsilon
        root = m.a.sqrt(variance)
        if m.config.norm_epsilon_placement == "outside":
            return m.a.replace(root, m.plain(root) > epsilon, epsilon)
        return m.a.replace(root, m.plain(variance) > epsilon, math.sqrt(epsilon))

    yield changed("norm_missing", "no norm at all", "NRM-1", lambda m, tap, y: m.x)
    yield norm("norm_without_epsilon", "no epsilon at all", deviation=lambda m, variance: m.a.sqrt(variance))
    yield norm(
        "norm_epsilon_as_floor",
        "an epsilon that is a floor instead of a summand",
        "NRM-3",
        deviation=at_least,
    )
    yield norm(
        "norm_of_variance",
        "a division by the variance instead of the deviation",
        deviation=lambda m, variance: m.a.shift(variance, m.config.norm_epsilon),
    )
    yield norm("norm_mean_kept", "a mean that is not taken off", center=lambda m, x, mean: x)
    for text, axes in (
        ("tokens and features", (-1, -2)),
        ("tokens", (-2,)),
        ("samples", (-3,)),
        ("the whole batch", (-1, -2, -3)),
    ):
        yield norm("norm_axis", f"mean and variance over {text} instead of features", axes=axes)


def of_gain_and_offset(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield other gains and offsets."""
    weights, own = question.case.weights, owner(question.config.norm_sharing, tap)
    gain, offset = weights[f"{own}.weight"], weights[f"{own}.bias"]

    def norm(
        name: str, text: str, new_gain: np.ndarray, new_offset: np.ndarray, clause: str = "NRM-2"
    ) -> Hypothesis:
        return loaded(
            name, text, clause, {f"{own}.weight": lambda: new_gain, f"{own}.bias": lambda: new_offset}
        )

    yield norm("norm_gain_missing", f"gain 1 instead of `{own}.weight`", np.ones_like(gain), offset)
    yield norm("norm_offset_missing", f"offset 0 instead of `{own}.bias`", gain, np.zeros_like(offset))
    yield norm(
        "norm_gain_and_offset_missing", "gain 1 and offset 0", np.ones_like(gain), np.zeros_like(offset)
    )
    yield norm("norm_gain_from_zero", f"a gain of 1 + `{own}.weight`", gain + 1, offset)
    yield norm("norm_gain_and_offset_swapped", "gain and offset in each other's place", offset, gain)
    for name, parameter in parameters(question.config, question.case.part).items():
        other = name.removesuffix(".weight")
        if parameter.kind != "gain" or other == own:
            continue
        sibling = other[:-1] == own[:-1] and own.startswith("layers.")
        kind, clause = ("norm_sharing", "NRM-5") if sibling else ("weights_of_another_norm", "WGT-1")
        yield norm(
            kind,
            f"the gain and offset of `{other}` instead of its own",
            weights[f"{other}.weight"],
            weights[f"{other}.bias"],
            clause,
        )


def of_place(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield norms of something else."""
    yield from options(question.config, "norm_placement", ("post", "pre"), "NRM-1")
    if question.config.norm_placement == "pre":
        return
    result = result_of(question, tap)
    yield changed(
        "norm_before_residual",
        f"a norm of `{result}` alone, to which the residual is added afterwards",
        "NRM-1",
        lambda m, tap, y: m.a.add(m.entered[tap], normalised(m, tap, m.now[result])),
    )
    yield changed(
        "residual_missing",
        f"a norm of `{result}` alone, without the residual",
        "RES-1",
        lambda m, tap, y: normalised(m, tap, m.now[result]),
    )


def result_of(question: Question, tap: str) -> str:
    """Return the tap that holds the result of the sublayer of a norm or a residual."""
    layer = tap.rpartition(".")[0]
    if tap.endswith("2"):
        return f"{layer}.feed_forward.outer"
    return f"{layer}.attention.output" if question.config.output_projection else f"{layer}.attention.context"


def of_residual(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the sum of a sublayer's input and its result."""
    result, layer = result_of(question, tap), tap.rpartition(".")[0]
    norm = tap.replace("residual", "norm")

    def total(name: str, text: str, made: Callable[[Step, Node, Node], Node]) -> Hypothesis:
        return changed(name, text, "RES-1", lambda m, tap, y: made(m, m.entered[norm], m.now[result]))

    def scaled(factor: float, text: str) -> Hypothesis:
        return total(
            "sublayer_scaled",
            f"the sublayer's result {text}",
            lambda m, x, y: m.a.add(x, m.a.scale(y, factor)),
        )

    yield from options(question.config, "norm_placement", ("post", "pre"), "NRM-1")
    yield total("residual_missing", "no residual", lambda m, x, y: y)
    yield total("sublayer_missing", "the residual alone, without the sublayer's result", lambda m, x, y: x)
    yield total(
        "residual_subtracted", "the residual less the sublayer's result", lambda m, x, y: m.a.subtract(x, y)
    )
    yield total("residual_twice", "the residual added twice", lambda m, x, y: m.a.add(m.a.add(x, x), y))
    for keep in (0.9, 0.8, 0.5):
        yield scaled(keep, f"multiplied by {keep}")
        yield scaled(1 / keep, f"divided by {keep}")
    for factor, text in ((math.sqrt(0.5), "multiplied by sqrt(1/2)"), (0.5, "halved")):
        yield total("residual_scaled", f"the sum {text}", scaled_sum(factor))
    if question.config.norm_placement == "pre":
        yield total(
            "residual_of_normed_input",
            f"the residual taken from `{norm}`, after the norm",
            lambda m, x, y: m.a.add(m.now[norm], y),
        )
    if tap.endswith("2"):
        yield total(
            "residual_of_layer_input",
            "the residual taken from the input of the layer",
            lambda m, x, y: m.a.add(m.entered[f"{layer}.norm1"], y),
        )
        if question.config.norm_placement == "post":
            yield total(
                "residual_before_norm",
                f"the residual taken from `{layer}.residual1`, before the norm",
                lambda m, x, y: m.a.add(m.now[f"{layer}.residual1"], y),
            )


def scaled_sum(factor: float) -> Callable[[Step, Node, Node], Node]:
    """Return what multiplies the sum by a factor."""
    return lambda m, x, y: m.a.scale(m.a.add(x, y), factor)
