"""Bugs in pooling, pooler, the length of what they give, and classifier (SPEC HED-1 to HED-3, HED-5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import REFUSED, group, of_source, option
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array
from concord.spec.pooling import least_squares

SEVERAL = {"input": "more than one token"}
SENTENCE = {"variant": "sentence-bert"}

GROUP = group("pooling", "pooling", clause="HED-1")
HEAD = group("pooling", "pooler.output", clause="HED-2")
LOGITS = group("pooling", "logits", clause="HED-3")
LENGTH = group("pooling", "normalized", clause="HED-5", **SENTENCE)
bug, also, length = GROUP.bug, GROUP.also, LENGTH.bug


def chosen(m: Context, x: Array, tokens: Flags) -> Array:
    """Return the sum of some tokens, (B, T)."""
    return m.o.sum(m.o.where(tokens[..., None], x, 0.0), 1)[:, 0]


def mean(tokens: Callable[[Flags], Flags], divisors: Callable[[Flags], Flags] | None = None) -> Edit:
    """Divide the sum of some tokens by the number of others, made of the real ones, (B, T)."""

    def made(m: Context, x: Array) -> Array:
        count = (divisors or tokens)(m.real).sum(axis=1)[:, None]
        return chosen(m, x, tokens(m.real)) / m.o.constant(np.maximum(count, 1).astype(np.float64), x)

    return of_source(made)


def every(real: Flags) -> Flags:
    return real | True


def the_real(real: Flags) -> Flags:
    return real


def without_first(real: Flags) -> Flags:
    return real & (np.arange(real.shape[1]) > 0)


def token(place: Callable[[Flags], NDArray[np.int64] | int]) -> Edit:
    """Take one token of each sample, made of the real ones."""

    def made(m: Context, x: Array) -> Array:
        places = np.broadcast_to(place(m.real), len(m.real))
        return chosen(m, x, np.arange(m.real.shape[1]) == places[:, None])

    return of_source(made)


def last_real(real: Flags) -> NDArray[np.int64]:
    return np.where(real.any(axis=1), real.shape[1] - 1 - np.argmax(real[:, ::-1], axis=1), 0)


def largest(m: Context, x: Array, tokens: Flags) -> Array:
    return m.o.max(m.o.where(tokens[..., None], x, float("-inf")), 1)[:, 0]


def flat(m: Context, x: Array) -> Array:
    """Flatten what stands behind samples."""
    return m.o.reshape(x, (m.ids.shape[0], m.ids.shape[1] * m.config.d_model))


def classified(tap: str) -> Edit:
    """Return the logits of another tap than they should be of."""
    return lambda m, y: m.linear("classifier", m.now[tap])


def lengthened(function: Callable[[Context, Array], Array]) -> Edit:
    """Divide the pooled vector, (B, D), by another length, (B, 1)."""
    return of_source(lambda m, x: x / function(m, x))


def squares(m: Context, x: Array, axis: int = 1) -> Array:
    return m.o.sum(x * x, axis)


def epsilon_of(m: Context) -> float:
    """Return the least length."""
    return m.config.length_epsilon or 0.0


def at_least(m: Context, x: Array, least: float) -> Array:
    """Return the length of vectors whose sum of squares is at least a number."""
    return m.o.sqrt(m.o.where(squares(m, x) > least, squares(m, x), least))


def rightly(m: Context, x: Array) -> Array:
    """Return the length that is right."""
    return at_least(m, x, least_squares(m.config, m.dtype))


BUGS = (
    bug(
        "pooling_last_token",
        "The last token is pooled, not the first.",
        token(lambda real: real.shape[1] - 1),
        cause="last_token_pooled",
        **SEVERAL,
    ),
    bug(
        "pooling_last_real_token",
        "The last real token is pooled, not the first.",
        token(last_real),
        cause="last_real_token_pooled",
        **SEVERAL,
    ),
    bug(
        "pooling_second_token",
        "The token after the first is pooled.",
        token(lambda real: min(1, real.shape[1] - 1)),
        cause="second_token_pooled",
        **SEVERAL,
    ),
    also("first_real_token_pooled", "the first real token", token(lambda real: real.argmax(1))),
    also(
        "token_by_length_pooled",
        "the token at the number of real ones",
        token(lambda real: np.maximum(real.sum(1) - 1, 0)),
    ),
    bug(
        "pooling_mean",
        "All tokens are averaged, padding included.",
        mean(every),
        cause="mean_pooled",
        **SEVERAL,
    ),
    bug(
        "pooling_mean_of_real_tokens",
        "Real tokens are averaged.",
        mean(the_real),
        cause="mean_of_real_tokens_pooled",
        **SEVERAL,
    ),
    bug(
        "pooling_maximum",
        "The largest number of each feature is pooled.",
        of_source(lambda m, x: m.o.max(x, 1)[:, 0]),
        cause="maximum_pooled",
        **SEVERAL,
    ),
    also(
        "maximum_of_real_tokens_pooled",
        "the maximum over real tokens",
        of_source(lambda m, x: largest(m, x, m.real)),
    ),
    also("sum_pooled", "the sum of all tokens", of_source(lambda m, x: chosen(m, x, every(m.real)))),
    also("sum_of_real_tokens_pooled", "the sum of real tokens", of_source(lambda m, x: chosen(m, x, m.real))),
    bug(
        "pooling_axes_swapped",
        "The first sample is pooled, not the first token: batch and tokens are mixed up.",
        of_source(lambda m, x: x[0]),
        first=("pooling", REFUSED),
        cause=None,
        **SEVERAL,
    ),
    bug(
        "pooling_squeezed",
        "Axes of size 1 are dropped, the batch axis with them if there is one sample.",
        of_source(lambda m, x: m.o.squeeze(x[:, :1])),
        scenario="single",
        first=("pooling", REFUSED),
        input="a batch of one sample",
        alone=True,
        cause=None,
    ),
    bug(
        "flatten_column_major",
        "Features are flattened before tokens.",
        of_source(lambda m, x: flat(m, m.o.transpose(x, (0, 2, 1)))),
        variant="tf1-text-classifier",
        cause="flatten_order",
    ),
    bug(
        "flatten_padding_zeroed",
        "Padded rows are zeroed before flattening.",
        of_source(lambda m, x: flat(m, m.o.where(m.real[..., None], x, 0.0))),
        variant="tf1-text-classifier",
        input="padding",
        cause="padding_flattened_as_zero",
    ),
    HEAD.bug(
        "pooler_skipped",
        "The pooler's linear layer is left out.",
        lambda m, y: m.source(),
        "pooler.dense",
        cause="linear_missing",
    ),
    HEAD.bug(
        "pooler_tanh_missing",
        "No tanh follows the pooler's linear layer.",
        lambda m, y: m.source(),
        cause="pooler_activation_missing",
    ),
    HEAD.bug(
        "pooler_relu_missing",
        "No ReLU follows the linear layer of the head.",
        lambda m, y: m.source(),
        variant="distilbert",
        cause="pooler_activation_missing",
    ),
    HEAD.bug(
        "pooler_relu_for_tanh",
        "A ReLU follows the pooler's linear layer.",
        of_source(lambda m, x: m.o.relu(x)),
        cause="pooler_activation",
    ),
    HEAD.bug(
        "pooler_tanh_for_relu",
        "A tanh follows the linear layer of the head, as in BERT.",
        of_source(lambda m, x: m.o.tanh(x)),
        variant="distilbert",
        cause="pooler_activation",
    ),
    HEAD.also(
        "pooler_activation", "the logistic function after the pooler", of_source(lambda m, x: m.o.sigmoid(x))
    ),
    HEAD.also(
        "pooler_activation", "a GELU after the pooler", of_source(lambda m, x: m.activation(x, "gelu_erf"))
    ),
    *(
        HEAD.also(
            f"pooler_{name}skipped",
            f"`{tap}` instead of `pooler.output`",
            classified(tap),
            "logits",
        )
        for name, tap in (("", "pooling"), ("activation_", "pooler.dense"))
    ),
    bug(
        "mean_over_padding",
        "The mean is over all tokens, padding included.",
        mean(every),
        input="padding",
        cause="mean_pooled",
        source="huggingface/transformers/issues/17463",
        **SENTENCE,
    ),
    bug(
        "mean_divided_by_all",
        "The sum of real tokens is divided by the number of all.",
        mean(the_real, every),
        input="padding",
        **SENTENCE,
    ),
    bug(
        "mean_of_unmasked_sum",
        "The sum of all tokens is divided by the number of real ones.",
        mean(every, the_real),
        input="padding",
        cause="mean_of_all_by_real",
        source="lanterndata/lantern_extras/pull/91",
        **SENTENCE,
    ),
    also("mean_without_first", "the mean of real tokens without the first", mean(without_first)),
    bug(
        "mean_replaced_by_first",
        "The first token is pooled, as in BERT's classifier.",
        of_source(lambda m, x: x[:, 0]),
        cause="first_token_pooled",
        **SENTENCE,
    ),
    length("length_kept", "The sentence embedding is not normalised.", lambda m, y: m.source()),
    length(
        "length_of_sizes",
        "The vector is divided by the sum of its sizes.",
        lengthened(lambda m, x: m.o.sum(m.o.abs(x), 1)),
    ),
    length(
        "length_squared",
        "The vector is divided by the sum of its squares, without the root.",
        lengthened(squares),
    ),
    length(
        "length_of_batch",
        "Lengths are taken along the batch axis.",
        lengthened(lambda m, x: m.o.sqrt(squares(m, x, 0))),
    ),
    length(
        "length_epsilon_added",
        "Epsilon is added to the length.",
        lengthened(lambda m, x: m.o.sqrt(squares(m, x)) + epsilon_of(m)),
        scenario="short",
    ),
    length(
        "length_epsilon_under_root",
        "Epsilon is added under the root.",
        lengthened(lambda m, x: m.o.sqrt(squares(m, x) + epsilon_of(m))),
        scenario="short",
        cause="length_epsilon_added",
    ),
    LENGTH.also(
        "length_epsilon_added",
        "the square of epsilon added to its square",
        lengthened(lambda m, x: m.o.sqrt(squares(m, x) + epsilon_of(m) ** 2)),
    ),
    length(
        "length_epsilon_as_square",
        "The sum of squares is compared with epsilon, not with its square.",
        lengthened(lambda m, x: at_least(m, x, epsilon_of(m))),
        scenario="short",
        cause="length_epsilon_squared",
    ),
    length(
        "length_without_epsilon",
        "Short vectors are divided by their length all the same.",
        option(length_epsilon=1e-12),
        scenario="short",
        alone=True,
        cause="length_epsilon or length_without_epsilon",
        input="vectors shorter than epsilon",
    ),
    LENGTH.also(
        "length_without_epsilon",
        "its length, however small",
        lengthened(lambda m, x: m.o.sqrt(squares(m, x))),
    ),
    length(
        "length_detached",
        "No gradient flows through the length.",
        lengthened(lambda m, x: m.o.stop_gradient(rightly(m, x))),
        first=("gradients.taps.pooling", "gradients.*"),
        cause="detached_length",
    ),
    LOGITS.bug(
        "logits_softmaxed", "The model returns probabilities, not logits.", lambda m, y: m.o.softmax(y, 1)
    ),
    LOGITS.also(
        "logits_softmaxed", "log-probabilities instead of logits", lambda m, y: m.o.log_softmax(y, 1)
    ),
    LOGITS.also("logits_softmaxed", "a probability instead of a logit", lambda m, y: m.o.sigmoid(y)),
    LOGITS.also("logits_activated", "logits that pass through a ReLU", lambda m, y: m.o.relu(y)),
    LOGITS.also("logits_activated", "logits that pass through tanh", lambda m, y: m.o.tanh(y)),
)
