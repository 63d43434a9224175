"""Bugs in pooling, pooler, the length of what they give, and classifier (SPEC HED-1 to HED-3, HED-5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import REFUSED, Bug, Change, edited, option
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array
from concord.spec.pooling import least_squares

HUB = "https://github.com/"


def pooled(function: Callable[[Context, Array], Array]) -> Change:
    """Return the change to another function of what the last layer gives, (B, T, D)."""
    return edited(lambda m, y: function(m, m.source()), "pooling")


def chosen(m: Context, x: Array, tokens: NDArray[np.bool_]) -> Array:
    """Return the sum of some tokens, (B, T)."""
    return m.o.sum(m.o.where(tokens[..., None], x, 0.0), 1)[:, 0]


def mean_of_real(m: Context, x: Array) -> Array:
    """Average over real tokens."""
    return chosen(m, x, m.real) / m.o.constant(np.maximum(m.real.sum(axis=1), 1)[:, None], x)


def last_real(m: Context, x: Array) -> Array:
    """Take the last real token."""
    tokens = m.real.shape[1]
    last = np.where(m.real.any(axis=1), tokens - 1 - np.argmax(m.real[:, ::-1], axis=1), 0)
    return chosen(m, x, np.arange(tokens) == last[:, None])


def flat(m: Context, x: Array) -> Array:
    """Flatten what stands behind samples."""
    return m.o.reshape(x, (m.ids.shape[0], m.ids.shape[1] * m.config.d_model))


def mean_of(m: Context, x: Array, tokens: NDArray[np.bool_], divisors: NDArray[np.bool_]) -> Array:
    """Divide the sum of some tokens by the number of others, (B, T) each."""
    return chosen(m, x, tokens) / m.o.constant(np.maximum(divisors.sum(axis=1), 1)[:, None], x)


def lengthened(function: Callable[[Context, Array], Array]) -> Change:
    """Return the change to another length, (B, 1), that the pooled vector, (B, D), is divided by."""
    return edited(lambda m, y: m.source() / function(m, m.source()), "normalized")


def epsilon_of(m: Context) -> float:
    """Return the least length."""
    return m.config.length_epsilon or 0.0


def rightly(m: Context, x: Array) -> Array:
    """Return the length that is right."""
    squares, least = m.o.sum(x * x, 1), least_squares(m.config, m.dtype)
    return m.o.sqrt(m.o.where(squares > least, squares, least))


def sentence(name: str, what: str, change: Change, **fields: Any) -> Bug:
    """Return a mistake in a sentence embedding."""
    return mutant(name, what, **{"variant": "sentence-bert", "change": change, "clause": "HED-1", **fields})


def length(name: str, what: str, change: Change, **fields: Any) -> Bug:
    """Return a mistake in the length that a sentence embedding is divided by."""
    return sentence(name, what, change, **{"first": ("normalized",), "clause": "HED-5", **fields})


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{"name": name, "group": "pooling", "what": what, "variant": "bert", "first": ("pooling",), **fields}
    )


BUGS = (
    mutant(
        "pooling_last_token",
        "The last token is pooled, not the first.",
        input="more than one token",
        change=pooled(lambda m, x: x[:, -1]),
        cause="last_token_pooled",
        clause="HED-1",
    ),
    mutant(
        "pooling_last_real_token",
        "The last real token is pooled, not the first.",
        input="more than one token",
        change=pooled(last_real),
        cause="last_real_token_pooled",
        clause="HED-1",
    ),
    mutant(
        "pooling_second_token",
        "The token after the first is pooled.",
        input="more than one token",
        change=pooled(lambda m, x: x[:, min(1, tuple(x.shape)[1] - 1)]),
        cause="second_token_pooled",
        clause="HED-1",
    ),
    mutant(
        "pooling_mean",
        "All tokens are averaged, padding included.",
        input="more than one token",
        change=pooled(lambda m, x: m.o.mean(x, 1)[:, 0]),
        cause="mean_pooled",
        clause="HED-1",
    ),
    mutant(
        "pooling_mean_of_real_tokens",
        "Real tokens are averaged.",
        input="more than one token",
        change=pooled(mean_of_real),
        cause="mean_of_real_tokens_pooled",
        clause="HED-1",
    ),
    mutant(
        "pooling_maximum",
        "The largest number of each feature is pooled.",
        input="more than one token",
        change=pooled(lambda m, x: m.o.max(x, 1)[:, 0]),
        cause="maximum_pooled",
        clause="HED-1",
    ),
    mutant(
        "pooling_axes_swapped",
        "The first sample is pooled, not the first token: batch and tokens are mixed up.",
        first=("pooling", REFUSED),
        input="more than one token",
        change=pooled(lambda m, x: x[0]),
        clause="HED-1",
    ),
    mutant(
        "pooling_squeezed",
        "Axes of size 1 are dropped, the batch axis with them if there is one sample.",
        scenario="single",
        first=("pooling", REFUSED),
        input="a batch of one sample",
        alone=True,
        change=pooled(lambda m, x: m.o.squeeze(x[:, :1])),
        clause="HED-1",
    ),
    mutant(
        "flatten_column_major",
        "Features are flattened before tokens.",
        variant="tf1-text-classifier",
        change=pooled(lambda m, x: flat(m, m.o.transpose(x, (0, 2, 1)))),
        cause="flatten_order",
        clause="HED-1",
    ),
    mutant(
        "flatten_padding_zeroed",
        "Padded rows are zeroed before flattening.",
        variant="tf1-text-classifier",
        input="padding",
        change=pooled(lambda m, x: flat(m, m.o.where(m.real[..., None], x, 0.0))),
        cause="padding_flattened_as_zero",
        clause="HED-1",
    ),
    mutant(
        "pooler_skipped",
        "The pooler's linear layer is left out.",
        first=("pooler.dense",),
        change=edited(lambda m, y: m.source(), "pooler.dense"),
        cause="linear_missing",
        clause="HED-2",
    ),
    mutant(
        "pooler_tanh_missing",
        "No tanh follows the pooler's linear layer.",
        first=("pooler.output",),
        change=edited(lambda m, y: m.source(), "pooler.output"),
        cause="pooler_activation_missing",
        clause="HED-2",
    ),
    mutant(
        "pooler_relu_for_tanh",
        "A ReLU follows the pooler's linear layer.",
        first=("pooler.output",),
        change=edited(lambda m, y: m.o.relu(m.source()), "pooler.output"),
        cause="pooler_activation",
        clause="HED-2",
    ),
    mutant(
        "pooler_tanh_for_relu",
        "A tanh follows the linear layer of the head, as in BERT.",
        variant="distilbert",
        first=("pooler.output",),
        change=edited(lambda m, y: m.o.tanh(m.source()), "pooler.output"),
        cause="pooler_activation",
        clause="HED-2",
    ),
    mutant(
        "pooler_relu_missing",
        "No ReLU follows the linear layer of the head.",
        variant="distilbert",
        first=("pooler.output",),
        change=edited(lambda m, y: m.source(), "pooler.output"),
        cause="pooler_activation_missing",
        clause="HED-2",
    ),
    sentence(
        "mean_over_padding",
        "The mean is over all tokens, padding included.",
        pooled(lambda m, x: m.o.mean(x, 1)[:, 0]),
        input="padding",
        cause="mean_pooled",
        source=f"{HUB}huggingface/transformers/issues/17463",
    ),
    sentence(
        "mean_divided_by_all",
        "The sum of real tokens is divided by the number of all.",
        pooled(lambda m, x: mean_of(m, x, m.real, m.real | True)),
        input="padding",
        cause="mean_divided_by_all",
    ),
    sentence(
        "mean_of_unmasked_sum",
        "The sum of all tokens is divided by the number of real ones.",
        pooled(lambda m, x: mean_of(m, x, m.real | True, m.real)),
        input="padding",
        cause="mean_of_all_by_real",
        source=f"{HUB}lanterndata/lantern_extras/pull/91",
    ),
    sentence(
        "mean_replaced_by_first",
        "The first token is pooled, as in BERT's classifier.",
        pooled(lambda m, x: x[:, 0]),
        cause="first_token_pooled",
    ),
    length(
        "length_kept",
        "The sentence embedding is not normalised.",
        edited(lambda m, y: m.source(), "normalized"),
        cause="length_kept",
    ),
    length(
        "length_of_sizes",
        "The vector is divided by the sum of its sizes.",
        lengthened(lambda m, x: m.o.sum(m.o.relu(x) + m.o.relu(-x), 1)),
        cause="length_of_sizes",
    ),
    length(
        "length_squared",
        "The vector is divided by the sum of its squares, without the root.",
        lengthened(lambda m, x: m.o.sum(x * x, 1)),
        cause="length_squared",
    ),
    length(
        "length_of_batch",
        "Lengths are taken along the batch axis.",
        lengthened(lambda m, x: m.o.sqrt(m.o.sum(x * x, 0))),
        cause="length_of_batch",
    ),
    length(
        "length_epsilon_added",
        "Epsilon is added to the length.",
        lengthened(lambda m, x: m.o.sqrt(m.o.sum(x * x, 1)) + epsilon_of(m)),
        scenario="short",
        cause="length_epsilon_added",
    ),
    length(
        "length_epsilon_under_root",
        "Epsilon is added under the root.",
        lengthened(lambda m, x: m.o.sqrt(m.o.sum(x * x, 1) + epsilon_of(m))),
        scenario="short",
        cause="length_epsilon_added",
    ),
    length(
        "length_epsilon_as_square",
        "The sum of squares is compared with epsilon, not with its square.",
        lengthened(
            lambda m, x: m.o.sqrt(
                m.o.where(m.o.sum(x * x, 1) > epsilon_of(m), m.o.sum(x * x, 1), epsilon_of(m))
            )
        ),
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
    length(
        "length_detached",
        "No gradient flows through the length.",
        lengthened(lambda m, x: m.o.stop_gradient(rightly(m, x))),
        first=("gradients.taps.pooling", "gradients.*"),
        cause="detached_length",
    ),
    mutant(
        "logits_softmaxed",
        "The model returns probabilities, not logits.",
        first=("logits",),
        change=edited(lambda m, y: m.o.softmax(y, 1), "logits"),
        cause="logits_softmaxed",
        clause="HED-3",
    ),
)
