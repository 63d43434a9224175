"""Array layouts of sources, for weights in both directions, inputs and outputs.

B batch, T tokens, Q queries, S keys, H heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.arrays import Shape

Array = NDArray[Any]


@dataclass(frozen=True)
class WeightLayout:
    """A layout of a weight."""

    meaning: str
    rank: int  # of the canonical array
    # Maps canonical shape and number of heads to the source's shape of one piece.
    shape: Callable[[Shape, int], Shape]
    canonical: Callable[[Sequence[Array]], Array]  # from the source's pieces
    # Maps canonical array and number of heads to the source's pieces.
    native: Callable[[Array, int], Sequence[Array]]


def _as_it_is(meaning: str, rank: int) -> WeightLayout:
    return WeightLayout(meaning, rank, lambda s, h: s, lambda a: a[0], lambda a, h: [a])


WEIGHT_LAYOUTS: dict[str, WeightLayout] = {
    "vector": _as_it_is("(width)", 1),
    "table": _as_it_is("(rows, width)", 2),
    "in_out": _as_it_is("(in, out), the canonical layout", 2),
    "out_in": WeightLayout("(out, in)", 2, lambda s, h: s[::-1], lambda a: a[0].T, lambda a, h: [a.T]),
    "leading_one": WeightLayout(
        "(1, rows, width), a table that is added to a batch",
        2,
        lambda s, h: (1, *s),
        lambda a: a[0][0],
        lambda a, h: [a[None]],
    ),
    "conv1": WeightLayout(
        "(1, in, out), a convolution of width 1",
        2,
        lambda s, h: (1, *s),
        lambda a: a[0][0],
        lambda a, h: [a[None]],
    ),
    "columns": WeightLayout(
        "(in, out / H), one array for each head",
        2,
        lambda s, h: (s[0], s[1] // h),
        lambda a: np.concatenate(a, axis=1),
        lambda a, h: np.split(a, h, axis=1),
    ),
}
"""Layouts of a weight or its gradient."""


# Number of columns to copy at a time from a transposed matrix; otherwise the whole matrix would pass through
# the cache once per column.
STRIP = 128


def contiguous(array: Array) -> Array:
    """An array in C order; a scalar stays a scalar."""
    if array.ndim != 2 or array.flags.c_contiguous or array.shape[1] <= STRIP:
        return np.asarray(array, order="C")
    copy = np.empty(array.shape, array.dtype)
    for begin in range(0, array.shape[1], STRIP):
        copy[:, begin : begin + STRIP] = array[:, begin : begin + STRIP]
    return copy


Sizes = Mapping[str, int]


def _per_sample(array: Array, sizes: Sizes) -> Array:
    return np.broadcast_to(array, (sizes["batch"], *array.shape))


def _head_major(array: Array, sizes: Sizes) -> Array:
    return array.reshape(sizes["heads"], -1, *array.shape[1:]).swapaxes(0, 1)


def _heads_last(array: Array, sizes: Sizes) -> Array:
    return np.moveaxis(array.reshape(*array.shape[:-1], sizes["heads"], -1), -2, 1)


TENSOR_LAYOUTS: dict[str, tuple[str, Callable[[Array, Sizes], Array]]] = {
    "same": ("the canonical layout", lambda a, s: a),
    "flat": ("(B, 1) or (B) to (B)", lambda a, s: a.reshape(-1)),
    "per_sample": ("(T, D), the same for every sample, to (B, T, D)", _per_sample),
    "head_axis": ("(B, T, K), one head without an axis for it, to (B, T, 1, K)", lambda a, s: a[:, :, None]),
    "head_major": ("(H * B, Q, S), place h * B + b, to (B, H, Q, S)", _head_major),
    "heads_last": ("(B, Q, H * S), head after head, to (B, H, Q, S)", _heads_last),
}
"""Layouts of an input or output: meaning, and conversion to the canonical layout.

The functions take the sizes ``batch`` and ``heads``; on a wrong layout they raise ``ValueError`` or
``IndexError``.
"""
