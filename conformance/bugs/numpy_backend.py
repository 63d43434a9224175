"""Allowed alternatives in NumPy: a run by one of them has to pass."""

from __future__ import annotations

from concord.backends.interface import Request, Run
from concord.conformance.bugs.attention import CONTEXT
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.tape import as_one_step
from concord.spec.reference import compute


def run(change: Change, request: Request) -> Run:
    """Compute a request by an alternative."""
    dtype = request.dtype
    truth = compute(
        request.config,
        request.weights,
        request.batch,
        change.arithmetic(dtype),
        request.gradients,
        request.part,
        dtype,
        model=change.model or as_one_step(change.at, request.part),
    )
    # A context that is computed otherwise keeps its weights inside (SPEC ALG-2, ALG-3).
    hidden = "attention.weights" if change.taps == (CONTEXT,) else "nothing"
    taps = {name: tap for name, tap in truth.taps.items() if request.taps and not name.endswith(hidden)}
    gradients = {name: tap for name, tap in truth.tap_gradients.items() if not name.endswith(hidden)}
    info = {"device": "cpu", "not_exposed": [f"*{hidden}"]}
    return Run(
        truth.output, truth.loss, taps, truth.gradients, "alternatives", dtype, info, tap_gradients=gradients
    )
