"""Rows that see no key: their values, and the declaration."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from concord.conformance.bugs.context import Flags
from concord.conformance.compare.aten_operations import Operation
from concord.conformance.compare.causes import StretchComputation
from concord.conformance.compare.mechanisms import blind_rows
from concord.conformance.compare.module_reference import numbers
from concord.conformance.explain.computation import within
from concord.conformance.explain.description import listed, wrong_elements
from concord.conformance.wording import counted, few
from concord.spec.arrays import Array, Shape
from concord.spec.deviations import BLIND_ROWS_UNIFORM, BLIND_ROWS_ZERO

# Values that such rows may have, with the declaration of each.
HELD = {
    "zero weights": BLIND_ROWS_ZERO,
    "uniform weights (the mean of all values)": BLIND_ROWS_UNIFORM,
}

OTHER = "neither zero nor uniform weights"


def places(rows: Flags) -> str:
    """Describe positions and samples of rows."""
    return few(f"{listed(np.flatnonzero(row))} in sample {b}" for b, row in enumerate(rows) if row.any())


def blind(asked: StretchComputation) -> tuple[str, str] | None:
    """Describe wrong rows if none sees a key; the declaration that permits them, or "", comes first."""
    shape = asked.actual.shape
    if len(shape) < 2:
        return None
    flags_of = {
        number: flags
        for number, step in enumerate(asked.stretch.steps)
        if (flags := blind_rows(step.operation)) is not None
    }
    rows = np.zeros(shape[:2], bool)
    for flags in flags_of.values():
        if (by_token := _by_token(flags, shape[:2])) is not None:
            rows |= by_token
    wrong = np.asarray(wrong_elements(asked).reshape(*shape[:2], -1).any(-1))
    if not wrong.any() or (wrong & ~rows).any():
        return None
    predictions = {text: asked.replay(partial(_filled, kind), flags_of) for text, kind in HELD.items()}

    # Where the exact weights are zero, sigma does not include the rounding of nonzero weights.
    sigma = np.broadcast_to(asked.right.sigma, shape)
    sigma = np.maximum(sigma, np.median(sigma[np.isfinite(sigma)]))

    def held(array: Array) -> str:
        values = array[wrong]
        if not np.isfinite(values).all():
            return "values that are not finite"
        for text, prediction in predictions.items():
            if within(values - prediction.value[wrong], sigma[wrong]):
                return text
        return OTHER

    actual = held(asked.actual)
    note = (
        f"only rows that see no key are wrong ({counted(int(wrong.sum()), 'row')}): {places(wrong)}; "
        f"the reference has {held(asked.right.value)} there, the candidate {actual}"
    )
    if actual == OTHER:
        note += "; a gradient that reaches them corrupts the key and value gradients of other tokens"
    return HELD.get(actual, ""), note


def _by_token(flags: Tensor, shape: Shape) -> Flags | None:
    # Flags are (B, H, T, 1), (B * H, T, 1) or (B, T, 1).
    array = numbers(flags).astype(bool)[..., 0]
    samples, tokens = shape
    if array.ndim < 2 or array.shape[-1] != tokens or array.size % (samples * tokens):
        return None
    return np.asarray(array.reshape(samples, -1, tokens).any(1))


def _filled(declaration: str, operation: Operation) -> Any:
    if (rows := blind_rows(operation)) is None:
        return operation()
    weight = 0.0 if declaration == BLIND_ROWS_ZERO else 1 / operation.args[0].shape[operation.args[1]]
    return operation().masked_fill(rows, weight)
