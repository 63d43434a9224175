"""Every backend against the reference on standard cases, and against published sources on golden files."""

from __future__ import annotations

from collections.abc import Callable

from concord.conformance.run.campaign import Job


def test_standard_case(
    concord_conform: Callable[[str, Job], None], concord_backend: str, concord_standard: Job
) -> None:
    """A standard case on a backend, against the reference."""
    concord_conform(concord_backend, concord_standard)


def test_golden_file(
    concord_conform: Callable[[str, Job], None], concord_backend: str, concord_golden: Job
) -> None:
    """A golden file on a backend, against what the source computed."""
    concord_conform(concord_backend, concord_golden)
