"""A backend in NumPy that computes by every allowed alternative on request: it has to pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.backends.interface import Request, Run
from concord.conformance.bugs.alternatives import ALTERNATIVES, Alternative
from concord.conformance.bugs.tape import as_one_step
from concord.spec.errors import unknown
from concord.spec.precision import PRECISIONS
from concord.spec.reference import compute


class Alternatives:
    """NumPy, with ``alternative:NAME`` as its implementations."""

    name = "alternatives"

    def describe(self) -> dict[str, Any]:
        return {
            "version": np.__version__,
            "devices": ["cpu"],
            "dtypes": {"cpu": list(PRECISIONS)},
            "threads": 1,
        }

    def run(self, request: Request) -> Run:
        """Compute what is asked, in the way that the implementation names.

        Raises:
            UnknownNameError: for an alternative that does not exist.
        """
        name = request.implementation.removeprefix("alternative:")
        if name not in ALTERNATIVES:
            raise unknown("alternative", name, list(ALTERNATIVES))
        return run(ALTERNATIVES[name], request)


def run(alternative: Alternative, request: Request) -> Run:
    """Compute a request by an alternative."""
    dtype = request.dtype
    truth = compute(
        request.config,
        request.weights,
        request.batch,
        alternative.arithmetic(dtype),
        request.gradients,
        request.part,
        dtype,
        model=alternative.model or as_one_step(alternative.change.at, request.part),
    )
    hidden = "attention.weights" if alternative.fused else "nothing"
    taps = {name: tap for name, tap in truth.taps.items() if request.taps and not name.endswith(hidden)}
    gradients = {name: tap for name, tap in truth.tap_gradients.items() if not name.endswith(hidden)}
    info = {"device": "cpu", "not_exposed": [f"*{hidden}"]}
    return Run(
        truth.output, truth.loss, taps, truth.gradients, "alternatives", dtype, info, tap_gradients=gradients
    )
