"""The standard cases as jobs for every backend."""

from __future__ import annotations

from collections.abc import Sequence

from concord.conformance.run.campaign import Job, repeated
from concord.spec.cases import SCENARIOS, Case, standard_cases
from concord.spec.config import variants as known_variants
from concord.spec.errors import refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.spec.tensors import PARTS

# Default precisions.
DTYPES = ("float64", "float32")


def check_jobs(
    variants: Sequence[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    part: str = "model",
    cases: Sequence[str] | None = None,
) -> list[Job]:
    """A job for every case in every precision.

    Args:
        variants: names, by default all.
        part: one of :data:`concord.spec.tensors.PARTS`.
        cases: names of standard cases, by default all.

    Raises:
        SpecError: for unknown names, with suggestions.
    """
    refuse(
        unknowns("part", [part], PARTS)
        + unknowns("dtype", dtypes, PRECISIONS)
        + unknowns("variant", variants or [], known_variants())
    )
    selection = standard_cases(None if variants is None else list(variants), part)
    refuse(unknowns("case", cases or [], [case.name for case in selection]))
    # A case that needs only one precision runs in the last one, unless requested by name.
    return [
        job_of(case, dtype)
        for case in selection
        if cases is None or case.name in cases
        for dtype in (dtypes[-1:] if SCENARIOS[case.scenario].once and cases is None else dtypes)
    ]


def job_of(case: Case, dtype: str) -> Job:
    """Job of a case in a precision."""
    return Job(case.variant, case.name, dtype, case.part, case.config, case.weights, case.batch)


def sequence(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs, and repeat some (:attr:`Job.times`)."""
    # The repetitions reveal state that a backend keeps between runs. The first case in the last precision
    # runs twice in a row, on the same inputs. The smallest case runs first and again in its normal place,
    # after a shorter or longer text.
    turns: list[Job] = []
    for group in dict.fromkeys(job.group for job in jobs):
        of_group = [job for job in jobs if job.group == group]
        smallest = min(of_group, key=_size)
        twice = next(job for job in of_group if job.dtype == of_group[-1].dtype)
        turns += [smallest] if _size(smallest) < _size(of_group[0]) else []
        turns += [turn for job in of_group for turn in ([job, job] if job is twice else [job])]
    return repeated(turns)


def _size(job: Job) -> int:
    return sum(array.size for array in job.batch.arrays().values())
