"""Every backend against the oracle on the standard cases, and against the published sources on their golden files."""

from __future__ import annotations

import pytest

from backends.interface import Unsupported
from conformance.campaign import Job, Result
from conformance.conftest import Workers
from conformance.report import divergence_lines


def conform(workers: Workers, backend: str, job: Job) -> None:
    """Run a job and fail with the first divergence in words."""
    try:
        settings = workers.settings
        run = workers.get(backend).run(job.config, job.weights, job.batch, job.part, job.dtype, execution=settings.execution)
    except Unsupported as reason:
        pytest.skip(f"unsupported: {reason}")
    verdict = job.judge(run)
    if verdict.status == "undetermined":
        pytest.skip(f"{job.dtype} determines no tensor of this case")
    if not verdict.passed:
        pytest.fail("\n".join(divergence_lines(Result(backend, job.group, job.case, job.dtype, verdict.status, verdict=verdict))), pytrace=False)


def test_standard_case(workers: Workers, backend: str, standard: Job) -> None:
    conform(workers, backend, standard)


def test_golden_file(workers: Workers, backend: str, golden: Job) -> None:
    conform(workers, backend, golden)
