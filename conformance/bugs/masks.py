"""Bugs in masks (SPEC MSK-1 to MSK-8)."""

from __future__ import annotations

import dataclasses

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Edits
from concord.conformance.bugs.context import Context, Flags
from concord.conformance.bugs.operations import Array


def of_real(m: Context, real: Flags) -> Array:
    """Return the mask of other tokens, (B, S) or (B, Q, S)."""
    return m.masked(m.visible_of(real))


def by_length(m: Context) -> Flags:
    """Take padding for something that stands at the end alone."""
    return np.asarray(np.arange(m.real.shape[1]) < m.real.sum(axis=1, keepdims=True))


def mask_lost_where_lengths_are_equal(m: Context) -> Array:
    """Take a batch whose rows all have the same length for one without padding."""
    lengths = m.real.sum(axis=1)
    return of_real(m, np.ones_like(m.real) if (lengths == lengths[0]).all() else m.real)


def shifted(m: Context, by: int, free: bool | None = None, axis: int = -1) -> Array:
    """Return a mask that is moved.

    The place that is left free is visible, hidden, or has what falls off the end.
    """
    found = np.roll(m.real, by, axis=axis)
    if free is not None:
        found[..., 0 if by > 0 else -1] = free
    return of_real(m, found)


def earlier(m: Context) -> Flags:
    """Return which keys stand no later than each query, (Q, S)."""
    return np.tri(m.real_queries.shape[1], m.real.shape[-1], dtype=bool)


def causal(m: Context) -> Array:
    """Hide later tokens too."""
    return m.masked(m.visible & earlier(m))


def mask_repeated_for_heads_at_once(request: Request) -> Request:
    """Give samples the masks of others, where all heads are computed at once."""
    if request.config.head_computation != "batched":
        return request
    return dataclasses.replace(request, config=request.config.replace(mask_assignment="batch_major"))


def of_queries(m: Context) -> Flags:
    """Return which queries are real, (B, 1, Q, 1)."""
    return m.real_queries[:, None, :, None]


def overwritten(m: Context, kept: Flags, constant: float) -> Array:
    """Overwrite weights wherever a flag is False."""
    return m.where(kept, m.beside("weights"), constant)


EDITS: Edits = {
    "mask_missing": lambda m: m.beside("scores"),
    "mask_inverted": lambda m: m.masked(~m.visible),
    "mask_by_length": lambda m: of_real(m, by_length(m)),
    "mask_by_end": {
        "last real token": lambda m: of_real(m, np.maximum.accumulate(m.real[:, ::-1], axis=1)[:, ::-1]),
        "first padding": lambda m: of_real(m, np.minimum.accumulate(m.real, axis=1)),
    },
    "mask_by_id": lambda m: of_real(m, m.ids > m.config.pad_id),
    "mask_reversed": lambda m: of_real(m, m.real[..., ::-1]),
    "mask_of_first_sample": lambda m: of_real(m, np.broadcast_to(m.real[:1], m.real.shape)),
    "mask_causal": lambda m: m.masked(m.visible_of(m.real | True) & earlier(m)),
    "mask_causal_without_padding": lambda m: causal(m) if m.real.all() else m.y,
    "mask_on_queries": lambda m: m.masked(of_queries(m)),
    "mask_on_both": lambda m: m.masked(m.visible & of_queries(m)),
    "mask_in_first_layer_only": lambda m: m.beside("scores") if m.layer else m.y,
    "mask_result_dropped": lambda m: m.softmax(m.beside("scores"), 3),
    "mask_after_softmax": lambda m: m.where(m.visible, m.softmax(m.beside("scores"), 3), 0.0),
    "mask_multiplied": lambda m: m.where(m.visible, m.beside("scores"), 0.0),
    "mask_constant_without_sign": lambda m: m.masked(m.visible, -m.mask_constant),
    "mask_added_twice": lambda m: m.masked(m.visible, scores=m.masked(m.visible)),
    "mask_everywhere": lambda m: m.beside("scores") + m.mask_constant,
    "mask_minus_infinity": lambda m: m.where(m.visible, m.beside("scores"), float("-inf")),
    "mask_empty_row_zero": lambda m: m.where(m.visible.any(axis=-1, keepdims=True), m.y, 0.0),
    "query_mask_missing": lambda m: m.beside("weights"),
    "query_mask": lambda m: m.context(m.beside("weights")),
    "query_mask_zero": lambda m: overwritten(m, of_queries(m), 0.0),
    "query_mask_inverted": lambda m: overwritten(m, ~of_queries(m), m.mask_constant),
    "query_mask_on_keys": lambda m: overwritten(m, m.visible, m.mask_constant),
    "query_mask_added": lambda m: m.where(of_queries(m), m.y, 0.0),
}
