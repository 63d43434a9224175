"""Bugs of pooling (SPEC HED-1)."""

from __future__ import annotations

import numpy as np

from concord.conformance.bugs.context import Array, Context, Edits, Flags


def mean(m: Context, tokens: Flags, counted: Flags | None = None) -> Array:
    """Average some tokens; ``counted`` replaces them in the divisor, (B, T)."""
    total = m.sum(m.where(tokens[..., None], m.x, 0.0), 1)[:, 0]
    count = (tokens if counted is None else counted).sum(axis=1)[:, None]
    return total / m.constant(np.maximum(count, 1).astype(np.float64), m.x)


def every(m: Context) -> Flags:
    return m.real | True


def flatten_column_major(m: Context) -> Array:
    return m.reshape(m.transpose(m.x, (0, 2, 1)), (m.ids.shape[0], m.ids.shape[1] * m.config.d_model))


def samples_left_by_length(m: Context) -> Array:
    order = np.argsort(-m.real.sum(1), kind="stable")
    return m.concat([m.y[int(i) : int(i) + 1] for i in order], 0)


EDITS: Edits = {
    "pooling_mean_of_real_tokens": lambda m: mean(m, m.real),
    "pooling_maximum": lambda m: m.max(m.x, 1)[:, 0],
    "pooling_squeezed": lambda m: m.squeeze(m.x[:, :1]),
    "mean_over_padding": lambda m: mean(m, every(m)),
    "mean_of_unmasked_sum": lambda m: mean(m, every(m), m.real),
}
