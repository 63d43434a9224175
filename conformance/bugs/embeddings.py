"""Bugs in the embeddings (SPEC EMB-1 to EMB-6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.bug import Changes, weight
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array
from concord.spec.arrays import Ids
from concord.spec.config import EncoderConfig


def summed(order: str = "token position segment", /, **factors: Callable[[float], float]) -> Edit:
    """Return the sum of the vectors in an order, each times a factor made of D."""

    def edit(m: Context, y: Array) -> Array:
        terms = [
            m.beside(name) * factors[name](m.config.d_model) if name in factors else m.beside(name)
            for name in order.split()
            if name != "segment" or m.config.num_segments
        ]
        return sum(terms[1:], start=terms[0])

    return edit


def root(width: float) -> float:
    return float(width**0.5)


def none(width: float) -> float:
    return 0.0


def lookup(ids: Callable[[EncoderConfig, Ids], Ids]) -> Edit:
    """Return the edit that looks other ids up, made of the right ones."""

    def edit(m: Context, y: Array) -> Array:
        wrong = ids(m.config, m.ids)
        return y if (wrong == m.ids).all() else m.rows_of("token", wrong)

    return edit


def embedding_rows_renormalised(m: Context, y: Array) -> Array:
    """Shorten rows to length 1, as ``max_norm=1`` does."""
    length = m.sqrt(m.sum(y * y, -1))
    return m.where(length > 1.0, y / length, y)


def segments(ids: Callable[[Ids, int], Ids]) -> Edit:
    """Return the vectors of other segments, made of the right ones and the number of the last."""
    return lambda m, y: m.rows_of("segment", ids(m.batch.required("segment_ids"), m.config.num_segments - 1))


EDITS: Changes = {
    "embedding_scale_inverted": lambda m, y: y / float(m.config.d_model),
    "embedding_scale_on_positions": summed(position=root),
    "token_scaled_in_sum": summed(token=root),
    "token_left_out": summed(token=none),
    "position_left_out": summed(position=none),
    "segment_left_out": summed(segment=none),
    "embedding_ids_off_by_one": weight("embeddings.token.weight", lambda table: np.roll(table, 1, axis=0)),
    "embedding_segment_ids_left_out": segments(lambda ids, last: 0 * ids),
    "embedding_segment_ids_from_zero": segments(lambda ids, last: np.maximum(ids - 1, 0)),
    "segment_ids_inverted": segments(lambda ids, last: last - ids),
    "segment_ids_shifted": {
        "high": segments(lambda ids, last: np.minimum(ids + 1, last)),
        "low, 0 being the last": segments(lambda ids, last: (ids - 1) % (last + 1)),
        "high, the last being 0": segments(lambda ids, last: (ids + 1) % (last + 1)),
    },
    "embedding_ids_of_16_bits": lookup(lambda config, ids: ids & 0xFFFF),
}
