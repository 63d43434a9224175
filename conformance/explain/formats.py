"""Mistakes of precision: something has fewer bits than it should (SPEC PRC-1 to PRC-3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from concord.conformance.explain.hypothesis import RIGHT, Hypothesis
from concord.conformance.explain.question import Question, rounding
from concord.conformance.explain.reading import LEAST, root_mean_square, within
from concord.spec.precision import precision

SHORTER = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16")}
"""The shorter formats that numbers of a precision are stored in, from more bits to fewer."""

SPELLED = {"tf32": "11 bits, as TF32 and float16 have"}


def of_factors(question: Question) -> Iterator[Hypothesis]:
    """Yield products whose factors are rounded first."""
    shorter = SHORTER.get(question.case.dtype, ())
    for name in shorter:
        short = "tf32" if name == "float16" else name  # which has as many bits
        text = f"products whose factors are rounded to {SPELLED.get(short, short)}"
        yield Hypothesis(f"{short}_products", text, "PRC-2", factors=short)
    if shorter:
        text = "products whose factors are cut off, not rounded, to 11 bits (TF32)"
        yield Hypothesis("tf32_products", text, "PRC-2", factors="tf32 cut off")


def of_format(question: Question) -> Iterator[Hypothesis]:
    """Read off that every number, and few of the right ones, is one of a shorter format."""
    actual, right = question.actual, question.right
    finite = np.isfinite(actual) & np.isfinite(right.value)
    for name in reversed(SHORTER.get(question.case.dtype, ())):
        held, numbers = (rounding(name)(array[finite]) == array[finite] for array in (actual, right.value))
        if held.all() and (~numbers).sum() >= 2:
            break
    else:
        return
    exponent = np.floor(np.log2(np.maximum(abs(actual), precision(name).smallest_normal)))
    # A number just below a power of two may have been rounded up to it, by half the larger spacing.
    half = 2.0**exponent * precision(name).unit_roundoff
    if within(np.maximum(abs(actual - right.value) - half, 0), right.sigma):
        yield Hypothesis(f"stored_in_{name}", f"numbers that were rounded to {name}", "PRC-2")
        return
    prediction = question.predict(RIGHT, name)
    # What the format cannot hold may have become infinity, and then no number at all.
    lost = ~np.isfinite(actual)
    error = np.where(lost, 0.0, actual - prediction.value)
    if (
        not (lost & np.isfinite(question.rounded(name))).any()
        and within(error, prediction.sigma)
        and root_mean_square(error) >= LEAST * root_mean_square(prediction.sigma)
    ):
        yield Hypothesis(f"computed_in_{name}", f"a step that was computed in {name}", "PRC-2")
