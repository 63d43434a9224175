"""What all cases of a backend say together.

A cause that fits one of them and is refuted by another is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from concord.conformance import tolerance
from concord.conformance.expectation import JudgedProblem, is_gradient
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis, caused
from concord.conformance.explain.question import Question
from concord.conformance.explain.said import Diagnosis
from concord.conformance.explain.search import Effort, one_thread
from concord.conformance.explain.step import role_of
from concord.conformance.explain.suspects import like
from concord.conformance.verdict import Result, Verdict
from concord.conformance.wording import gather

BUDGET = 30.0
"""Seconds of the processor that may be spent on one backend."""

MOST_PASSED = 8
"""In how many cases that passed a cause is tried: those of the same variant first."""


@dataclass(frozen=True)
class Conclusion:
    """What all cases say of one wrong tensor of a backend.

    Attributes:
        backend: its name.
        tensor: without the number of its layer.
        clause: that it most likely breaks.
        cases: how many runs are first wrong there.
        text: sentences.
    """

    backend: str
    tensor: str
    clause: str
    cases: int
    text: str


@one_thread()
def conclude(results: Sequence[Result]) -> tuple[list[Result], list[Conclusion]]:
    """Explain each divergence, and hold every cause against all cases of its backend.

    Returns:
        The results with what remains of their diagnoses, and what all cases say together.
    """
    explained, found = list(results), list[Conclusion]()
    for backend in dict.fromkeys(result.backend for result in results):
        effort, groups, passed = Effort(BUDGET), dict[str, list[int]](), list[Result]()
        for i, result in enumerate(results):
            if result.backend != backend or result.verdict is None:
                continue
            verdict = result.verdict.explained()
            run = explained[i] = dataclasses.replace(result, verdict=verdict)
            if run.status == "diverges" and verdict.diagnosis:
                groups.setdefault(role_of(verdict.diagnosis.tensor), []).append(i)
            if run.status == "agrees":
                passed.append(run)
        for tensor, wrong in groups.items():
            together = _Together([explained[i] for i in wrong], passed, effort)
            for i, revised in zip(wrong, together.revised, strict=True):
                verdict = dataclasses.replace(_verdict(explained[i]), diagnosis=revised)
                explained[i] = dataclasses.replace(explained[i], verdict=verdict)
            found.append(together.conclusion(backend, tensor))
    return explained, found


def _verdict(run: Result) -> Verdict:
    assert run.verdict is not None
    return run.verdict


class _Together:
    """The runs of a backend that are first wrong at one tensor, and those that are right."""

    def __init__(self, wrong: Sequence[Result], passed: Sequence[Result], effort: Effort) -> None:
        self.wrong, self.passed, self.effort = wrong, passed, effort
        self.diagnoses = [diagnosis for run in wrong if (diagnosis := _verdict(run).diagnosis)]
        self.named: dict[str, list[list[Hypothesis]]] = {}
        for diagnosis in self.diagnoses:
            those = diagnosis.cause.hypotheses if diagnosis.cause else ()
            for name, of_name in gather(those, lambda one: one.name).items():
                self.named.setdefault(name, []).append(of_name)
        self.condition = self._condition()
        self.refuted = {name for name, those in self.named.items() if self._refuted(those)}
        doubtful = {name for name, those in self.named.items() if len(those) < len(wrong)}
        self.revised = [_revised(diagnosis, self.refuted, doubtful) for diagnosis in self.diagnoses]

    def conclusion(self, backend: str, tensor: str) -> Conclusion:
        """Return what holds of all runs."""
        count, clauses = len(self.wrong), [diagnosis.clause for diagnosis in self.revised]
        clause = max(dict.fromkeys(clauses), key=clauses.count)
        lines = [f"`{tensor}` is first wrong in {count} run{'s' if count > 1 else ''} (SPEC {clause})"]
        best = max(
            (those for name, those in self.named.items() if name not in self.refuted), key=len, default=()
        )
        if best:
            one, times = _commonest(best)
            lines.append(f"{one.text} ({one.clause}) fits {times} of them")
        lines += [self.condition] if self.condition else []
        lines += self.effort.failures
        return Conclusion(backend, tensor, clause, count, "; ".join(lines))

    def _refuted(self, named: Sequence[Sequence[Hypothesis]]) -> bool:
        """Return whether other cases refute the hypotheses of a name, of each run."""
        if 2 * len(named) < len(self.wrong):
            return True
        tried, _ = _commonest(named)
        if self.condition or any(one.weights for those in named for one in those):
            return (
                False  # it is made in some cases only; a weight that is loaded wrongly is that of one model
            )
        groups = {run.group for run in self.wrong}
        for run in sorted(self.passed, key=lambda run: run.group not in groups)[:MOST_PASSED]:
            if self.effort.spent():
                return False
            case = _verdict(run).case
            with self.effort.attempt(f"trying {tried.name} in {run.case}"):
                if case is not None and visible(case, self.diagnoses[0].tensor, tried):
                    return True
        return False

    def _condition(self) -> str:
        """Say what only the wrong runs have in common, or what one is attributed to: that no input tells."""
        for run in self.wrong:
            if run.attribution:
                return f"{run.case} {run.attribution}"
        found = []
        for words, feature in FEATURES.items() if len(self.passed) > 1 else ():
            wrong, right = (
                [case and feature(case) for case in (_verdict(run).case for run in runs)]
                for runs in (self.wrong, self.passed)
            )
            if all(wrong) and not any(right):
                found.append(words)
        dtypes, others = ({run.dtype for run in runs} for runs in (self.wrong, self.passed))
        if others and len(dtypes) == 1 and not dtypes & others:
            found.append(f"the precision is {dtypes.pop()}")
        return f"it is wrong only where {'; only where '.join(found)}" if found else ""


def _commonest(named: Sequence[Sequence[Hypothesis]]) -> tuple[Hypothesis, int]:
    """Return the hypothesis that most runs name, in the same words, and how many do.

    Args:
        named: for each run, its hypotheses of one name: they may differ in a number.
    """
    alike = gather((one for those in named for one in those), lambda one: one.text)
    most = max(alike.values(), key=len)
    return most[0], len(most)


def _size(case: JudgedProblem, axis: int) -> int:
    return next((array.shape[axis] for array in case.batch.arrays().values() if array.ndim > axis), 0)


def _padded(case: JudgedProblem) -> bool:
    ids = case.batch.input_ids
    return ids is not None and bool((ids == case.config.pad_id).any())


FEATURES: Mapping[str, Callable[[JudgedProblem], bool]] = {
    "there is one sample": lambda case: _size(case, 0) == 1,
    "there is one token": lambda case: _size(case, 1) == 1,
    "there is padding": _padded,
    "there is no padding": lambda case: not _padded(case),
}
"""What may be only in wrong runs."""


def visible(case: JudgedProblem, tensor: str, hypothesis: Hypothesis) -> bool:
    """Return whether a hypothesis of the same name and text would make a tensor of a right run wrong."""
    truth = tolerance.plain(case).values
    if tensor not in truth:
        return False
    pinned = {name: value for name, value in truth.items() if name != "loss" and not is_gradient(name)}
    question = Question(case, pinned, tensor, truth[tensor])
    with contextlib.suppress(*INAPPLICABLE):
        one = like(question, hypothesis)
        return one is not None and not question.compatible(one)
    return False


def _revised(diagnosis: Diagnosis, refuted: Collection[str], doubtful: Collection[str]) -> Diagnosis:
    """Return a diagnosis without what other cases refute, and sure of nothing that they do not show too."""
    cause = diagnosis.cause
    if cause is None or not any(one.name in refuted or one.name in doubtful for one in cause.hypotheses):
        return diagnosis
    kept = tuple(one for one in cause.hypotheses if one.name not in refuted)
    if kept:
        return dataclasses.replace(diagnosis, cause=caused(diagnosis.tensor, kept, False))
    # What is left to name are the other clauses; those of the cause come last.
    broken = {one.clause for one in cause.hypotheses}
    clauses = tuple(sorted(diagnosis.clauses, key=lambda clause: clause in broken))
    return dataclasses.replace(diagnosis, cause=None, clauses=clauses)
