"""Mistakes in how gradients flow back through the model: every value is right, a derivative is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from concord.conformance.explain.hypothesis import Hypothesis, changed, options
from concord.conformance.explain.norms import (
    NORMS,
    RESIDUALS,
    normalised,
    options_of_norm,
    result_of,
    usual_deviation,
)
from concord.conformance.explain.question import Question
from concord.conformance.explain.slopes import of_slopes
from concord.conformance.explain.step import Change, Step
from concord.spec.pooling import least_squares
from concord.spec.tape import Node
from concord.spec.tensors import OF_IDS, POOLED, source_of


def stopped(m: Step, tap: str, y: Node) -> Node:
    """Let no gradient flow."""
    return m.stopped(y)


def unpadded(m: Step, tap: str, y: Node) -> Node:
    """Let no gradient flow for padding."""
    return m.a.freeze(y, ~m.key_mask()[..., None])


def multiplied(factor: float) -> Change:
    """Return what multiplies the gradient of a tap."""
    return lambda m, tap, y: m.straight(y, m.a.scale(y, factor))


def passed_to(source: Callable[[Step, str], Node]) -> Change:
    """Return what lets the gradient of a tap flow to another as it is."""
    return lambda m, tap, y: m.straight(y, source(m, tap))


def of_flow(question: Question) -> Iterator[Hypothesis]:
    """Yield derivatives that are wrong."""
    yield from of_norms(question)
    yield from of_sublayers(question)
    yield from of_attention(question)
    if question.case.part in POOLED:
        yield from of_length(question)
    if question.case.part == "model":
        yield from of_head(question)
    yield from of_slopes(question)


def of_norms(question: Question) -> Iterator[Hypothesis]:
    """Yield norms that are differentiated in another way."""

    def norm(
        name: str, text: str, on: tuple[str, ...] = NORMS, clause: str = "NRM-2", **how: Any
    ) -> Hypothesis:
        return changed(name, text, clause, lambda m, tap, y: normalised(m, tap, m.x, **how), *on)

    def without_mean(m: Step, x: Node, mean: Node) -> Node:
        return m.a.subtract(x, m.stopped(mean))

    def constant(m: Step, variance: Node) -> Node:
        return m.stopped(usual_deviation(m, variance))

    yield norm("detached_variance", "a variance that is taken for a constant", deviation=constant)
    yield norm("detached_mean", "a mean that is taken for a constant", center=without_mean)
    yield norm(
        "detached_statistics",
        "mean and variance that are taken for constants",
        center=without_mean,
        deviation=constant,
    )
    yield changed(
        "norm_in_gradient",
        "a norm that gradients pass as they are",
        "NRM-2",
        passed_to(lambda m, tap: m.x),
        *NORMS,
    )
    if question.config.norm_sharing == "shared":
        for number, word in ((2, "first"), (1, "second")):
            on = (f"layers.*.norm{number}",)
            text = f"the {word} use of a shared norm alone"
            yield norm(
                "shared_norm_counted_once",
                text,
                on,
                "NRM-5",
                parameter=lambda m, name: m.stopped(m.weights[name]),
            )
    for alternatives in options_of_norm(question):
        yield from alternatives


def of_sublayers(question: Question) -> Iterator[Hypothesis]:
    """Yield residuals, padded rows and activations that are differentiated in another way."""

    def residual(m: Step, tap: str) -> Node:
        return m.entered[tap.replace("residual", "norm")]

    def result(m: Step, tap: str) -> Node:
        return m.now[result_of(question, tap)]

    for taps in (RESIDUALS, *((tap,) for tap in RESIDUALS)):
        yield changed(
            "detached_residual",
            "a residual that no gradient flows through",
            "RES-1",
            passed_to(result),
            *taps,
        )
        yield changed(
            "detached_sublayer",
            "a sublayer that no gradient flows through",
            "RES-1",
            passed_to(residual),
            *taps,
        )
    if question.case.part in (*OF_IDS, "stack"):
        last = {"pre": "residual2", "post": "norm2"}[question.config.norm_placement]
        layers = [f"layers.{i}.{last}" for i in range(question.config.num_layers)]
        for on in (layers[:-1], layers):
            yield changed(
                "detached_padding",
                "padded rows that no gradient flows back into",
                "MSK-4",
                unpadded,
                "embeddings.*m",
                *on,
            )
    straight = passed_to(lambda m, tap: m.beside(tap, "inner"))
    yield changed(
        "activation_in_gradient",
        "an activation that gradients pass as they are",
        "FFN-2",
        straight,
        "*.activation",
    )
    yield from options(question.config, "activation", ("relu", "gelu_erf", "gelu_tanh"), "FFN-2")


def of_attention(question: Question) -> Iterator[Hypothesis]:
    """Yield attention that is differentiated in another way."""
    root = math.sqrt(question.config.head_dim)

    def masked(m: Step, tap: str) -> Node:
        prefix = tap.rpartition(".")[0]
        return m.now.get(f"{prefix}.masked_scores") or m.now[f"{prefix}.scores"]

    def without_row(m: Step, tap: str, y: Node) -> Node:
        return m.straight(y, m.a.multiply(m.stopped(y), masked(m, tap)))

    def softmax(text: str, change: Change) -> Hypothesis:
        return changed("softmax_in_gradient", f"a softmax that {text}", "ATT-5", change, "*.weights")

    yield changed(
        "score_scale_in_gradient", "a gradient without the score scale", "ATT-4", multiplied(root), "*.scores"
    )
    yield changed(
        "score_scale_in_gradient",
        "a gradient with the score scale twice",
        "ATT-4",
        multiplied(1 / root),
        "*.scores",
    )
    yield changed(
        "detached_weights", "attention weights that no gradient flows through", "ATT-5", stopped, "*.weights"
    )
    yield softmax("is differentiated element by element", without_row)
    yield softmax("gradients pass as they are", passed_to(masked))
    for role in ("query", "key", "value"):
        yield changed(
            f"detached_{role}", f"a {role} that no gradient flows through", "ATT-1", stopped, f"*.{role}"
        )
    overwritten = passed_to(lambda m, tap: m.beside(tap, "weights"))
    yield changed(
        "query_mask_in_gradient",
        "gradients that flow through overwritten weights",
        "MSK-8",
        overwritten,
        "*.masked_weights",
    )
    yield from options(question.config, "mask_fill", ("replace", "add"), "MSK-3")
    yield from options(question.config, "qkv_activation", ("none", "relu"), "ATT-1")


def of_length(question: Question) -> Iterator[Hypothesis]:
    """Yield lengths that are differentiated in another way."""
    if question.config.length_epsilon is None:
        return
    source = source_of(question.config, "normalized", question.case.part)

    def constant(m: Step, tap: str, y: Node) -> Node:
        x = m.now[source]
        length = m.a.sqrt(
            m.a.larger(
                m.a.sum(m.a.multiply(x, x), -1),
                m.constant(np.full((x.shape[0], 1), least_squares(m.config, m.dtype))),
            )
        )
        return m.a.divide(x, m.stopped(length))

    yield changed("detached_length", "a length that is taken for a constant", "HED-5", constant, "normalized")
    yield changed(
        "length_in_gradient",
        "a division by the length that gradients pass as they are",
        "HED-5",
        passed_to(lambda m, tap: m.now[source]),
        "normalized",
    )


def of_head(question: Question) -> Iterator[Hypothesis]:
    """Yield heads and losses that are differentiated in another way."""
    config = question.config
    dense, logits = (passed_to(lambda m, tap, name=name: m.now[name]) for name in ("pooler.dense", "logits"))  # type: ignore[misc]
    yield changed(
        "pooler_in_gradient",
        f"a {config.pooler} that gradients pass as they are",
        "HED-2",
        dense,
        "pooler.output",
    )
    yield changed(
        "softmax_in_gradient",
        "a log-softmax that gradients pass as they are",
        "LOS-1",
        logits,
        "log_probabilities",
    )
    yield from options(config, "l2_weight", (0.0, 2 * config.l2_weight, 0.5 * config.l2_weight), "LOS-4")
    yield from options(
        config, "ignore_label", (None, *range(config.num_classes if config.num_classes > 1 else 0)), "LOS-3"
    )
