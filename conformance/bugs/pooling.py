"""Bugs in pooling, pooler, the length of what they give, and classifier (SPEC HED-1 to HED-3, HED-5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Changes, of_source
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array
from concord.spec.pooling import least_squares


def chosen(m: Context, x: Array, tokens: Flags) -> Array:
    """Return the sum of some tokens, (B, T)."""
    return m.sum(m.where(tokens[..., None], x, 0.0), 1)[:, 0]


def every(real: Flags) -> Flags:
    return real | True


def the_real(real: Flags) -> Flags:
    return real


def mean(tokens: Callable[[Flags], Flags], divisors: Callable[[Flags], Flags] | None = None) -> Edit:
    """Divide the sum of some tokens by the number of others, made of the real ones, (B, T)."""

    def made(m: Context, x: Array) -> Array:
        count = (divisors or tokens)(m.real).sum(axis=1)[:, None]
        return chosen(m, x, tokens(m.real)) / m.constant(np.maximum(count, 1).astype(np.float64), x)

    return of_source(made)


def token(place: Callable[[Flags], NDArray[np.int64] | int]) -> Edit:
    """Take one token of each sample, made of the real ones."""

    def made(m: Context, x: Array) -> Array:
        places = np.broadcast_to(place(m.real), len(m.real))
        return chosen(m, x, np.arange(m.real.shape[1]) == places[:, None])

    return of_source(made)


def last_real(real: Flags) -> NDArray[np.int64]:
    return np.where(real.any(axis=1), real.shape[1] - 1 - np.argmax(real[:, ::-1], axis=1), 0)


def flat(m: Context, x: Array) -> Array:
    """Flatten what stands behind samples."""
    return m.reshape(x, (m.ids.shape[0], m.ids.shape[1] * m.config.d_model))


def lengthened(function: Edit) -> Edit:
    """Divide the pooled vector, (B, D), by another length, (B, 1)."""
    return of_source(lambda m, x: x / function(m, x))


def squares(m: Context, x: Array, axis: int = 1) -> Array:
    return m.sum(x * x, axis)


def epsilon_of(m: Context) -> float:
    """Return the least length."""
    return m.config.length_epsilon or 0.0


def at_least(m: Context, x: Array, least: float) -> Array:
    """Return the length of vectors whose sum of squares is at least a number."""
    return m.sqrt(m.where(squares(m, x) > least, squares(m, x), least))


def rightly(m: Context, x: Array) -> Array:
    """Return the length that is right."""
    return at_least(m, x, least_squares(m.config, m.dtype))


EDITS: Changes = {
    "pooling_last_token": token(lambda real: real.shape[1] - 1),
    "pooling_last_real_token": token(last_real),
    "pooling_second_token": token(lambda real: min(1, real.shape[1] - 1)),
    "first_real_token_pooled": token(lambda real: real.argmax(1)),
    "token_by_length_pooled": token(lambda real: np.maximum(real.sum(1) - 1, 0)),
    "pooling_mean": mean(every),
    "pooling_mean_of_real_tokens": mean(the_real),
    "pooling_maximum": of_source(lambda m, x: m.max(x, 1)[:, 0]),
    "maximum_of_real_tokens_pooled": of_source(
        lambda m, x: m.max(m.where(m.real[..., None], x, float("-inf")), 1)[:, 0]
    ),
    "sum_pooled": of_source(lambda m, x: chosen(m, x, every(m.real))),
    "sum_of_real_tokens_pooled": of_source(lambda m, x: chosen(m, x, m.real)),
    "pooling_axes_swapped": of_source(lambda m, x: x[0]),
    "pooling_squeezed": of_source(lambda m, x: m.squeeze(x[:, :1])),
    "flatten_column_major": of_source(lambda m, x: flat(m, m.transpose(x, (0, 2, 1)))),
    "flatten_padding_zeroed": of_source(lambda m, x: flat(m, m.where(m.real[..., None], x, 0.0))),
    "pooler_output_skipped": lambda m, y: m.linear("classifier", m.now["pooling"]),
    "pooler_activation_skipped": lambda m, y: m.linear("classifier", m.now["pooler.dense"]),
    "mean_divided_by_all": mean(the_real, every),
    "mean_of_unmasked_sum": mean(every, the_real),
    "mean_without_first": mean(lambda real: real & (np.arange(real.shape[1]) > 0)),
    "mean_replaced_by_first": of_source(lambda m, x: x[:, 0]),
    "length_of_sizes": lengthened(lambda m, x: m.sum(m.abs(x), 1)),
    "length_squared": lengthened(squares),
    "length_of_batch": lengthened(lambda m, x: m.sqrt(squares(m, x, 0))),
    "length_epsilon_added": lengthened(lambda m, x: m.sqrt(squares(m, x)) + epsilon_of(m)),
    "length_epsilon_under_root": lengthened(lambda m, x: m.sqrt(squares(m, x) + epsilon_of(m))),
    "length_epsilon_squared_added": lengthened(lambda m, x: m.sqrt(squares(m, x) + epsilon_of(m) ** 2)),
    "length_epsilon_as_square": lengthened(lambda m, x: at_least(m, x, epsilon_of(m))),
    "length_however_small": lengthened(lambda m, x: m.sqrt(squares(m, x))),
    "length_detached": lengthened(lambda m, x: m.stop_gradient(rightly(m, x))),
}
