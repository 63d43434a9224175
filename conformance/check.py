"""The main job: the standard cases on every backend, judged against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.campaign import Job
from conformance.tolerance import expect
from spec.cases import Case, standard_cases

DTYPES = ("float64", "float32")
"""The precisions that are checked unless others are asked for."""


def check_jobs(variants: Sequence[str] | None = None, dtypes: Sequence[str] = DTYPES, part: str = "model", cases: Sequence[str] | None = None) -> list[Job]:
    """Return the jobs of a check.

    Args:
        variants: by name; all by default.
        dtypes: names of precisions.
        part: one of :data:`spec.PARTS`.
        cases: names of standard cases; all by default.

    Raises:
        UnknownNameError: with the nearest names.
    """
    from spec.config import variants as known_variants
    from spec.errors import unknown
    from spec.precision import precision
    from spec.tensors import check_part

    check_part(part)
    for dtype in dtypes:
        precision(dtype)
    for name in variants or []:
        if name not in known_variants():
            raise unknown("variant", name, known_variants())
    chosen = standard_cases(None if variants is None else list(variants), part)
    if cases is not None:
        known = [case.name for case in chosen]
        for name in cases:
            if name not in known:
                raise unknown("case", name, known)
        chosen = [case for case in chosen if case.name in cases]
    return [job_of(case, dtype) for case in chosen for dtype in dtypes]


def job_of(case: Case, dtype: str) -> Job:
    """Return the job that runs a case in a precision."""
    expectation = expect(case.config, case.weights, case.batch, case.part, dtype)
    return Job(case.variant, case.name, dtype, case.part, case.config, case.weights, case.batch, expectation)
