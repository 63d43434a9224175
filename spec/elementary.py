"""What the reference needs of elementary functions and products, in every floating-point type that it
computes in.

NumPy has exponentials and logarithms of ``numpy.longdouble``, and no error function; it multiplies such
matrices one number at a time.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from concord.spec.arrays import Array
from concord.spec.precision import EXTENDED

_SATURATED = 6.7
"""From where on the error function differs from 1 by less than a unit in the last place of 64 bits."""

_FEW = 1 << 16
"""Products of that many numbers, and fewer, are not worth being split."""

_FEW_ROWS = 8
"""Nor are those of that many rows, and fewer.

Splitting what they are multiplied with would take longer than the products.
"""


def erf(x: Array) -> Array:
    """Error function of each element, to within a few units in the last place of the type."""
    if x.dtype != EXTENDED or EXTENDED is np.float64:
        plain: Array = special.erf(x)
        return plain
    # erf(x) = 2 / sqrt(pi) * exp(-x²) * sum of 2^n x^(2n+1) / (1 * 3 * … * (2n+1)): all terms have one sign.
    near = np.clip(x, -_SATURATED, _SATURATED)
    square = near * near
    term = near.copy()
    total = near.copy()
    for n in range(1, 400):
        term *= square * 2 / EXTENDED(2 * n + 1)
        total += term
        if not (abs(term) > np.finfo(EXTENDED).eps / 4 * abs(total)).any():
            break
    value = 2 / np.sqrt(4 * np.arctan(EXTENDED(1))) * np.exp(-square) * total
    return np.where(abs(x) < _SATURATED, value, np.where(np.isnan(x), x, np.sign(x)))


def logistic(x: Array) -> Array:
    """Logistic function of each element, without overflow."""
    small = np.exp(-abs(x))
    share: Array = np.where(x >= 0, 1, small) / (1 + small)
    return share


def contract(subscripts: str, a: Array, b: Array) -> Array:
    """Contract two arrays over the indices that the result lacks, by one matrix product.

    No index may appear twice in one of them.
    """
    if _comes_out_turned(subscripts):
        index_a, index_b, index = subscripts.replace("->", ",").split(",")
        subscripts, a, b = f"{index_b},{index_a}->{index}", b, a
    order_a, order_b, result, restore = _plan(subscripts)
    sizes = dict(zip(subscripts.split(",")[0], a.shape, strict=True)) | dict(
        zip(subscripts.split("->")[0].split(",")[1], b.shape, strict=True)
    )
    batch, rows, inner, columns = (math.prod(sizes[i] for i in group) for group in result)
    left = a.transpose(order_a).reshape(batch, rows, inner)
    right = b.transpose(order_b).reshape(batch, inner, columns)
    product = _multiply(left, right)
    full: Array = product.reshape([sizes[i] for i in result[0] + result[1] + result[3]]).transpose(restore)
    return full


def _multiply(left: Array, right: Array) -> Array:
    """Return the products of stacks of matrices, (N, R, I) and (N, I, C) to (N, R, C)."""
    wide = np.result_type(left, right)
    if (
        wide != EXTENDED
        or EXTENDED is np.float64
        or left.size * right.shape[-1] <= _FEW
        or left.shape[-2] <= _FEW_ROWS
    ):
        return _plainly(left, right)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return _plainly(left, right)
    left, right = _balanced(left, right)
    # Each factor is the sum of parts of so few bits that float64 products of them are exact.
    bits = (53 - max(math.ceil(math.log2(left.shape[-1])), 1)) // 2
    count = math.ceil(66 / bits)
    lefts, rights = _parts(left, -1, bits, count), _parts(right, -2, bits, count)
    total = np.zeros((*left.shape[:-1], right.shape[-1]), EXTENDED)
    for i, part in enumerate(lefts):
        for other in rights[: count - i]:
            total += np.matmul(part, other)
    return total


def _balanced(left: Array, right: Array) -> tuple[Array, Array]:
    """Scale what meets in a product by powers of two, so that both factors are of one size.

    Parts have as many bits as the largest along an axis needs.
    """
    sizes = [np.frexp(abs(array).max(axis))[1] for array, axis in ((left, -2), (right, -1))]  # (N, I)
    scale = np.ldexp(EXTENDED(1), (sizes[1] - sizes[0]) // 2)
    return left * scale[..., None, :], right * (1 / scale)[..., :, None]


def _plainly(left: Array, right: Array) -> Array:
    product: Array = np.matmul(left, right)
    return product


def _parts(values: Array, axis: int, bits: int, count: int) -> list[NDArray[np.float64]]:
    """Return at most so many float64 arrays of so many bits each, from the leading ones on, whose sum is
    the array to 64 bits of the largest along an axis.

    Those that are zero are left out: what a precision has rounded has few bits.
    """
    rest = values.astype(np.float64)
    low = (values - rest).astype(np.float64)
    scale = np.frexp(abs(rest).max(axis, keepdims=True))[1]  # numbers are at most 2^scale
    parts: list[NDArray[np.float64]] = []
    for place in range(1, count + 1):
        # Nothing is left of a sum with this number below the unit of a part, 2^(scale - place bits).
        above = np.ldexp(1.5, scale - place * bits + 52)
        part = rest + above
        part -= above
        rest -= part
        if place == 1:
            rest += low  # of which no more is lost than of the last part
        if place == 1 or part.any():
            parts.append(part)
    return parts


@functools.lru_cache(maxsize=256)
def _plan(subscripts: str) -> tuple[list[int], list[int], tuple[str, str, str, str], list[int]]:
    """Return how to lay both operands out as stacks of matrices, the groups of indices, and how to lay the
    product out.
    """
    left, result = subscripts.split("->")
    index_a, index_b = left.split(",")
    both = [i for i in index_a if i in index_b]
    batch, inner = ("".join(i for i in both if (i in result) == kept) for kept in (True, False))
    rows = "".join(i for i in index_a if i not in index_b)
    columns = "".join(i for i in index_b if i not in index_a)
    order_a, order_b = (
        [index_a.index(i) for i in batch + rows + inner],
        [index_b.index(i) for i in batch + inner + columns],
    )
    return (
        order_a,
        order_b,
        (batch, rows, inner, columns),
        [(batch + rows + columns).index(i) for i in result],
    )


@functools.lru_cache(maxsize=256)
def _comes_out_turned(subscripts: str) -> bool:
    """Return whether the product has to be turned round, and that of the exchanged factors has not.

    Whoever reads it next would copy it.
    """
    index_a, index_b, index = subscripts.replace("->", ",").split(",")
    restores = [_plan(each)[3] for each in (subscripts, f"{index_b},{index_a}->{index}")]
    return [restore == sorted(restore) for restore in restores] == [False, True]


def count_terms(subscripts: str, shape_a: tuple[int, ...]) -> int:
    """Return how many products each element of a contraction is the sum of."""
    left, result = subscripts.split("->")
    return math.prod(
        size for index, size in zip(left.split(",")[0], shape_a, strict=True) if index not in result
    )
