"""What all cases of a backend say together: a cause that fits one of them and is refuted by another is none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from concord.conformance import tolerance
from concord.conformance.diagnosis.diagnosis import Diagnosis
from concord.conformance.diagnosis.replacement import role_of
from concord.conformance.expectation import JudgedProblem, is_gradient
from concord.conformance.explain import Cause, search
from concord.conformance.explain.effort import Effort, one_thread
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.question import Question
from concord.conformance.wording import distinct
from concord.spec.errors import SpecError

BUDGET = 30.0
"""Seconds of the processor that may be spent on one backend."""

MOST_PASSED = 8
"""In how many cases that passed a cause is tried: those of the same variant first."""


class Judged(Protocol):
    """A result, as a campaign has it: a data class."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def backend(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def case(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def verdict(self) -> Any: ...
    @property
    def attribution(self) -> str: ...


J = TypeVar("J", bound=Judged)


@dataclass(frozen=True)
class Conclusion:
    """What all cases say of one wrong tensor of a backend.

    Attributes:
        backend: its name.
        tensor: without the number of its layer.
        clause: that it most likely breaks.
        cases: how many runs are first wrong there.
        text: sentences.
        refuted: what single cases say and others refute, in sentences.
    """

    backend: str
    tensor: str
    clause: str
    cases: int
    text: str
    refuted: tuple[str, ...] = ()


@one_thread()
def conclude(results: Sequence[J]) -> tuple[list[J], list[Conclusion]]:
    """Explain each divergence, and hold every cause against all cases of its backend.

    Returns:
        The results with what remains of their diagnoses, and what all cases say together.
    """
    explained, found = list(results), list[Conclusion]()
    for backend in dict.fromkeys(result.backend for result in results):
        effort, late = Effort(BUDGET), False
        runs = [i for i, result in enumerate(results) if result.backend == backend and result.verdict]
        groups: dict[str, list[int]] = {}
        for i in runs:
            run = explained[i] = _with(results[i], results[i].verdict.explained())
            if not late and run.status == "diverges" and run.verdict.diagnosis is not None:
                groups.setdefault(role_of(run.verdict.diagnosis.tensor), []).append(i)
            late = late or effort.spent()
        passed = [
            explained[i]
            for i in runs
            if results[i].status == "agrees" and results[i].verdict.case is not None
        ]
        for tensor, wrong in groups.items():
            together = _Together(backend, tensor, [explained[i] for i in wrong], passed, effort)
            for i, diagnosis in zip(wrong, together.revised, strict=True):
                explained[i] = _with(
                    explained[i], dataclasses.replace(explained[i].verdict, diagnosis=diagnosis)
                )
            found.append(together.conclusion)
    return explained, found


def _with(result: J, verdict: Any) -> J:
    return dataclasses.replace(result, verdict=verdict)


class _Together:
    """The runs of a backend that are first wrong at one tensor, and those that are right."""

    def __init__(
        self, backend: str, tensor: str, wrong: Sequence[Judged], passed: Sequence[Judged], effort: Effort
    ) -> None:
        self.wrong, self.passed, self.effort = wrong, passed, effort
        named: dict[str, list[Hypothesis]] = {}
        for run in self.wrong:
            cause = run.verdict.diagnosis.cause
            for name, hypothesis in (
                {one.name: one for one in reversed(cause.hypotheses)}.items() if cause else ()
            ):  # the first of each name
                named.setdefault(name, []).append(hypothesis)
        condition = self.condition()
        refuted = {
            name: words for name, those in named.items() if (words := self.refutation(those, bool(condition)))
        }
        doubtful = {name for name, those in named.items() if len(those) < len(self.wrong)}
        self.revised = [_revised(run.verdict.diagnosis, refuted, doubtful) for run in wrong]
        clauses = [diagnosis.clause for diagnosis in self.revised]
        clause = max(dict.fromkeys(clauses), key=clauses.count)
        best = max(
            (name for name in named if name not in refuted), key=lambda name: len(named[name]), default=None
        )
        lines = [
            f"`{tensor}` is first wrong in {len(wrong)} run{'s' if len(wrong) > 1 else ''} (SPEC {clause})"
        ]
        if best:
            lines.append(f"{named[best][0].text} ({named[best][0].clause}) fits {len(named[best])} of them")
        lines += [condition] if condition else []
        told = tuple(f"not {named[name][0].text}: {words}" for name, words in refuted.items())
        self.conclusion = Conclusion(backend, tensor, clause, len(wrong), "; ".join(lines), told)

    def refutation(self, those: Sequence[Hypothesis], conditional: bool) -> str:
        """Say which case refutes a hypothesis; nothing if none does.

        Args:
            conditional: whether something else than the mistake tells the wrong runs from the right ones.
        """
        if 2 * len(those) < len(self.wrong):
            return f"it explains {len(those)} of {len(self.wrong)} runs"
        if conditional or any(one.weights for one in those):
            return ""  # it is made in some cases only; a weight that is loaded wrongly is that of one model
        groups = {run.group for run in self.wrong}
        for run in sorted(self.passed, key=lambda run: run.group not in groups)[:MOST_PASSED]:
            if self.effort.spent():
                return ""
            if visible(run.verdict.case, self.wrong[0].verdict.diagnosis.tensor, those[0]):
                return f"it would show in {run.case} in {run.dtype}, which is right"
        return ""

    def condition(self) -> str:
        """Say what only the wrong runs have in common, or what one is attributed to: that no input tells."""
        for run in self.wrong:
            if run.attribution:
                return f"{run.case} {run.attribution}"
        if len(self.passed) < 2:
            return ""
        for words, of in FEATURES:
            wrong, right = (
                [value for run in runs if (value := of(run)) is not None]
                for runs in (self.wrong, self.passed)
            )
            if len(wrong) < len(self.wrong) or len(right) < len(self.passed):
                continue
            low, high = min(wrong), max(wrong)
            if low > max(right):
                return f"it is wrong only where {words} {_limit(max(right), low)} or more"
            if high < min(right):
                return f"it is wrong only where {words} {distinct(high, min(right))[0]} or less"
        dtypes = {run.dtype for run in self.wrong}
        if len(dtypes) == 1 and not dtypes & {run.dtype for run in self.passed}:
            return f"it is wrong only in {dtypes.pop()}"
        return ""


def visible(case: JudgedProblem, tensor: str, hypothesis: Hypothesis) -> bool:
    """Return whether a hypothesis of the same name and text would make a tensor of a right run wrong."""
    from concord.conformance.scoring import judge_tensor

    truth = tolerance.plain(case).values
    if tensor not in truth:
        return False
    forced = {name: value for name, value in truth.items() if name != "loss" and not is_gradient(name)}
    question = Question(case, forced, tensor, truth[tensor])
    try:
        like = [one for one in search.of_kind(question, hypothesis.name) if one.text == hypothesis.text]
        for one in like[:1]:
            value = question.values(one)
            return (
                value.shape == truth[tensor].shape
                and judge_tensor(value, question.right.value, question.right.sigma, case.dtype).status
                == "diverges"
            )
    except (SpecError, LookupError, ValueError, TypeError):  # it does not apply there
        return False
    return False


def _revised(diagnosis: Diagnosis, refuted: Mapping[str, str], doubtful: Collection[str]) -> Diagnosis:
    """Return a diagnosis without what other cases refute, and sure of nothing that they do not show too."""
    cause = diagnosis.cause
    if cause is None or not any(one.name in refuted or one.name in doubtful for one in cause.hypotheses):
        return diagnosis
    kept = tuple(one for one in cause.hypotheses if one.name not in refuted)
    told = (
        *(f"not {one.text}: {refuted[one.name]}" for one in cause.hypotheses if one.name in refuted),
        *diagnosis.refuted,
    )
    if kept:
        names = " or ".join(dict.fromkeys(one.name for one in kept))
        sentence = search.sentence(diagnosis.tensor, kept, False)
        return dataclasses.replace(
            diagnosis,
            cause=Cause(names, sentence, False, tuple(one.clause for one in kept), kept),
            refuted=told,
        )
    broken = {one.clause for one in cause.hypotheses}
    # What is left to name are the other clauses; those of the cause come last.
    clauses = (
        *(clause for clause in diagnosis.clauses if clause not in broken),
        *(clause for clause in diagnosis.clauses if clause in broken),
    )
    return dataclasses.replace(diagnosis, cause=None, clauses=clauses, refuted=told)


Feature = Callable[[Judged], float | None]


def _features() -> Iterator[tuple[str, Feature]]:
    def of(get: Callable[[JudgedProblem], float | None]) -> Feature:
        return lambda run: get(run.verdict.case) if run.verdict.case else None

    def shape(case: JudgedProblem, axis: int) -> float | None:
        arrays = [array for array in case.batch.arrays().values() if array.ndim > axis]
        return float(arrays[0].shape[axis]) if arrays else None

    yield "the number of samples is", of(lambda case: shape(case, 0))
    yield "the number of tokens is", of(lambda case: shape(case, 1))
    yield (
        "the largest id is",
        of(lambda case: None if case.batch.input_ids is None else float(case.batch.input_ids.max())),
    )
    yield "the number of heads is", of(lambda case: float(case.config.num_heads))
    yield "the size of a head is", of(lambda case: float(case.config.head_dim))
    yield "the number of layers is", of(lambda case: float(case.config.num_layers))
    yield "the number of classes is", of(lambda case: float(case.config.num_classes))
    yield (
        "the share of padding is",
        of(
            lambda case: (
                None
                if case.batch.input_ids is None
                else float(np.mean(case.batch.input_ids == case.config.pad_id))
            )
        ),
    )
    yield (
        "the largest weight is",
        of(lambda case: float(max(abs(weight).max() for weight in case.weights.values()))),
    )


FEATURES = tuple(_features())
"""What may tell wrong runs from right ones, in words and numbers."""


def _limit(right: float, wrong: float) -> str:
    """Return a power of two between two numbers, if there is one, else the second."""
    power = 2.0 ** math.ceil(math.log2(wrong)) if wrong > 0 else 0.0
    for limit in (power, power / 2):
        if right < limit <= wrong:
            return distinct(limit, right)[0]
    return distinct(wrong, right)[0]
