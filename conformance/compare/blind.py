"""Rows that see no key: their values, and the declaration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from concord.conformance.compare.aten_operations import Operation
from concord.conformance.compare.causes import StretchComputation, replay
from concord.conformance.compare.mechanisms import blind_rows
from concord.conformance.compare.module_reference import numbers
from concord.conformance.compare.stretch import Stretch
from concord.conformance.explain.computation import Prediction, within
from concord.conformance.explain.description import listed, wrong_elements
from concord.conformance.wording import counted, few
from concord.spec.arrays import Array
from concord.spec.deviations import BLIND_ROWS_UNIFORM, BLIND_ROWS_ZERO

SOFTMAXES = ("_softmax", "_safe_softmax")

Flags = NDArray[np.bool_]

HELD = {"zero": "zero weights", "uniform": "uniform weights (the mean of all values)"}


@dataclass(frozen=True)
class BlindRows:
    """An activation's wrong rows that see no key."""

    rows: Flags  # (B, T)
    expected: str  # "zero", "uniform", or a description; `actual` likewise
    actual: str

    @property
    def declaration(self) -> str:
        """The declaration that permits the candidate's values, if any."""
        return {"zero": BLIND_ROWS_ZERO, "uniform": BLIND_ROWS_UNIFORM}.get(self.actual, "")

    @property
    def note(self) -> str:
        """Describe the rows and both sides' values."""
        expected, actual = (HELD.get(kind, kind) for kind in (self.expected, self.actual))
        text = (
            f"only rows that see no key are wrong ({counted(int(self.rows.sum()), 'row')}): "
            f"{places(self.rows)}; the reference has {expected} there, the candidate {actual}"
        )
        if self.actual == OTHER:
            text += "; a gradient that reaches them corrupts the key and value gradients of other tokens"
        return text


def places(rows: Flags) -> str:
    """Describe positions and samples of rows."""
    return few(f"{listed(np.flatnonzero(row))} in sample {b}" for b, row in enumerate(rows) if row.any())


OTHER = "neither zero nor uniform weights"


def blind(stretch: Stretch, asked: StretchComputation) -> BlindRows | None:
    """A stretch's wrong rows, if none of them sees a key."""
    shape = asked.actual.shape
    if len(shape) < 2:
        return None
    rows = np.zeros(shape[:2], bool)
    for step in stretch.steps:
        if step.operation.name in SOFTMAXES:
            flags = blind_rows(*step.operation.args[:2])
            if flags is not None and (by_token := _by_token(flags, shape[:2])) is not None:
                rows |= by_token
    wrong = wrong_elements(asked)
    wrong_rows = np.asarray(wrong.reshape(*shape[:2], -1).any(-1))
    if not wrong_rows.any() or (wrong_rows & ~rows).any():
        return None
    predictions = {kind: _filled(stretch, asked.right, kind) for kind in HELD}

    # Where the exact weights are zero, sigma does not include the rounding of nonzero weights.
    sigma = np.broadcast_to(asked.right.sigma, shape)
    sigma = np.maximum(sigma, np.median(sigma[np.isfinite(sigma)]))

    def held(array: Array) -> str:
        values = array[wrong_rows]
        if not np.isfinite(values).all():
            return "values that are not finite"
        for kind, prediction in predictions.items():
            if within(values - prediction.value[wrong_rows], sigma[wrong_rows]):
                return kind
        return OTHER

    return BlindRows(wrong_rows, held(asked.right.value), held(asked.actual))


def _by_token(flags: Tensor, shape: tuple[int, ...]) -> Flags | None:
    # Flags are (B, H, T, 1), (B * H, T, 1) or (B, T, 1).
    array = numbers(flags).astype(bool)[..., 0]
    samples, tokens = shape
    if array.ndim < 2 or array.shape[-1] != tokens or array.size % (samples * tokens):
        return None
    return np.asarray(array.reshape(samples, -1, tokens).any(1))


def _filled(stretch: Stretch, right: Prediction, kind: str) -> Prediction:
    softmaxes = [number for number, step in enumerate(stretch.steps) if step.operation.name in SOFTMAXES]

    def make(operation: Operation) -> Any:
        rows = blind_rows(*operation.args[:2]) if operation.number in softmaxes else None
        if rows is None:
            return operation()
        weight = 0.0 if kind == "zero" else 1 / operation.args[0].shape[operation.args[1]]
        return operation().masked_fill(rows, weight)

    return replay(stretch, right, make, softmaxes)
