"""Array types and checks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Arrays = dict[str, NDArray[Any]]
Shape = tuple[int, ...]

KINDS = {
    "float": (np.floating, "a floating-point type"),
    "int": (np.integer, "an integer type"),
    "bool": (np.bool_, "bool"),
}
"""NumPy's abstract type for each kind of array, and its name in messages."""


def wrong_type(name: str, array: NDArray[Any], kind: str = "float") -> str | None:
    """Describe a wrong dtype, or return None."""
    abstract, words = KINDS[kind]
    right = np.issubdtype(array.dtype, abstract)
    return None if right else f"{name!r} has dtype {array.dtype} but must be {words}"


def wrong_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> str | None:
    """Describe a wrong shape, or return None."""
    return None if array.shape == shape else f"{name!r} has shape {array.shape} but must be {shape}"


def wrong_element(name: str, array: NDArray[Any], wrong: Mask, words: str) -> str | None:
    """Describe the first wrong element, or return None."""
    if not wrong.any():
        return None
    at = tuple(map(int, np.argwhere(wrong)[0]))
    return f"{name!r} is {array[at]} at {at} but must {words}"


def not_finite(name: str, array: NDArray[Any]) -> str | None:
    """Describe the first infinity or NaN, or return None."""
    return wrong_element(name, array, ~np.isfinite(array), "be finite")
