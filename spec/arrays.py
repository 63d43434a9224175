"""Arrays: their types, and what is wrong with one that was given, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Arrays = dict[str, NDArray[Any]]

KINDS = {
    "float": (np.floating, "a floating-point type"),
    "int": (np.integer, "an integer type"),
    "bool": (np.bool_, "bool"),
}
"""The abstract NumPy type of each kind of array, and what a message calls it."""


def wrong_type(name: str, array: NDArray[Any], kind: str = "float") -> str | None:
    """Return what is wrong with the type of an array; None: nothing."""
    abstract, words = KINDS[kind]
    right = np.issubdtype(array.dtype, abstract)
    return None if right else f"{name!r} has dtype {array.dtype} but must be {words}"


def wrong_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> str | None:
    """Return what is wrong with the shape of an array; None: nothing."""
    return None if array.shape == shape else f"{name!r} has shape {array.shape} but must be {shape}"


def wrong_element(name: str, array: NDArray[Any], wrong: Mask, words: str) -> str | None:
    """Return which element of an array is the first wrong one, and what it must be; None: none is."""
    if not wrong.any():
        return None
    at = tuple(map(int, np.argwhere(wrong)[0]))
    return f"{name!r} is {array[at]} at {at} but must {words}"


def not_finite(name: str, array: NDArray[Any]) -> str | None:
    """Return which element of an array is not finite; None: all are."""
    return wrong_element(name, array, ~np.isfinite(array), "be finite")
