"""Mistakes of precision: something has fewer bits than it should (SPEC PRC-1 to PRC-3)."""

from __future__ import annotations

from collections.abc import Iterator

from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.question import Question

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
