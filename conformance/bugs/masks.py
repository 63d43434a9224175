"""Bugs in masks (SPEC MSK-1 to MSK-8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Changes
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array


def of_real(flags: Callable[[Flags], Flags]) -> Edit:
    """Return the mask of other tokens, made of the real ones, (B, S) or (B, Q, S)."""
    return lambda m, y: m.masked(m.visible_of(flags(m.real)))


def by_length(real: Flags) -> Flags:
    """Take padding for something that stands at the end alone."""
    return np.asarray(np.arange(real.shape[1]) < real.sum(axis=1, keepdims=True))


def lost_where_lengths_are_equal(real: Flags) -> Flags:
    """Take a batch whose rows all have the same length for one without padding."""
    lengths = real.sum(axis=1)
    return np.ones_like(real) if (lengths == lengths[0]).all() else real


def shifted(by: int, free: bool | None = None, axis: int = -1) -> Edit:
    """Return a mask that is moved.

    The place that is left free is visible, hidden, or has what falls off the end.
    """

    def moved(real: Flags) -> Flags:
        found = np.roll(real, by, axis=axis)
        if free is not None:
            found[..., 0 if by > 0 else -1] = free
        return found

    return of_real(moved)


def earlier(m: Context) -> Flags:
    """Return which keys stand no later than each query, (Q, S)."""
    return np.tri(m.real_queries.shape[1], m.real.shape[-1], dtype=bool)


def causal(m: Context, y: Array) -> Array:
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


EDITS: Changes = {
    "mask_missing": lambda m, y: m.beside("scores"),
    "mask_inverted": lambda m, y: m.masked(~m.visible),
    "mask_by_length": of_real(by_length),
    "mask_by_end": {
        "last real token": of_real(lambda real: np.maximum.accumulate(real[:, ::-1], axis=1)[:, ::-1]),
        "first padding": of_real(lambda real: np.minimum.accumulate(real, axis=1)),
    },
    "mask_by_id": lambda m, y: m.masked(m.visible_of(m.ids > m.config.pad_id)),
    "mask_reversed": of_real(lambda real: real[..., ::-1]),
    "mask_of_first_sample": of_real(lambda real: np.broadcast_to(real[:1], real.shape)),
    "mask_lost_where_lengths_are_equal": of_real(lost_where_lengths_are_equal),
    "mask_causal": lambda m, y: m.masked(m.visible_of(m.real | True) & earlier(m)),
    "mask_causal_without_padding": lambda m, y: causal(m, y) if m.real.all() else y,
    "mask_on_queries": lambda m, y: m.masked(of_queries(m)),
    "mask_on_both": lambda m, y: m.masked(m.visible & of_queries(m)),
    "mask_in_first_layer_only": lambda m, y: m.beside("scores") if m.layer else y,
    "mask_result_dropped": lambda m, y: m.softmax(m.beside("scores"), 3),
    "mask_after_softmax": lambda m, y: m.where(m.visible, m.softmax(m.beside("scores"), 3), 0.0),
    "mask_multiplied": lambda m, y: m.where(m.visible, m.beside("scores"), 0.0),
    "mask_constant_without_sign": lambda m, y: m.masked(m.visible, -m.mask_constant),
    "mask_added_twice": lambda m, y: m.masked(m.visible, scores=m.masked(m.visible)),
    "mask_everywhere": lambda m, y: m.beside("scores") + m.mask_constant,
    "mask_minus_infinity": lambda m, y: m.where(m.visible, m.beside("scores"), float("-inf")),
    "mask_empty_row_zero": lambda m, y: m.where(m.visible.any(axis=-1, keepdims=True), y, 0.0),
    "query_mask_missing": lambda m, y: m.beside("weights"),
    "query_mask": lambda m, y: m.context(m.beside("weights")),
    "query_mask_zero": lambda m, y: overwritten(m, of_queries(m), 0.0),
    "query_mask_inverted": lambda m, y: overwritten(m, ~of_queries(m), m.mask_constant),
    "query_mask_on_keys": lambda m, y: overwritten(m, m.visible, m.mask_constant),
    "query_mask_added": lambda m, y: m.where(of_queries(m), y, 0.0),
}
