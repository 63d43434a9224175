"""Every backend against the reference and published sources."""

from __future__ import annotations

from collections.abc import Callable

from concord.conformance.run.campaign import Job


def test_standard_case(
    concord_conform: Callable[[str, Job], None], concord_backend: str, concord_standard: Job
) -> None:
    """Compare a backend with the reference."""
    concord_conform(concord_backend, concord_standard)


def test_golden_file(
    concord_conform: Callable[[str, Job], None], concord_backend: str, concord_golden: Job
) -> None:
    """Compare a backend with a source."""
    concord_conform(concord_backend, concord_golden)
