"""Conclusions from all cases of a backend: no cause may contradict another case (decision 19)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

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

# Seconds of processor time per backend.
BUDGET = 30.0

# Number of passed cases in which a cause is tried, those of the same variant first.
MOST_PASSED = 8


@dataclass(frozen=True)
class Conclusion:
    """Conclusion from all runs of a backend that are first wrong at one tensor.

    Attributes:
        tensor: its name without the layer number.
    """

    backend: str
    tensor: str
    clause: str
    cases: int
    text: str


@one_thread()
def conclude(results: Sequence[Result]) -> tuple[list[Result], list[Conclusion]]:
    """Explain each divergence, and test every cause on all cases of its backend.

    Returns:
        The results with revised explanations, and the conclusions.
    """
    explained, conclusions = list(results), list[Conclusion]()
    for backend in dict.fromkeys(result.backend for result in results):
        effort, groups, passed = Effort(BUDGET), dict[str, list[int]](), list[Result]()
        for i, result in enumerate(results):
            if result.backend != backend or result.verdict is None:
                continue
            verdict = result.verdict.explained()
            run = explained[i] = dataclasses.replace(result, verdict=verdict)
            if run.status == "diverges" and verdict.explanation:
                groups.setdefault(role_of(verdict.explanation.tensor), []).append(i)
            if run.status == "agrees":
                passed.append(run)
        for tensor, wrong in groups.items():
            revised, conclusion = _together(backend, tensor, [explained[i] for i in wrong], passed, effort)
            for i, explanation in zip(wrong, revised, strict=True):
                verdict = dataclasses.replace(_verdict(explained[i]), explanation=explanation)
                explained[i] = dataclasses.replace(explained[i], verdict=verdict)
            conclusions.append(conclusion)
    return explained, conclusions


def _verdict(run: Result) -> Verdict:
    assert run.verdict is not None
    return run.verdict


def _together(
    backend: str, tensor: str, wrong: Sequence[Result], passed: Sequence[Result], effort: Effort
) -> tuple[list[Explanation], Conclusion]:
    explanations = [known for run in wrong if (known := _verdict(run).explanation)]
    named: dict[str, list[list[Hypothesis]]] = {}
    for explanation in explanations:
        for name, of_name in gather(explanation.hypotheses, lambda hypothesis: hypothesis.name).items():
            named.setdefault(name, []).append(of_name)
    condition = _condition(wrong, passed)
    some = {name for name, of_name in named.items() if len(of_name) < len(wrong)}
    # A cause that fits fewer than half of the wrong cases is not named (decision 19).
    refuted = {name for name in some if 2 * len(named[name]) < len(wrong)}
    groups = {run.group for run in wrong}
    nearest = sorted(passed, key=lambda run: run.group not in groups)
    if not condition:  # a bug under a condition need not show in passed cases
        tried = {name: of_name for name, of_name in named.items() if name not in refuted}
        refuted |= {
            name
            for name, of_name in tried.items()
            if _shown(of_name, explanations[0].tensor, nearest, effort)
        }
    revised = [_revised(explanation, refuted, some) for explanation in explanations]
    clauses = [explanation.clause for explanation in revised]
    clause = max(dict.fromkeys(clauses), key=clauses.count)
    lines = [f"`{tensor}` is first wrong in {counted(len(wrong), 'run')} (SPEC {clause})"]
    if left := [of_name for name, of_name in named.items() if name not in refuted]:
        hypothesis, times = _commonest(max(left, key=len))
        lines.append(f"{hypothesis.text} ({hypothesis.clause}) fits {times} of them")
    lines += [condition] if condition else []
    return revised, Conclusion(backend, tensor, clause, len(wrong), "; ".join([*lines, *effort.failures]))


def _shown(
    named: Sequence[Sequence[Hypothesis]], tensor: str, passed: Sequence[Result], effort: Effort
) -> bool:
    tried, _ = _commonest(named)
    if any("request" in hypothesis.change.places for of_run in named for hypothesis in of_run):
        return False  # a conversion may spoil the weights of one model alone
    for run in passed[:MOST_PASSED]:
        if effort.spent():
            return False
        case = _verdict(run).case
        with effort.attempt(f"trying {tried.name} in {run.case}"):
            if case is not None and visible(case, tensor, tried):
                return True
    return False


def _condition(wrong: Sequence[Result], passed: Sequence[Result]) -> str:
    for run in wrong:
        if run.attribution:
            return f"{run.case} {run.attribution}"
    conditions = []
    for words, feature in FEATURES.items() if len(passed) > 1 else ():
        having, lacking = (
            [case and feature(case) for case in (_verdict(run).case for run in runs)]
            for runs in (wrong, passed)
        )
        if all(having) and all(present is False for present in lacking):
            conditions.append(words)
    dtypes, others = ({run.dtype for run in runs} for runs in (wrong, passed))
    if others and len(dtypes) == 1 and not dtypes & others:
        conditions.append(f"the precision is {dtypes.pop()}")
    return f"it is wrong only where {'; only where '.join(conditions)}" if conditions else ""


def _commonest(named: Sequence[Sequence[Hypothesis]]) -> tuple[Hypothesis, int]:
    """Return the hypothesis that most runs name in the same words, and their number."""
    alike = gather((each for of_run in named for each in of_run), lambda each: each.text)
    most = max(alike.values(), key=len)
    return most[0], len(most)


def _size(case: JudgedProblem, axis: int) -> int:
    return next((array.shape[axis] for array in case.batch.arrays().values() if array.ndim > axis), 0)


def _padded(case: JudgedProblem) -> bool | None:
    ids = case.batch.input_ids
    return None if ids is None else bool((ids == case.config.pad_id).any())


# Features that only wrong runs may share. None: the case does not tell.
FEATURES: Mapping[str, Callable[[JudgedProblem], bool | None]] = {
    "there is one sample": lambda case: _size(case, 0) == 1,
    "there is one token": lambda case: _size(case, 1) == 1,
    "there is padding": _padded,
    "there is no padding": lambda case: None if _padded(case) is None else not _padded(case),
}


def visible(case: JudgedProblem, tensor: str, hypothesis: Hypothesis) -> bool:
    """Return whether a hypothesis would make a correct tensor wrong."""
    truth = family.plain(case)
    if tensor not in truth:
        return False
    pinned = {name: value for name, value in truth.items() if name != "loss" and not is_gradient(name)}
    question = Question(case, pinned, tensor, truth[tensor])
    with contextlib.suppress(*INAPPLICABLE):
        same = like(question, hypothesis)
        return same is not None and not question.compatible(same)
    return False


def _revised(explanation: Explanation, refuted: Collection[str], doubtful: Collection[str]) -> Explanation:
    hypotheses = explanation.hypotheses
    if not any(each.name in refuted or each.name in doubtful for each in hypotheses):
        return explanation
    # If no cause remains, the clauses of the refuted one come last.
    clauses, kept = explanation.clauses, [each for each in hypotheses if each.name not in refuted]
    if not kept:
        broken = {each.clause for each in hypotheses}
        clauses = tuple(sorted(clauses, key=lambda clause: clause in broken))
    left = explained_by(explanation.tensor, kept, False) if kept else Explanation(explanation.tensor)
    return dataclasses.replace(
        left, clauses=clauses, description=explanation.description, notes=explanation.notes
    )
