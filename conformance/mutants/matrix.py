"""The detection matrix: where each mutant is found, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from concord import backends
from concord.backends.interface import Run, Unsupported
from concord.backends.pool import Pool
from concord.backends.wire import WorkerFailure
from concord.backends.worker import Worker
from concord.conformance.bugs.bug import REFUSED, Bug
from concord.conformance.bugs.catalogue import KNOWN, MODULES
from concord.conformance.explain.family_judge import Misfit
from concord.conformance.judging.verdict import Row, Verdict, number
from concord.conformance.mutants.training_detection import divergence_of, shown
from concord.conformance.record_fields import Count, Number
from concord.conformance.run.campaign import Setup
from concord.conformance.run.standard_jobs import job_of
from concord.spec.cases import Case, build_case
from concord.spec.errors import SpecError, refuse, unknowns


@dataclass(frozen=True)
class Finding:
    """The result of one mutant on one backend.

    Attributes:
        status: ``"found"``; ``"misplaced"``: found at a different tensor; ``"missed"``; ``"failed"``: no
            result; ``"absent"``: framework not installed.
        tensor: the first wrong tensor, or :data:`concord.conformance.bugs.bug.REFUSED`.
        margin: that tensor's error in tolerances.
        cause: ``"right"`` if the explanation names the bug, ``"none"`` or ``"wrong"``; empty if unknown.
        said: hypotheses of the explanation.
        clause: ``"right"`` if the explanation names the broken clause, else ``"wrong"``; empty if
            unexplained.
        row: the tensor's judgement.
    """

    mutant: str
    backend: str
    status: str
    tensor: str = ""
    margin: Number = 0.0
    case: str = ""
    dtype: str = ""
    detail: str = ""
    cause: str = ""
    said: str = ""
    clause: str = ""
    row: Row | None = None

    @property
    def cell(self) -> str:
        """Text of the matrix cell."""
        return f"{number(self.margin)} ✓" if self.status == "found" else self.status


@dataclass
class Matrix:
    """The findings of all mutants.

    Attributes:
        findings: one per mutant and backend.
        asked: backends that the user named, whose absence is a failure.
        unfinished: findings missing because of an early end.
    """

    findings: list[Finding]
    asked: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    unfinished: Count = 0

    @property
    def exit_code(self) -> int:
        """0: all found at the correct tensor, named or not; 1: not all; 3: a failed or unfinished backend."""
        statuses = {finding.status for finding in self.findings}
        if (
            "failed" in statuses
            or self.unfinished
            or not statuses - {"absent"}
            or any(f.status == "absent" and f.backend in self.asked for f in self.findings)
        ):
            return 3
        return 1 if statuses & {"misplaced", "missed"} else 0


def plugin(backend: str) -> str:
    """Class path of a backend with bugs."""
    return f"concord.conformance.mutants.plugins.{backend}:Mutated"


def mutable(names: Sequence[str] | None) -> list[str]:
    """Named built-in backends, by default all."""
    refuse(unknowns("backend", names or [], backends.BUILT_IN))
    return list(names or backends.BUILT_IN)


def select_mutants(names: Sequence[str] | None) -> list[Bug]:
    """Mutants by name or operation, by default all."""
    selection = set(names or MODULES)
    refuse(unknowns("mutant", names or [], [*KNOWN, *MODULES]))
    return [mutant for mutant in KNOWN.values() if selection & {mutant.name, mutant.operation}]


# A function of a backend's name, and its finished mutant or "started".
Progress = Callable[[str, str], None]


def turns(mutants: Sequence[Bug], names: Sequence[str], every: bool = False) -> dict[str, Sequence[Bug]]:
    """Assign each mutant to one backend in turn, or to all."""
    step = 1 if every else len(names)
    return {name: mutants[0 if every else place :: step] for place, name in enumerate(names)}


def conduct(
    asked: Mapping[str, Sequence[Bug]],
    settings: Setup,
    progress: Progress = lambda backend, done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Matrix:
    """Run mutants on several backends in parallel."""
    with Pool(halted=stopped) as pool:
        hunts = [Hunt(name, settings, progress, pool) for name in asked]
        findings = pool.map(lambda hunt: hunt.all(asked[hunt.backend]), hunts)
    versions = {hunt.backend: hunt.version for hunt in hunts if hunt.version}
    all_findings = [finding for of_backend in findings for finding in of_backend]
    return Matrix(all_findings, settings.asked, versions, sum(map(len, asked.values())) - len(all_findings))


class Hunt:
    """A run of mutants on one backend.

    Args:
        diagnosing: whether to explain findings, the slowest part.
    """

    def __init__(
        self,
        backend: str,
        settings: Setup | None = None,
        progress: Progress = lambda backend, done: None,
        pool: Pool | None = None,
        worker: Worker | None = None,
        diagnosing: bool = True,
    ) -> None:
        self.backend, self.progress, self.version = backend, progress, ""
        self.diagnosing = diagnosing
        self.pool = pool or Pool()
        self.supervisor = self.pool.supervise(
            partial((settings or Setup()).open, plugin(backend)), started=self.started, worker=worker
        )

    def all(self, mutants: Sequence[Bug]) -> list[Finding]:
        """Return one finding per mutant, until the pool stops."""
        findings = []
        for mutant in mutants:
            finding = self.find(mutant)
            if self.pool.stopped:  # the worker was stopped during this mutant
                break
            findings.append(finding)
            self.progress(self.backend, mutant.name)
        self.supervisor.close()
        return findings

    def started(self, worker: Worker) -> None:
        """Record the backend's version."""
        self.version = str(worker.description.get("version", ""))
        self.progress(self.backend, "started")

    def find(self, mutant: Bug) -> Finding:
        """Try a mutant in its precisions until found."""
        ended = partial(Finding, mutant.name, self.backend)
        try:
            for dtype in mutant.precisions:
                if finding := self.look(mutant, dtype):
                    return finding
            return ended("missed")
        except WorkerFailure as failure:
            return ended("absent" if failure.status == "absent" else "failed", detail=str(failure))
        except (SpecError, Unsupported) as error:
            return ended("failed", detail=str(error))

    def look(self, mutant: Bug, dtype: str) -> Finding | None:
        """Try a mutant in one precision; None if missed."""
        case = f"{mutant.variant}-{mutant.scenario}"

        def found(right: bool, tensor: str, margin: float, **fields: Any) -> Finding:
            status = "found" if right else "misplaced"
            return Finding(mutant.name, self.backend, status, tensor, margin, case, dtype, **fields)

        if mutant.of_training:
            divergence = self.supervisor.do(
                partial(divergence_of, bug=mutant, dtype=dtype, explaining=self.diagnosing)
            )
            if divergence is None:
                return None
            row, cause, expected = divergence.row, divergence.cause, shown(mutant.name, dtype)
            right = (divergence.step, row.tensor.split(".")[2]) == (expected.step, expected.section)
            detail = (
                "" if right else f"should show first in step {expected.step + 1}, in its {expected.section}"
            )
            clauses = cause.clauses if cause else (row.clause,)
        else:
            try:
                verdict = self.verdict(mutant, dtype)
            except (WorkerFailure, Misfit) as refusal:
                if isinstance(refusal, WorkerFailure) and refusal.status != "error":
                    raise
                return found(mutant.rightly_first(REFUSED), REFUSED, float("inf"), detail=str(refusal))
            if (first_row := verdict.first_divergence) is None:
                return None
            row, right, detail = first_row, mutant.rightly_first(first_row.tensor), first_row.note
            explanation = verdict.explained().explanation if self.diagnosing else None
            if explanation is None:
                return found(right, row.tensor, row.ratio, detail=detail, row=row)
            cause, clauses = explanation, (explanation.clause,)
        names = cause.hypothesis if cause else ""
        clause = "right" if mutant.clause in clauses else "wrong"
        diagnosis = {"cause": mutant.diagnosed(names), "said": names, "clause": clause}
        return found(right, row.tensor, row.ratio, detail=detail, row=row, **diagnosis)

    def verdict(self, mutant: Bug, dtype: str) -> Verdict:
        """Judge a mutant's run in its standard case."""

        def run(case: Case) -> Run:
            options = (dtype, f"mutant:{mutant.name}")
            return self.supervisor.do(
                lambda worker: worker.run(
                    case.config, case.weights, case.batch, case.part, *options, tap_gradients=True
                )
            )

        build = partial(build_case, mutant.variant, options=mutant.options)
        if mutant.after:
            run(build(mutant.after))
        case = build(mutant.scenario)
        return job_of(case, dtype).judge(run(case))
