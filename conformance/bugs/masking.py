"""Bugs of masks (SPEC MSK-1 to MSK-8)."""

from __future__ import annotations

import numpy as np

from concord.conformance.bugs.attention import beyond_blocks, in_block, numbers_of_heads
from concord.conformance.bugs.bug import Edits, in_last_layer, only
from concord.conformance.bugs.context import Context, Flags
from concord.conformance.bugs.lookups import stale
from concord.conformance.bugs.operations import Array


def unmasked(m: Context) -> Array:
    return m.beside("scores")


def causal(m: Context) -> Array:
    return m.masked(m.visible & (np.tri(*tuple(m.y.shape)[-2:]) > 0))


def unmasked_where(m: Context, flags: Flags) -> Array:
    return m.where(flags, m.beside("scores"), m.y)


def mask_hides_own_key(m: Context) -> Array:
    queries, keys = tuple(m.y.shape)[-2:]
    return m.masked(m.visible & ~np.eye(queries, keys, dtype=bool)) if keys > 1 else m.y


def mask_of_first_call(m: Context) -> Array:
    real = stale(m, "mask", m.real)
    return m.y if (real == m.real).all() else m.masked(real[:, None, None, :])


EDITS: Edits = {
    "mask_missing": unmasked,
    "mask_inverted": lambda m: m.masked(~m.visible),
    "mask_constant_without_sign": lambda m: m.masked(m.visible, -m.mask_constant),
    "query_mask_zero": lambda m: m.where(m.real_queries[:, None, :, None], m.beside("weights"), 0.0),
    "layer_last_unmasked": in_last_layer(unmasked),
    "mask_not_for_first_query": lambda m: unmasked_where(m, m.flags(-2, 0)),
    "mask_not_for_first_key": lambda m: unmasked_where(m, m.flags(-1, 0)),
    "mask_of_first_head_alone": lambda m: unmasked_where(m, numbers_of_heads(m) > 0),
    "heads_beyond_four_unmasked": lambda m: unmasked_where(m, numbers_of_heads(m) >= 4),
    "mask_dropped_for_one_sample": only(lambda m: m.ids.shape[0] == 1, unmasked),
    "block_last_masked_as_first": lambda m: m.masked(
        m.visible[..., np.where(beyond_blocks(m), in_block(m), np.arange(m.ids.shape[1]))]
    ),
}
