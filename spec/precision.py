"""The precisions that a run may have, and rounding to them (SPEC PRC-1 to PRC-3)."""

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
        name: ``"float64"``, ``"float32"``, ``"bfloat16"``, ``"float16"``, or one of :data:`MODES`.
        storage: the NumPy dtype that holds its values exactly.
        unit_roundoff: half the distance from 1 to the next larger number.
        smallest_normal: its smallest positive normal number.
        largest: its largest finite number.
        accumulation: the unit roundoff of sums: half precisions accumulate in float32.
        factors: the unit roundoff to which the factors of a product are shortened first; 0 where they are
            not.
    """

    name: str
    storage: np.dtype
    unit_roundoff: float
    smallest_normal: float
    largest: float
    accumulation: float
    factors: float = 0.0

    def round(self, values: ArrayLike) -> Array:
        """Round to nearest, ties to even, into an array of ``storage``.

        Beyond ``largest`` becomes infinite.
        """
        given: Array = np.asarray(values)
        if self.name == "bfloat16":
            return _round_to_bfloat16(given)
        if given.dtype == self.storage and self.name != "float16":
            return given
        with np.errstate(over="ignore"):
            return (
                given.astype(np.float16).astype(np.float32)
                if self.name == "float16"
                else given.astype(self.storage)
            )

    def holds(self, values: Array) -> bool:
        """Whether the precision has each of these numbers; what is not finite is no question of digits."""
        finite = values[np.isfinite(values)]
        return bool((self.round(finite) == finite).all())

    def round_factor(self, values: Array, cut: bool = False) -> Array:
        """Shorten a factor of a matrix product, where the precision does that (TF32).

        Args:
            cut: whether its last bits are cut off, towards zero, instead of rounded to nearest.
        """
        if not self.factors:
            return values
        bits = round(-math.log2(self.factors))
        shortened = cut_to_bits(values, bits) if cut else round_to_bits(values.astype(np.float64), bits)
        return shortened.astype(self.storage)


def round_to_bits(values: Array, bits: int) -> Array:
    """Round numbers of float64, or of a wider type, to so many significant bits, to nearest, whatever
    their exponent (Veltkamp's splitting).
    """
    own = np.finfo(values.dtype).nmant + 1
    with np.errstate(over="ignore", invalid="ignore"):
        widened = values * (2.0 ** (own - bits) + 1)
        rounded = widened - (widened - values)
    return np.where(np.isfinite(widened), rounded, values)


def cut_to_bits(values: Array, bits: int) -> Array:
    """Cut float32 numbers off after so many significant bits, whatever their exponent."""
    kept = np.uint32(0xFFFFFFFF >> (24 - bits) << (24 - bits))
    single = np.atleast_1d(values.astype(np.float32))
    return np.where(np.isfinite(single), (single.view(np.uint32) & kept).view(np.float32), single).reshape(
        values.shape
    )


def _round_to_bfloat16(values: Array) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        single = np.atleast_1d(values.astype(np.float32))
    bits = _sticky(single, np.atleast_1d(values)).view(np.uint32)
    # Half of the discarded part, plus the last kept bit: nearest, ties to even.
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), rounded.view(np.float32), single).reshape(values.shape)


def _sticky(single: NDArray[np.float32], values: Array) -> NDArray[np.float32]:
    """Return float32 numbers whose last bit remembers that something was cut off, so that rounding again
    errs nowhere.
    """
    inexact = np.isfinite(single) & (single != values)
    cut = np.where(abs(single) > abs(values), np.nextafter(single, np.float32(0)), single)
    return np.where(inexact, (cut.view(np.uint32) | np.uint32(1)).view(np.float32), single)


EXTENDED: type[np.floating] = (
    np.longdouble if np.finfo(np.longdouble).nmant > np.finfo(np.float64).nmant else np.float64
)
"""The widest type of this platform, in which float64 is judged.

Float64 itself where there is no wider one.
"""


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
"""Every precision that a run may be asked for, by name."""

MODES: dict[str, Precision] = {
    p.name: p
    for p in (
        # The factors of matrix products keep 11 significant bits, rounded or cut off; everything else is
        # float32.
        _precision("tf32", np.float32, 24, 128, factors=2.0**-11),
        # In which the truth for float64 is computed. What float64 cannot hold is out of range here too.
        _precision("extended", EXTENDED, np.finfo(EXTENDED).nmant + 1, 1024),
    )
}
"""Further arithmetics that a run may be judged by.

How a framework multiplies float32, and what float64 is judged by.
"""


def precision(name: str) -> Precision:
    """Return a precision or mode by name.

    Raises:
        UnknownNameError: with the nearest names.
    """
    found = PRECISIONS.get(name) or MODES.get(name)
    if found is None:
        raise unknown("dtype", name, list(PRECISIONS))
    return found
