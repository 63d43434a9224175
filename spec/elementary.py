"""Elementary functions and products in every floating-point type of the reference.

NumPy lacks an error function and fast matrix products of ``numpy.longdouble``.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from concord.spec.arrays import Array
from concord.spec.precision import EXTENDED

# Beyond this, erf differs from 1 by less than a unit in the last place of 64 bits.
_SATURATED = 6.7

# Splitting does not pay off up to this many products.
_FEW = 1 << 16

# Nor does it for this many rows: splitting the other factor would take longer than the products.
_FEW_ROWS = 8


def erf(x: Array) -> Array:
    """Error function, accurate to a few units in the last place."""
    if x.dtype != EXTENDED or EXTENDED is np.float64:
        plain: Array = special.erf(x)
        return plain
    # SciPy has no erf in extended precision. The terms of this series have one sign, so nothing cancels:
    # erf(x) = 2 / sqrt(pi) * exp(-x²) * sum of 2^n x^(2n+1) / (1 * 3 * … * (2n+1)).
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
    """Logistic function without overflow."""
    small = np.exp(-abs(x))
    share: Array = np.where(x >= 0, 1, small) / (1 + small)
    return share


def contract(subscripts: str, a: Array, b: Array) -> Array:
    """Contract two arrays in one matrix product; no index may repeat in an operand."""
    # Swapped factors yield the result in its final order; a transposed view would be copied later.
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
    wide = np.result_type(left, right)
    if (
        wide != EXTENDED
        or EXTENDED is np.float64
        or left.size * right.shape[-1] <= _FEW
        or left.shape[-2] <= _FEW_ROWS
    ):
        return _plainly(left, right)
    # Splitting would turn an infinity into NaN.
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return _plainly(left, right)
    left, right = _balanced(left, right)
    # Each factor becomes a sum of parts with so few bits that float64 products of them, summed over the inner
    # axis, are exact. Products beyond the leading 66 bits are omitted: extended precision has 64.
    bits = (53 - max(math.ceil(math.log2(left.shape[-1])), 1)) // 2
    count = math.ceil(66 / bits)
    lefts, rights = _parts(left, -1, bits, count), _parts(right, -2, bits, count)
    total = np.zeros((*left.shape[:-1], right.shape[-1]), EXTENDED)
    for i, part in enumerate(lefts):
        for other in rights[: count - i]:
            total += np.matmul(part, other)
    return total


def _balanced(left: Array, right: Array) -> tuple[Array, Array]:
    # Parts have as many bits as the largest value along an axis needs. Without balancing, weights of -2^32 at
    # padding cost an adjacent gradient 30 bits (decision 0016). Scaling by powers of two is exact.
    sizes = [np.frexp(abs(array).max(axis))[1] for array, axis in ((left, -2), (right, -1))]  # (N, I)
    scale = np.ldexp(EXTENDED(1), (sizes[1] - sizes[0]) // 2)
    return left * scale[..., None, :], right * (1 / scale)[..., :, None]


def _plainly(left: Array, right: Array) -> Array:
    product: Array = np.matmul(left, right)
    return product


def _parts(values: Array, axis: int, bits: int, count: int) -> list[NDArray[np.float64]]:
    """Split values into at most ``count`` float64 arrays of ``bits`` bits, leading parts first.

    Their sum is exact to 64 bits of the largest value along the axis.
    """
    rest = values.astype(np.float64)
    low = (values - rest).astype(np.float64)
    scale = np.frexp(abs(rest).max(axis, keepdims=True))[1]  # values are at most 2^scale
    parts: list[NDArray[np.float64]] = []
    for place in range(1, count + 1):
        # Adding and subtracting this number rounds to the unit of a part, 2^(scale - place bits).
        above = np.ldexp(1.5, scale - place * bits + 52)
        part = rest + above
        part -= above
        rest -= part
        if place == 1:
            rest += low  # loses no more than the last part
        # Values rounded to a precision have few bits, so later parts are often zero.
        if place == 1 or part.any():
            parts.append(part)
    return parts


@functools.lru_cache(maxsize=256)
def _plan(subscripts: str) -> tuple[list[int], list[int], tuple[str, str, str, str], list[int]]:
    operands, result = subscripts.split("->")
    index_a, index_b = operands.split(",")
    shared = [i for i in index_a if i in index_b]
    batch, inner = ("".join(i for i in shared if (i in result) == in_result) for in_result in (True, False))
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
    index_a, index_b, index = subscripts.replace("->", ",").split(",")
    restores = [_plan(each)[3] for each in (subscripts, f"{index_b},{index_a}->{index}")]
    return [restore == sorted(restore) for restore in restores] == [False, True]


def count_terms(subscripts: str, shape_a: tuple[int, ...]) -> int:
    """Number of products in each element of a contraction."""
    operands, result = subscripts.split("->")
    return math.prod(
        size for index, size in zip(operands.split(",")[0], shape_a, strict=True) if index not in result
    )
