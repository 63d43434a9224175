"""Bugs in the embeddings (SPEC EMB-1 to EMB-6)."""

from __future__ import annotations

import numpy as np

from concord.conformance.bugs.bug import Edits
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array
from concord.spec.arrays import Ids


def summed(m: Context, order: str = "token position segment", /, **factors: float) -> Array:
    """Return the sum of the vectors in an order, each times a factor."""
    terms = [
        m.beside(name) * factors[name] if name in factors else m.beside(name)
        for name in order.split()
        if name != "segment" or m.config.num_segments
    ]
    return sum(terms[1:], start=terms[0])


def lookup(m: Context, ids: Ids) -> Array:
    """Look other ids up."""
    return m.y if (ids == m.ids).all() else m.rows_of("token", ids)


def shifted(m: Context, by: int) -> Array:
    """Look up ids that are higher; they wrap round."""
    return lookup(m, (m.ids + by) % m.config.vocab_size)


def embedding_rows_renormalised(m: Context) -> Array:
    """Shorten rows to length 1, as ``max_norm=1`` does."""
    length = m.sqrt(m.sum(m.y * m.y, -1))
    return m.where(length > 1.0, m.y / length, m.y)


EDITS: Edits = {
    "embedding_scale_inverted": lambda m: m.y / float(m.config.d_model),
    "embedding_scale_on_positions": lambda m: summed(m, position=m.size(d_model=0.5)),
    "token_scaled_in_sum": lambda m: summed(m, token=m.size(d_model=0.5)),
    "embedding_segment_ids_left_out": lambda m: m.rows_of("segment", 0 * m.segments),
    "embedding_segment_ids_from_zero": lambda m: m.rows_of("segment", np.maximum(m.segments - 1, 0)),
    "segment_ids_inverted": lambda m: m.rows_of("segment", m.config.num_segments - 1 - m.segments),
    "segment_ids_shifted": {
        "high": lambda m: m.rows_of("segment", np.minimum(m.segments + 1, m.config.num_segments - 1)),
        "low, 0 being the last": lambda m: m.rows_of("segment", (m.segments - 1) % m.config.num_segments),
        "high, the last being 0": lambda m: m.rows_of("segment", (m.segments + 1) % m.config.num_segments),
    },
}
