"""The precisions of runs, and rounding to them (SPEC PRC-1 to PRC-3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from concord.spec.arrays import Array
from concord.spec.errors import unknown


@dataclass(frozen=True)
class Precision:
    """A binary floating-point format.

    Attributes:
        storage: NumPy dtype that represents its values exactly.
        unit_roundoff: half the distance from 1 to the next value.
        accumulation: unit roundoff of sums; half precisions accumulate in float32.
        factors: unit roundoff of product factors; 0 if they are not shortened.
    """

    name: str
    storage: np.dtype
    unit_roundoff: float
    smallest_normal: float
    largest: float
    accumulation: float
    factors: float = 0.0

    def round(self, values: ArrayLike) -> Array:
        """Round to nearest, ties to even, into ``storage``; values beyond ``largest`` become infinite."""
        array: Array = np.asarray(values)
        if self.name == "bfloat16":
            return _round_to_bfloat16(array)
        if array.dtype == self.storage and self.name != "float16":
            return array
        with np.errstate(over="ignore"):
            return (
                array.astype(np.float16).astype(np.float32)
                if self.name == "float16"
                else array.astype(self.storage)
            )

    def holds(self, values: Array) -> bool:
        """Whether the precision represents each finite value exactly."""
        finite = values[np.isfinite(values)]
        return bool((self.round(finite) == finite).all())

    def round_factor(self, values: Array, cut: bool = False) -> Array:
        """Round, or truncate if ``cut``, a product's factor to the bits of TF32."""
        if not self.factors:
            return values
        bits = round(-math.log2(self.factors))
        shortened = cut_to_bits(values, bits) if cut else round_to_bits(values.astype(np.float64), bits)
        return shortened.astype(self.storage)


def round_to_bits(values: Array, bits: int) -> Array:
    """Round to nearest with ``bits`` significant bits, for any exponent."""
    own = np.finfo(values.dtype).nmant + 1
    # Veltkamp's splitting needs no access to bits, so it works for longdouble too.
    with np.errstate(over="ignore", invalid="ignore"):
        widened = values * (2.0 ** (own - bits) + 1)
        rounded = widened - (widened - values)
    return np.where(np.isfinite(widened), rounded, values)


def cut_to_bits(values: Array, bits: int) -> Array:
    """Truncate float32 values to ``bits`` significant bits."""
    mask = np.uint32(0xFFFFFFFF >> (24 - bits) << (24 - bits))
    single = np.atleast_1d(values.astype(np.float32))
    return np.where(np.isfinite(single), (single.view(np.uint32) & mask).view(np.float32), single).reshape(
        values.shape
    )


def _round_to_bfloat16(values: Array) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        single = np.atleast_1d(values.astype(np.float32))
    # Rounding float64 via float32 to bfloat16 rounds twice and gets some ties wrong.
    bits = _sticky(single, np.atleast_1d(values)).view(np.uint32)
    # Adding half of the discarded part, plus the last kept bit, rounds to nearest, ties to even.
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), rounded.view(np.float32), single).reshape(values.shape)


def _sticky(single: NDArray[np.float32], values: Array) -> NDArray[np.float32]:
    # Truncate, and set the last bit if digits were lost, so that the second rounding sees no false tie.
    inexact = np.isfinite(single) & (single != values)
    cut = np.where(abs(single) > abs(values), np.nextafter(single, np.float32(0)), single)
    return np.where(inexact, (cut.view(np.uint32) | np.uint32(1)).view(np.float32), single)


# The widest type of this platform, or float64 if none is wider, for the truth of float64.
EXTENDED: type[np.floating] = (
    np.longdouble if np.finfo(np.longdouble).nmant > np.finfo(np.float64).nmant else np.float64
)


def _precision(name: str, storage: type, mantissa: int, exponent: int, factors: float = 0.0) -> Precision:
    largest = (2.0 - 2.0 ** (1 - mantissa)) * 2.0 ** (exponent - 1)
    accumulation = 2.0 ** -max(mantissa, 24)
    return Precision(
        name, np.dtype(storage), 2.0**-mantissa, 2.0 ** (2 - exponent), largest, accumulation, factors
    )


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        _precision("float64", np.float64, 53, 1024),
        _precision("float32", np.float32, 24, 128),
        _precision("bfloat16", np.float32, 8, 128),
        _precision("float16", np.float32, 11, 16),
    )
}
"""Every precision of a run, by name."""

MODES: dict[str, Precision] = {
    p.name: p
    for p in (
        # Factors of matrix products keep 11 significant bits, rounded or truncated; everything else is
        # float32.
        _precision("tf32", np.float32, 24, 128, factors=2.0**-11),
        # The truth for float64. Values beyond the range of float64 are out of range here too.
        _precision("extended", EXTENDED, np.finfo(EXTENDED).nmant + 1, 1024),
    )
}
"""Further arithmetics of the judge: TF32 products, and the truth for float64."""


def precision(name: str) -> Precision:
    """Return a precision or mode by name."""
    target = PRECISIONS.get(name) or MODES.get(name)
    if target is None:
        raise unknown("dtype", name, list(PRECISIONS))
    return target
