"""Mistakes of precision: something has fewer bits than it should (SPEC PRC-1 to PRC-3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.question import Question, rounding
from concord.conformance.explain.weights import STORED
from concord.spec.precision import precision

Array = NDArray[np.floating]

SHORTER = {"float64": ("float32", "tf32", "float16", "bfloat16"), "float32": ("tf32", "float16", "bfloat16")}
"""The formats that have fewer bits than a precision, from more to fewer."""

SPELLED = {
    "float32": "float32",
    "tf32": "11 bits, as TF32 and float16 have",
    "float16": "float16",
    "bfloat16": "bfloat16",
}


def of_factors(question: Question) -> Iterator[Hypothesis]:
    """Yield products whose factors are rounded first."""
    for name in SHORTER.get(question.case.dtype, ()):
        if name == "float16":  # as long as TF32
            continue
        text = f"products whose factors are rounded to {SPELLED[name]}"
        yield Hypothesis(name=f"{name}_products", text=text, clause="PRC-2", factors=name)
    if "tf32" in SHORTER.get(question.case.dtype, ()):
        text = "products whose factors are cut off, not rounded, to 11 bits (TF32)"
        yield Hypothesis(name="tf32_products", text=text, clause="PRC-2", factors="tf32 cut off")


def held_in(question: Question) -> str | None:
    """Return the shortest format that holds every number of the tensor, if few of the right ones are
    numbers of it too.
    """
    finite = np.isfinite(question.actual) & np.isfinite(question.right.value)
    actual, right = question.actual[finite], question.right.value[finite]
    for name in reversed(STORED.get(question.case.dtype, ())):
        if (rounding(name)(actual) == actual).all() and (rounding(name)(right) != right).sum() >= 2:
            return name
    return None


def stored(question: Question, name: str) -> Array:
    """Return what is left of the tensor's error when it may have been rounded to a format at last."""
    error = abs(question.actual - question.right.value)
    exponent = np.floor(np.log2(np.maximum(abs(question.actual), precision(name).smallest_normal)))
    # A number just below a power of two may have been rounded up to it, by half the larger spacing.
    half = 2.0**exponent * precision(name).unit_roundoff
    return np.maximum(error - half, 0)
