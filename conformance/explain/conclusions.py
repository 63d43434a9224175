"""Conclusions from all cases of a backend: no cause may contradict another case (decision 19)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis, explained_by
from concord.conformance.explain.partial_model import role_of
from concord.conformance.explain.question import Question
from concord.conformance.explain.search import Effort, one_thread
from concord.conformance.explain.suspects import like
from concord.conformance.judging import family
from concord.conformance.judging.expectation import JudgedProblem, is_gradient
from concord.conformance.judging.explanation import Explanation
from concord.conformance.judging.verdict import Result, Verdict
from concord.conformance.wording import counted, gather

# Seconds of CPU time per backend.
BUDGET = 30.0

# Number of passed cases in which a cause is tried, starting with the same variant.
MOST_PASSED = 8


@dataclass(frozen=True)
class Conclusion:
    """Conclusion from all runs of a backend that first diverge at one tensor.

    Attributes:
        tensor: the tensor's name without the layer number.
    """

    backend: str
    tensor: str
    clause: str
    cases: int
    text: str


@one_thread()
def conclude(results: Sequence[Result]) -> tuple[list[Result], list[Conclusion]]:
    """Explain each divergence, and test every cause on all cases of its backend."""
    explained, conclusions = list(results), list[Conclusion]()
    for backend in dict.fromkeys(result.backend for result in results):
        effort, groups, passed = Effort(BUDGET), dict[str, list[int]](), list[Result]()
        for i, result in enumerate(results):
            if result.backend != backend or result.verdict is None:
                continue
            verdict = result.verdict.explained()
            run = explained[i] = replace(result, verdict=verdict)
            if run.status == "diverges" and verdict.explanation:
                groups.setdefault(role_of(verdict.explanation.tensor), []).append(i)
            if run.status == "agrees":
                passed.append(run)
        for tensor, indices in groups.items():
            explanations, conclusion = _together(
                backend, tensor, [explained[i] for i in indices], passed, effort
            )
            for i, explanation in zip(indices, explanations, strict=True):
                verdict = replace(_verdict(explained[i]), explanation=explanation)
                explained[i] = replace(explained[i], verdict=verdict)
            conclusions.append(conclusion)
    return explained, conclusions


def _verdict(run: Result) -> Verdict:
    assert run.verdict is not None
    return run.verdict


def _together(
    backend: str, tensor: str, wrong: Sequence[Result], passed: Sequence[Result], effort: Effort
) -> tuple[list[Explanation], Conclusion]:
    explanations = [cause for run in wrong if (cause := _verdict(run).explanation)]
    by_name: dict[str, list[list[Hypothesis]]] = {}
    for explanation in explanations:
        for name, of_name in gather(explanation.hypotheses, lambda hypothesis: hypothesis.name).items():
            by_name.setdefault(name, []).append(of_name)
    condition = _condition(wrong, passed)
    doubtful = {name for name, of_name in by_name.items() if len(of_name) < len(wrong)}
    # A cause that fits fewer than half of the wrong cases is not named (decision 19).
    refuted = {name for name in doubtful if 2 * len(by_name[name]) < len(wrong)}
    groups = {run.group for run in wrong}
    nearest = sorted(passed, key=lambda run: run.group not in groups)
    if not condition:  # a conditional bug need not appear in passed cases
        candidates = {name: of_name for name, of_name in by_name.items() if name not in refuted}
        refuted |= {
            name
            for name, of_name in candidates.items()
            if _shown(of_name, explanations[0].tensor, nearest, effort)
        }
    revised = [_revised(explanation, refuted, doubtful) for explanation in explanations]
    clauses = [explanation.clause for explanation in revised]
    clause = max(dict.fromkeys(clauses), key=clauses.count)
    lines = [f"`{tensor}` is the first wrong tensor in {counted(len(wrong), 'run')} (SPEC {clause})"]
    if survivors := [of_name for name, of_name in by_name.items() if name not in refuted]:
        hypothesis, times = _commonest(max(survivors, key=len))
        lines.append(f"{hypothesis.text} ({hypothesis.clause}) fits {times} of them")
    lines += [condition] if condition else []
    return revised, Conclusion(backend, tensor, clause, len(wrong), "; ".join([*lines, *effort.failures]))


def _shown(
    groups: Sequence[Sequence[Hypothesis]], tensor: str, passed: Sequence[Result], effort: Effort
) -> bool:
    candidate, _ = _commonest(groups)
    if any("request" in hypothesis.change.places for of_run in groups for hypothesis in of_run):
        return False  # a conversion may corrupt the weights of only one model
    for run in passed[:MOST_PASSED]:
        if effort.spent():
            return False
        case = _verdict(run).case
        with effort.attempt(f"trying {candidate.name} in {run.case}"):
            if case is not None and visible(case, tensor, candidate):
                return True
    return False


def _condition(wrong: Sequence[Result], passed: Sequence[Result]) -> str:
    for run in wrong:
        if run.attribution:
            return f"{run.case} {run.attribution}"
    conditions = []
    for words, feature in FEATURES.items() if len(passed) > 1 else ():
        in_wrong, in_passed = (
            [case and feature(case) for case in (_verdict(run).case for run in runs)]
            for runs in (wrong, passed)
        )
        if all(in_wrong) and all(present is False for present in in_passed):
            conditions.append(words)
    dtypes, passed_dtypes = ({run.dtype for run in runs} for runs in (wrong, passed))
    if passed_dtypes and len(dtypes) == 1 and not dtypes & passed_dtypes:
        conditions.append(f"the precision is {dtypes.pop()}")
    return f"it is wrong only where {'; only where '.join(conditions)}" if conditions else ""


def _commonest(groups: Sequence[Sequence[Hypothesis]]) -> tuple[Hypothesis, int]:
    wordings = gather(
        (hypothesis for of_run in groups for hypothesis in of_run), lambda hypothesis: hypothesis.text
    )
    commonest = max(wordings.values(), key=len)
    return commonest[0], len(commonest)


def _size(case: JudgedProblem, axis: int) -> int:
    return next((array.shape[axis] for array in case.batch.arrays().values() if array.ndim > axis), 0)


def _padded(case: JudgedProblem) -> bool | None:
    ids = case.batch.input_ids
    return None if ids is None else bool((ids == case.config.pad_id).any())


# Features that only wrong runs may share. None: the case is inconclusive.
FEATURES: Mapping[str, Callable[[JudgedProblem], bool | None]] = {
    "there is one sample": lambda case: _size(case, 0) == 1,
    "there is one token": lambda case: _size(case, 1) == 1,
    "there is padding": _padded,
    "there is no padding": lambda case: None if _padded(case) is None else not _padded(case),
}


def visible(case: JudgedProblem, tensor: str, hypothesis: Hypothesis) -> bool:
    """Whether a hypothesis would make a correct tensor wrong."""
    truth = family.plain(case)
    if tensor not in truth:
        return False
    pinned = {name: value for name, value in truth.items() if name != "loss" and not is_gradient(name)}
    question = Question(case, pinned, tensor, truth[tensor])
    with contextlib.suppress(*INAPPLICABLE):
        counterpart = like(question, hypothesis)
        return counterpart is not None and not question.compatible(counterpart)
    return False


def _revised(explanation: Explanation, refuted: Collection[str], doubtful: Collection[str]) -> Explanation:
    hypotheses = explanation.hypotheses
    if not any(hypothesis.name in refuted or hypothesis.name in doubtful for hypothesis in hypotheses):
        return explanation
    # If no cause remains, the refuted cause's clauses come last.
    clauses, remaining = (
        explanation.clauses,
        [hypothesis for hypothesis in hypotheses if hypothesis.name not in refuted],
    )
    if not remaining:
        refuted_clauses = {hypothesis.clause for hypothesis in hypotheses}
        clauses = tuple(sorted(clauses, key=lambda clause: clause in refuted_clauses))
    revision = (
        explained_by(explanation.tensor, remaining, False) if remaining else Explanation(explanation.tensor)
    )
    return replace(revision, clauses=clauses, description=explanation.description, notes=explanation.notes)
