"""Bugs in pooling, pooler, the length of what they give, and classifier (SPEC HED-1 to HED-3, HED-5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Edits
from concord.conformance.bugs.context import Context, Flags
from concord.conformance.bugs.operations import Array
from concord.spec.pooling import least_squares


def chosen(m: Context, tokens: Flags) -> Array:
    """Return the sum of some tokens, (B, T)."""
    return m.sum(m.where(tokens[..., None], m.x, 0.0), 1)[:, 0]


def mean(m: Context, tokens: Flags, divisors: Flags | None = None) -> Array:
    """Divide the sum of some tokens by the number of these, or of others, (B, T)."""
    count = (tokens if divisors is None else divisors).sum(axis=1)[:, None]
    return chosen(m, tokens) / m.constant(np.maximum(count, 1).astype(np.float64), m.x)


def every(m: Context) -> Flags:
    return m.real | True


def token(m: Context, places: NDArray[np.int64] | int) -> Array:
    """Take one token of each sample."""
    places = np.broadcast_to(places, len(m.real))
    return chosen(m, np.arange(m.real.shape[1]) == places[:, None])


def last_real(real: Flags) -> NDArray[np.int64]:
    return np.where(real.any(axis=1), real.shape[1] - 1 - np.argmax(real[:, ::-1], axis=1), 0)


def flat(m: Context, x: Array) -> Array:
    """Flatten what stands behind samples."""
    return m.reshape(x, (m.ids.shape[0], m.ids.shape[1] * m.config.d_model))


def squares(m: Context, axis: int = 1) -> Array:
    return m.sum(m.x * m.x, axis)


def epsilon_of(m: Context) -> float:
    """Return the least length."""
    return m.config.length_epsilon or 0.0


def at_least(m: Context, least: float) -> Array:
    """Return the length, (B, 1), of vectors whose sum of squares is at least a number."""
    return m.sqrt(m.where(squares(m) > least, squares(m), least))


def rightly(m: Context) -> Array:
    """Return the length that is right."""
    return at_least(m, least_squares(m.config, m.dtype))


EDITS: Edits = {
    "pooling_last_token": lambda m: token(m, m.real.shape[1] - 1),
    "pooling_last_real_token": lambda m: token(m, last_real(m.real)),
    "pooling_second_token": lambda m: token(m, min(1, m.real.shape[1] - 1)),
    "first_real_token_pooled": lambda m: token(m, m.real.argmax(1)),
    "token_by_length_pooled": lambda m: token(m, np.maximum(m.real.sum(1) - 1, 0)),
    "pooling_mean": lambda m: mean(m, every(m)),
    "pooling_mean_of_real_tokens": lambda m: mean(m, m.real),
    "pooling_maximum": lambda m: m.max(m.x, 1)[:, 0],
    "maximum_of_real_tokens_pooled": lambda m: m.max(m.where(m.real[..., None], m.x, float("-inf")), 1)[:, 0],
    "sum_pooled": lambda m: chosen(m, every(m)),
    "sum_of_real_tokens_pooled": lambda m: chosen(m, m.real),
    "pooling_axes_swapped": lambda m: m.x[0],
    "pooling_squeezed": lambda m: m.squeeze(m.x[:, :1]),
    "flatten_column_major": lambda m: flat(m, m.transpose(m.x, (0, 2, 1))),
    "flatten_padding_zeroed": lambda m: flat(m, m.where(m.real[..., None], m.x, 0.0)),
    "pooler_output_skipped": lambda m: m.linear("classifier", m.now["pooling"]),
    "pooler_activation_skipped": lambda m: m.linear("classifier", m.now["pooler.dense"]),
    "mean_divided_by_all": lambda m: mean(m, m.real, every(m)),
    "mean_of_unmasked_sum": lambda m: mean(m, every(m), m.real),
    "mean_without_first": lambda m: mean(m, m.real & (np.arange(m.real.shape[1]) > 0)),
    "length_of_sizes": lambda m: m.x / m.sum(m.abs(m.x), 1),
    "length_squared": lambda m: m.x / squares(m),
    "length_of_batch": lambda m: m.x / m.sqrt(squares(m, 0)),
    "length_epsilon_added": lambda m: m.x / (m.sqrt(squares(m)) + epsilon_of(m)),
    "length_epsilon_under_root": lambda m: m.x / m.sqrt(squares(m) + epsilon_of(m)),
    "length_epsilon_squared_added": lambda m: m.x / m.sqrt(squares(m) + epsilon_of(m) ** 2),
    "length_epsilon_as_square": lambda m: m.x / at_least(m, epsilon_of(m)),
    "length_however_small": lambda m: m.x / m.sqrt(squares(m)),
    "length_detached": lambda m: m.x / m.stop_gradient(rightly(m)),
}
