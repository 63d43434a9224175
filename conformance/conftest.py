"""The suite for anyone's own CI: ``pytest conformance --backend torch --device cpu``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import backends
from backends.pool import Seat
from backends.worker import Worker, WorkerFailure
from conformance.campaign import Job, Settings
from conformance.check import DTYPES, check_jobs
from conformance.published import INCLUDED, collect
from spec.config import variants

OPTIONS = {
    "--backend": ("a backend by name or package.module:Class; may be repeated; default: the four", None),
    "--variant": ("a variant; may be repeated; default: all", None),
    "--dtype": ("a precision; may be repeated; default: float64 and float32", None),
    "--golden": ("a folder of golden files; may be repeated; default: ../shared/golden where it is, else the included selection", None),
}

SHARED = Path(__file__).parents[2] / "shared" / "golden"
"""The whole collection, where it lies beside the checkout; the included selection is a part of it."""
DEFAULT_GOLDEN = SHARED if SHARED.is_dir() else INCLUDED


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("concord")
    for option, (text, default) in OPTIONS.items():
        group.addoption(option, action="append", default=default, help=text)
    group.addoption("--device", default="cpu", help="cpu, cuda or cuda:N")
    group.addoption("--execution", default="eager", help="eager or compiled")


class Workers:
    """The backends under test, each started when it is first needed."""

    def __init__(self, config: pytest.Config) -> None:
        self.asked = tuple(config.getoption("--backend") or ())
        self.settings = Settings(device=config.getoption("--device"), execution=config.getoption("--execution"), asked=self.asked, threads=1)
        self.seats: dict[str, Seat] = {}

    def get(self, name: str) -> Worker:
        """Return the worker of a backend: one that was asked for and is missing fails, another is skipped, visibly."""
        try:
            return self.seats.setdefault(name, Seat(partial(self.settings.open, name), restarts=None)).get()
        except WorkerFailure as failure:
            if failure.status == "absent" and name not in self.asked:
                pytest.skip(f"{name} is absent: {failure.detail}")
            pytest.fail(f"{name} is {'missing' if failure.status == 'absent' else failure.status}: {failure.detail}")


@pytest.fixture(scope="session")
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    found = Workers(request.config)
    yield found
    for seat in found.seats.values():
        seat.end()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        # Tests of one backend share a process where tests run in parallel: its worker starts once.
        # Sorted, the slowest comes first and the others fill the time beside it.
        names = metafunc.config.getoption("--backend") or sorted(backends.BUILT_IN)
        metafunc.parametrize("backend", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names])
    if "standard" in metafunc.fixturenames:
        jobs = check_jobs(metafunc.config.getoption("--variant") or variants(), metafunc.config.getoption("--dtype") or DTYPES)
        metafunc.parametrize("standard", jobs, ids=lambda job: job.name)
    if "golden" in metafunc.fixturenames:
        jobs = [job for folder in metafunc.config.getoption("--golden") or [DEFAULT_GOLDEN] for job in collect(Path(folder)).jobs]
        metafunc.parametrize("golden", jobs, ids=lambda job: job.name)


@pytest.fixture
def standard(request: pytest.FixtureRequest) -> Job:
    job: Job = request.param
    return job


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Job:
    job: Job = request.param
    return job
