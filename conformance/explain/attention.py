"""Mistakes in attention (SPEC ATT-1 to ATT-7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Hypothesis, changed, options
from concord.conformance.explain.linear import orders
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Change, Step
from concord.spec.masks import visible_keys
from concord.spec.precision import precision
from concord.spec.tape import Node

Numbers = NDArray[np.int64]
Order = Callable[[Numbers], Numbers]


def reordered(order: Order) -> Change:
    """Return what puts the elements of a tap in another order."""
    return lambda m, tap, y: m.rearranged(y, order)


# Query, key and value: (B, T, H, K).


def of_projection(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with query, key or value besides the linear layer."""
    config = question.config
    heads, width = config.num_heads, config.head_dim
    yield from options(config, "qkv_activation", ("none", "relu"), "ATT-1")

    def as_heads_first(y: Numbers) -> Numbers:
        return y.reshape(len(y), heads, -1, width).transpose(0, 2, 1, 3)

    text = "heads split by a reshape to (B, H, T, K) without a transposition"
    yield changed("heads_split_by_reshape", text, "ATT-2", reordered(as_heads_first))
    interleaved = reordered(lambda y: y.reshape(*y.shape[:2], width, heads).swapaxes(-1, -2))
    yield changed("heads_interleaved", "heads of every H-th column", "ATT-2", interleaved)
    for order in orders(heads):
        text = f"heads in the order {', '.join(map(str, order))}"
        yield changed("heads_permuted", text, "ATT-2", reordered(_columns(order)))
    if not tap.endswith("value"):
        scaled = "a vector that has been multiplied by 1 / sqrt(K) already"
        yield changed(
            "projection_scaled", scaled, "ATT-4", lambda m, tap, y: m.a.divide_by(y, math.sqrt(width))
        )
        scaled = "a vector that has been multiplied by 1 / sqrt(sqrt(K)) already"
        yield changed("projection_scaled", scaled, "ATT-4", lambda m, tap, y: m.a.divide_by(y, width**0.25))


def _columns(order: tuple[int, ...]) -> Order:
    return lambda y: y[:, :, list(order)]


# Scores: (B, H, Q, S).


def of_scores(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with scores."""
    width, whole, heads = question.config.head_dim, question.config.d_model, question.config.num_heads

    def product(divisor: float, key: str = "key") -> Change:
        return lambda m, tap, y: m.a.divide_by(
            m.a.einsum("bqhk,bshk->bhqs", m.beside(tap, "query"), m.beside(tap, key)), divisor
        )

    def scaled(name: str, text: str, divisor: float) -> Hypothesis:
        return changed(name, text, "ATT-4", product(divisor))

    yield scaled("no_score_scale", "scores without a scale", 1.0)
    yield scaled("score_scale_twice", "scores that are divided by K instead of sqrt(K)", width)
    yield scaled(
        "score_scale_of_d_model", "scores that are divided by sqrt(D) instead of sqrt(K)", math.sqrt(whole)
    )
    yield scaled("score_scale_of_d_model", "scores that are divided by D instead of sqrt(K)", whole)
    yield scaled("score_scale_inverted", "scores that are multiplied by sqrt(K)", 1 / math.sqrt(width))
    yield scaled(
        "score_scale_of_heads", "scores that are divided by sqrt(H) instead of sqrt(K)", math.sqrt(heads)
    )
    yield scaled("score_scale_fourth_root", "scores that are divided by the fourth root of K", width**0.25)
    for name in ("float32", "float16", "bfloat16"):
        yield scaled(
            "score_scale_rounded",
            f"a score scale that was rounded to {name}",
            _rounded(math.sqrt(width), name),
        )
        yield scaled(
            "score_scale_rounded",
            f"a score scale that was rounded to {name}",
            1 / _rounded(1 / math.sqrt(width), name),
        )
    turned = reordered(lambda y: y.swapaxes(-1, -2))
    yield changed("scores_transposed", "scores whose queries and keys have changed places", "ATT-3", turned)
    yield changed(
        "scores_of_queries",
        "the product of queries with themselves",
        "ATT-3",
        product(math.sqrt(width), "query"),
    )


def _rounded(value: float, name: str) -> float:
    return float(precision(name).round(np.float64(value)))


# Weights: (B, H, Q, S).


def of_weights(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with attention weights."""

    def masked(m: Step, tap: str) -> Node:
        return m.now.get(f"{tap.rpartition('.')[0]}.masked_scores") or m.beside(tap, "scores")

    def over(axis: int) -> Change:
        def softmax(m: Step, tap: str, y: Node) -> Node:
            turned = m.rearranged(masked(m, tap), lambda s: s.swapaxes(axis, -1))
            return m.rearranged(m.a.softmax(turned), lambda s: s.swapaxes(axis, -1))

        return softmax

    def bare(m: Step, tap: str, y: Node) -> Node:
        def softmax(scores: NDArray[np.floating]) -> NDArray[np.floating]:
            powers = np.exp(scores.astype(precision(m.dtype).storage))  # what overflows depends on the format
            shares: NDArray[np.floating] = powers / powers.sum(-1, keepdims=True)
            return shares

        return m.function(masked(m, tap), softmax)

    def logistic(m: Step, tap: str, y: Node) -> Node:
        return m.a.scale(m.a.shift(m.a.tanh(m.a.scale(masked(m, tap), 0.5), absolute=True), 1.0), 0.5)

    for axis, word in ((-2, "queries"), (1, "heads"), (0, "samples")):
        yield changed("softmax_axis", f"a softmax over {word} instead of keys", "ATT-5", over(axis))
    yield changed(
        "softmax_without_maximum", "a softmax that does not take the largest score off first", "ATT-5", bare
    )
    yield changed("softmax_left_out", "scores without a softmax", "ATT-5", lambda m, tap, y: masked(m, tap))
    yield changed("sigmoid_for_softmax", "the logistic function instead of a softmax", "ATT-5", logistic)
    floor, text = {"softmax_floor": -64.0}, "a softmax that clips what lies 64 below the largest score"
    yield Hypothesis(name="softmax_floor", text=text, clause="ATT-5", deviations=floor)
    if f"{tap.rpartition('.')[0]}.masked_scores" in question.forced or len(question.span) > 1:
        yield from of_masks_in_weights()


def of_masks_in_weights() -> Iterator[Hypothesis]:
    """Yield other ways to hide keys than by their scores."""

    def visible(m: Step, tap: str) -> NDArray[np.bool_]:
        return visible_keys(m.config, m.key_mask(), m.beside(tap, "scores").shape[1])

    def after(m: Step, tap: str, y: Node) -> Node:
        return m.a.replace(m.a.softmax(m.beside(tap, "scores")), visible(m, tap), 0.0)

    def zeroed(
        name: str, text: str, keep: Callable[[Step, NDArray[np.bool_]], NDArray[np.bool_]]
    ) -> Hypothesis:
        return changed(name, text, "MSK-5", lambda m, tap, y: m.a.replace(y, keep(m, visible(m, tap)), 0.0))

    def unmasked(m: Step, tap: str, y: Node) -> Node:
        return m.a.softmax(m.beside(tap, "scores"))

    def some(m: Step, keys: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.logical_or.reduce(keys, axis=-1, keepdims=True)

    yield changed("mask_not_used", "a softmax of the scores before they were masked", "MSK-3", unmasked)
    yield changed("mask_after_softmax", "weights that are masked after the softmax", "MSK-3", after)
    yield zeroed("weights_of_empty_rows_zero", "weights that are 0 where every key is masked", some)
    queries = "weights of padded queries that are set to 0"
    yield zeroed("weights_of_padded_queries_zero", queries, lambda m, keys: m.query_mask()[:, None, :, None])


# Context: (B, Q, D).


def of_context(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the weighted sum of values."""
    config = question.config
    heads, width = config.num_heads, config.head_dim

    def summed(weights: Callable[[Step, str], Node], values: str = "value") -> Change:
        def change(m: Step, tap: str, y: Node) -> Node:
            return m.a.reshape(m.a.einsum("bhqs,bshk->bqhk", weights(m, tap), m.beside(tap, values)), y.shape)

        return change

    def of_first_head(m: Step, tap: str, y: Node) -> Node:
        values = m.rearranged(m.beside(tap, "value"), lambda v: np.repeat(v[:, :, :1], heads, axis=2))
        return m.a.reshape(m.a.einsum("bhqs,bshk->bqhk", used(m, tap), values), y.shape)

    def used(m: Step, tap: str) -> Node:
        return m.now.get(f"{tap.rpartition('.')[0]}.masked_weights") or m.beside(tap, "weights")

    yield changed("context_of_keys", "a weighted sum of keys instead of values", "ATT-6", summed(used, "key"))
    yield changed(
        "context_of_queries", "a weighted sum of queries instead of values", "ATT-6", summed(used, "query")
    )
    turned = summed(lambda m, tap: m.rearranged(used(m, tap), lambda w: w.swapaxes(-1, -2)))
    yield changed("weights_transposed", "weights whose queries and keys have changed places", "ATT-6", turned)
    yield changed("value_of_first_head", "the values of the first head for all", "ATT-7", of_first_head)
    yield changed(
        "query_mask",
        "weights before they were overwritten",
        "MSK-8",
        summed(lambda m, tap: m.beside(tap, "weights")),
    )
    yield from options(config, "query_mask", ("none", "overwrite"), "MSK-8")
    joined = reordered(lambda y: y.reshape(*y.shape[:2], heads, width).transpose(0, 2, 1, 3).reshape(y.shape))
    yield changed(
        "heads_joined_by_reshape",
        "heads joined by a reshape of (B, H, Q, K) without a transposition",
        "ATT-6",
        joined,
    )
    mixed = reordered(lambda y: y.reshape(*y.shape[:2], heads, width).swapaxes(-1, -2).reshape(y.shape))
    yield changed("heads_interleaved", "heads joined column by column", "ATT-6", mixed)
    for order in orders(heads):
        text = f"heads joined in the order {', '.join(map(str, order))}"
        yield changed("heads_permuted", text, "ATT-6", reordered(_joined(order, width)))


def _joined(order: tuple[int, ...], width: int) -> Order:
    return lambda y: y.reshape(*y.shape[:2], len(order), width)[:, :, list(order)].reshape(y.shape)
