"""A backend in NumPy that computes in every admissible way on request: it has to pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.backends.interface import Request, Run
from concord.conformance.variations.catalogue import VARIATIONS, Variation
from concord.spec.errors import unknown
from concord.spec.precision import PRECISIONS
from concord.spec.reference import compute


class Varied:
    """NumPy, with ``variation:NAME`` as its implementations."""

    name = "varied"

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
            UnknownNameError: for a variation that does not exist.
        """
        name = request.implementation.removeprefix("variation:")
        if name not in VARIATIONS:
            raise unknown("variation", name, list(VARIATIONS))
        return run(VARIATIONS[name], request)


def run(variation: Variation, request: Request) -> Run:
    """Compute a request with a variation."""
    dtype = request.dtype
    truth = compute(
        request.config,
        request.weights,
        request.batch,
        variation.arithmetic(dtype),
        request.gradients,
        request.part,
        dtype,
        model=variation.model,
    )
    hidden = "attention.weights" if variation.fused else "nothing"
    taps = {name: tap for name, tap in truth.taps.items() if request.taps and not name.endswith(hidden)}
    gradients = {name: tap for name, tap in truth.tap_gradients.items() if not name.endswith(hidden)}
    info = {"device": "cpu", "undelivered_taps": [f"*{hidden}"]}
    return Run(
        truth.output, truth.loss, taps, truth.gradients, "varied", dtype, info, tap_gradients=gradients
    )
