"""Mistakes in pooling, and in the length of what it gives (SPEC HED-1, HED-5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Hypothesis, changed, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Step
from concord.spec.tape import Node
from concord.spec.tensors import source_of

Flags = NDArray[np.bool_]

EPSILONS = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
"""The least lengths that are in use."""


def of_pooling(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the pooled vector."""
    last = _last_of_encoder(question)
    yield from (
        of_flattening(last)
        if question.config.pooling == "flatten"
        else of_vector(last, question.config.pooling == "mean")
    )


def of_flattening(last: str) -> Iterator[Hypothesis]:
    """Yield other ways to flatten."""

    def features_first(m: Step, tap: str, y: Node) -> Node:
        return m.rearranged(m.now[last], lambda numbers: numbers.swapaxes(1, 2).reshape(y.shape))

    def without_padding(m: Step, tap: str, y: Node) -> Node:
        return m.a.reshape(m.a.replace(m.now[last], m.key_mask()[..., None], 0.0), y.shape)

    yield changed("flatten_order", "features flattened before tokens", "HED-1", features_first)
    yield changed("padding_flattened_as_zero", "padded rows that are set to 0", "HED-1", without_padding)


def of_vector(last: str, averaged: bool) -> Iterator[Hypothesis]:
    """Yield other ways to make one vector of all.

    Args:
        averaged: whether it is rightly the mean of real tokens, and not the first token.
    """
    right = "the mean of real tokens" if averaged else "the first"

    def token(name: str, text: str, place: Callable[[Flags], NDArray[np.integer]]) -> Hypothesis:
        def change(m: Step, tap: str, y: Node) -> Node:
            return m.a.index(m.now[last], (np.arange(len(m.key_mask())), place(m.key_mask())))

        return changed(name, f"{text} instead of {right}", "HED-1", change)

    def every(name: str, text: str, made: Callable[[Step, Node, Flags], Node]) -> Iterator[Hypothesis]:
        """Yield what is made of all tokens, and of the real ones."""
        all_tokens, real_tokens = (
            f"{text} all tokens instead of {right}",
            f"{text} real tokens instead of {right}",
        )
        yield changed(
            f"{name}_pooled",
            all_tokens,
            "HED-1",
            lambda m, tap, y: made(m, m.now[last], np.ones_like(m.key_mask())),
        )
        yield changed(
            f"{name}_of_real_tokens_pooled",
            real_tokens,
            "HED-1",
            lambda m, tap, y: made(m, m.now[last], m.key_mask()),
        )

    def total(m: Step, x: Node, counted: Flags) -> Node:
        kept = m.a.replace(x, counted[..., None], 0.0)
        return m.a.reshape(m.a.sum(kept, -2), (x.shape[0], x.shape[2]))

    def mean(m: Step, x: Node, counted: Flags, divisors: Flags | None = None) -> Node:
        numbers = np.maximum((counted if divisors is None else divisors).sum(1), 1)[:, None].astype(
            np.float64
        )
        return m.a.divide(total(m, x, counted), m.constant(numbers))

    def divided(name: str, text: str, made: Callable[[Step, Node, Flags, Flags], Node]) -> Hypothesis:
        """Yield a mean whose sum and count are of other tokens: of real ones and all."""
        return changed(
            name,
            text,
            "HED-1",
            lambda m, tap, y: made(m, m.now[last], m.key_mask(), np.ones_like(m.key_mask())),
        )

    def maximum(m: Step, x: Node, counted: Flags) -> Node:
        vector = m.a.index(x, (slice(None), 0))
        return m.function(vector, lambda _: np.where(counted[..., None], x.value, -np.inf).max(-2))

    if averaged:
        yield token("first_token_pooled", "the first token", lambda real: np.zeros(len(real), np.int64))
        yield divided("mean_divided_by_all", "the sum of real tokens divided by the number of all", mean)
        yield divided(
            "mean_of_all_by_real",
            "the sum of all tokens divided by the number of real ones",
            lambda m, x, real, every: mean(m, x, every, real),
        )
        yield divided(
            "mean_without_first",
            "the mean of real tokens without the first",
            lambda m, x, real, every: mean(m, x, real & (every.cumsum(1) > 1)),
        )
    yield token("last_token_pooled", "the last token", lambda real: np.full(len(real), real.shape[1] - 1))
    yield token(
        "second_token_pooled", "the second token", lambda real: np.full(len(real), min(1, real.shape[1] - 1))
    )
    yield token("last_real_token_pooled", "the last real token", _last)
    yield token("first_real_token_pooled", "the first real token", lambda real: real.argmax(1))
    yield token(
        "token_by_length_pooled",
        "the token at the number of real ones",
        lambda real: np.maximum(real.sum(1) - 1, 0),
    )
    yield changed(
        "mean_pooled",
        f"the mean of all tokens instead of {right}",
        "HED-1",
        lambda m, tap, y: mean(m, m.now[last], np.ones_like(m.key_mask())),
    )
    if not averaged:
        yield changed(
            "mean_of_real_tokens_pooled",
            f"the mean of real tokens instead of {right}",
            "HED-1",
            lambda m, tap, y: mean(m, m.now[last], m.key_mask()),
        )
    yield from every("sum", "the sum of", total)
    yield from every("maximum", "the maximum over", maximum)


def _last(real: Flags) -> NDArray[np.integer]:
    return np.where(real.any(1), real.shape[1] - 1 - real[:, ::-1].argmax(1), 0)


def _last_of_encoder(question: Question) -> str:
    config = question.config
    if config.final_norm:
        return "final_norm"
    return f"layers.{config.num_layers - 1}.{'residual2' if config.norm_placement == 'pre' else 'norm2'}"


# The length of the pooled vector.


def of_normalized(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield other lengths that the pooled vector may have been divided by."""
    source = source_of(question.config, tap, question.case.part)
    epsilon = question.config.length_epsilon or 0.0

    def divided(name: str, text: str, length: Callable[[Step, Node], Node]) -> Hypothesis:
        return changed(
            name, text, "HED-5", lambda m, tap, y: m.a.divide(m.now[source], length(m, m.now[source]))
        )

    def squares(m: Step, x: Node, axis: int = -1) -> Node:
        return m.a.sum(m.a.multiply(x, x), axis)

    def of_batch(m: Step, x: Node) -> Node:
        whole = m.a.reshape(x, (1, x.shape[0], x.shape[1]))
        return m.a.reshape(m.a.sqrt(squares(m, whole, -2)), (1, x.shape[1]))

    yield changed("length_kept", "a vector that keeps its length", "HED-5", lambda m, tap, y: m.now[source])
    yield divided(
        "length_of_sizes", "the sum of sizes for its length", lambda m, x: m.a.sum(m.function(x, np.abs), -1)
    )
    yield divided("length_squared", "the square of its length", squares)
    yield divided("length_of_batch", "lengths along the batch axis", of_batch)
    yield divided(
        "length_epsilon_added",
        "epsilon added to its length",
        lambda m, x: m.a.shift(m.a.sqrt(squares(m, x)), epsilon),
    )
    yield divided(
        "length_epsilon_added",
        "epsilon added to its square",
        lambda m, x: m.a.sqrt(m.a.shift(squares(m, x), epsilon)),
    )
    yield divided(
        "length_epsilon_added",
        "the square of epsilon added to its square",
        lambda m, x: m.a.sqrt(m.a.shift(squares(m, x), epsilon**2)),
    )
    yield divided(
        "length_epsilon_squared",
        "epsilon taken for the least square",
        lambda m, x: m.a.sqrt(m.a.larger(squares(m, x), m.constant(np.full((x.shape[0], 1), epsilon)))),
    )
    yield divided("length_without_epsilon", "its length, however small", lambda m, x: m.a.sqrt(squares(m, x)))
    yield from options(question.config, "length_epsilon", EPSILONS, "HED-5")
