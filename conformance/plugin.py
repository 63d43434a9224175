"""The pytest plug-in: the conformance suite for CI, and fixtures for further cases.

Run ``pytest --pyargs concord.conformance --concord-backend mine.module:Class`` in any folder. Every pytest
run loads this module, so it imports on demand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from concord.backends.worker import Worker
    from concord.conformance.run.campaign import Job, Runner

# Workers per test process; beyond this, the least recently used one ends.
MOST = 4

# Report property with the status of a test's runs, which is also passed between processes (pytest-xdist).
PROPERTY = "concord"

OPTIONS = {
    "backend": "a backend by name or package.module:Class; may be repeated; default: the four",
    "variant": "a variant; may be repeated; default: all",
    "part": "model, encoder, stack, attention or dot_product; may be repeated; default: model",
    "dtype": "a precision; may be repeated; default: float64 and float32",
    "golden": "a folder of golden files, or off; may be repeated; default: those that come with Concord",
    "device": "cpu, cuda or cuda:N; default: cpu",
    "implementation": "explicit, library or a backend's own; default: explicit",
    "execution": "eager or compiled; default: eager",
}

# Options with a single value, and their defaults.
ONCE = {"device": "cpu", "implementation": "explicit", "execution": "eager"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plug-in's options."""
    group = parser.getgroup("concord", "conformance of Transformer encoders")
    for name, text in OPTIONS.items():
        action, default = ("store", ONCE[name]) if name in ONCE else ("append", None)
        group.addoption(f"--concord-{name}", action=action, default=default, help=text)
    group.addoption(
        "--concord-forward-only", action="store_true", help="judge only the forward pass, without gradients"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's markers."""
    config.addinivalue_line(
        "markers", "xdist_group(name): tests that share a process where tests run in parallel"
    )
    config.pluginmanager.register(Unjudged(), "concord-outcome")
    config.addinivalue_line("markers", "slow: whole training runs; leave them out with -m 'not slow'")


class Unjudged:
    """A plug-in that fails a suite without a judged run of a backend."""

    def __init__(self) -> None:
        self.statuses: list[Any] = []

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Backends without a judged run."""
        if not self.statuses:
            return ()
        from concord.conformance.judging.verdict import conclude

        return conclude(self.statuses)[1]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the statuses of a test's runs."""
        if report.when == "call":
            self.statuses += [value for name, value in report.user_properties if name == PROPERTY]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail an otherwise passing session."""
        if self.unjudged and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report the reason."""
        for backend in self.unjudged:
            terminalreporter.write_line(f"concord: {backend}: nothing was judged", red=True)


class Suite:
    """The backends under test."""

    def __init__(self, config: pytest.Config) -> None:
        from concord.backends.pool import Pool
        from concord.conformance.run.campaign import Setup

        self.asked = tuple(_option(config, "backend") or ())
        self.gradients = not _option(config, "forward_only")
        options = {name: _option(config, name) for name in ONCE}
        self.settings = Setup(**options, asked=self.asked, threads=1)
        self.pool = Pool()
        self.runners: dict[str, Runner] = {}

    def runner(self, name: str) -> Runner:
        """A backend's runner, which starts its worker on demand."""
        from concord.conformance.run.campaign import Runner

        runner = self.runners.pop(name, None)
        if runner is None:
            runner = Runner(name, self.settings, self.pool, {})
            runner.supervisor.refresh(None)
        self.runners[name] = runner  # most recently used last
        if len(self.runners) > MOST:
            self.runners.pop(next(iter(self.runners))).supervisor.end()
        return runner

    def get(self, name: str) -> Worker:
        """A backend's worker. A missing one fails if requested, and is skipped otherwise."""
        from concord.backends.wire import WorkerFailure

        try:
            return self.runner(name).supervisor.get()
        except WorkerFailure as failure:
            if failure.status == "absent" and name not in self.asked:
                pytest.skip(f"{name} is absent: {failure.detail}")
            pytest.fail(
                f"{name} is {'missing' if failure.status == 'absent' else failure.status}: {failure.detail}",
                pytrace=False,
            )

    def conform(self, test: pytest.Item, backend: str, job: Job) -> None:
        """Run a job for a test, and fail with its first divergence."""
        from concord.conformance.judging.verdict import result_lines

        self.get(backend)
        result = self.runner(backend).attempt(job if self.gradients else _forward(job))
        test.user_properties.append((PROPERTY, [backend, result.status]))
        if result.status == "unsupported":
            pytest.skip(f"unsupported: {result.detail}")
        if result.status != "agrees":
            verdict = result.verdict and result.verdict.explained()
            # Pytest's summary shows only the first line.
            lines = [f"{backend} {verdict.headline}"] if verdict else []
            lines += result_lines(dataclasses.replace(result, verdict=verdict))
            pytest.fail("\n".join(lines), pytrace=False)


@pytest.fixture(scope="session")
def concord_workers(request: pytest.FixtureRequest) -> Iterator[Suite]:
    """The backends' worker processes, one per session."""
    suite = Suite(request.config)
    yield suite
    suite.pool.close()


@pytest.fixture
def concord_conform(request: pytest.FixtureRequest, concord_workers: Suite) -> Callable[[str, Job], None]:
    """Function that runs a job (:class:`~concord.conformance.run.campaign.Job`) on a backend, and fails if it
    diverges.
    """
    return partial(concord_workers.conform, request.node)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests by backend, case and golden file."""
    option = partial(_option, metafunc.config)
    if "concord_backend" in metafunc.fixturenames:
        from concord.backends import BUILT_IN

        # Parallel tests of one backend share a process, so that its worker starts only once. In alphabetical
        # order, the slowest comes first, and the others run meanwhile.
        names = option("backend") or sorted(BUILT_IN)
        metafunc.parametrize(
            "concord_backend", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]
        )
    for name, jobs_of in (("concord_standard", _standard), ("concord_golden", _published)):
        if name not in metafunc.fixturenames:
            continue
        from concord.spec.errors import SpecError

        try:
            jobs = jobs_of(option)
        except SpecError as error:
            raise pytest.UsageError(str(error)) from None
        # Accumulated rounding over all steps of a training run takes long to compute.
        parameters = [pytest.param(job, marks=pytest.mark.slow) if job.training else job for job in jobs]
        names = [
            f"{job.name}-again" if any(job is earlier for earlier in jobs[:place]) else job.name
            for place, job in enumerate(jobs)
        ]
        metafunc.parametrize(name, parameters, ids=names)


def _standard(option: Callable[[str], Any]) -> list[Job]:
    from concord.conformance.run.standard_jobs import DTYPES, check_jobs, sequence

    dtypes = option("dtype") or DTYPES
    jobs_by_part = [check_jobs(option("variant"), dtypes, part) for part in option("part") or ["model"]]
    forward = _forward if option("forward_only") else lambda job: job
    return [job for of_part in jobs_by_part for job in sequence([*map(forward, of_part)])]


def _forward(job: Job) -> Job:
    # Unchanged if it has no gradients: the same job twice counts as repeated.
    return dataclasses.replace(job, gradients=False) if job.gradients else job


def _published(option: Callable[[str], Any]) -> list[Job]:
    from concord.conformance.golden.golden_files import DEFAULT, collect

    folders, variants = option("golden") or [str(DEFAULT)], option("variant")
    collected = [] if folders == ["off"] else [collect(Path(folder)) for folder in folders]
    return [job for jobs, _ in collected for job in jobs if variants is None or job.group in variants]


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(f"concord_{name}")
