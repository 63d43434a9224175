"""Comparison of several candidates."""

from __future__ import annotations

import contextlib
import html
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from concord.backends.wire import WorkerFailure
from concord.conformance.compare import prepare
from concord.conformance.compare.candidates import call_of
from concord.conformance.compare.module_reference import ModuleReference, described
from concord.conformance.compare.ways import BATCHES, WAYS
from concord.conformance.judging.verdict import Result, Verdict
from concord.conformance.progress import say
from concord.conformance.run.report import candidates_text
from concord.spec.errors import SpecError, refuse

LEAST_TURNS, MOST_TURNS = 5, 50

# Seconds of timing per candidate, after the minimum number of turns.
SECONDS = 2.0


@dataclass(frozen=True)
class Comparisons(Mapping[str, Verdict]):
    """Verdicts by candidate.

    Attributes:
        outcomes: every candidate's result, also without a verdict; ``"missing"`` ones cannot run here.
        milliseconds: median forward pass of the ``"reference"`` and of agreeing candidates in this process.
        notes: remarks by candidate and topic.
    """

    outcomes: dict[str, Result] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Verdict:
        """A candidate's verdict.

        Raises:
            SpecError: if the candidate could not be judged.
        """
        outcome = self.outcomes[name]
        if outcome.verdict is None:
            raise SpecError(f"{name}: {outcome.detail}")
        return outcome.verdict

    def __iter__(self) -> Iterator[str]:
        return (name for name, outcome in self.outcomes.items() if outcome.verdict)

    def __len__(self) -> int:
        return len([*self])

    @property
    def passed(self) -> bool:
        """Whether every candidate was judged and agrees."""
        return all(outcome.status == "agrees" for outcome in self.outcomes.values())

    @property
    def headline(self) -> str:
        """The candidates that do not agree, in one line."""
        return "; ".join(
            f"{result.backend} {result.verdict.headline if result.verdict else result.status}"
            for result in self.results()
            if result.status != "agrees"
        )

    def explained(self) -> Comparisons:
        """Add an explanation to each divergence."""
        explained = {name: replace(self.outcomes[name], verdict=self[name].explained()) for name in self}
        return replace(self, outcomes=self.outcomes | explained)

    def results(self, reference: str = "", case: str = "") -> list[Result]:
        """A report's results, judged ones first; ``case`` describes the inputs."""
        judged = [self.outcomes[name] for name in self]
        dtype = judged[0].dtype if judged else "float32"
        failed = [replace(outcome, dtype=dtype) for outcome in self.outcomes.values() if not outcome.verdict]
        return [
            replace(
                outcome,
                group=reference,
                case=case,
                milliseconds=self.milliseconds.get(outcome.backend, 0.0),
            )
            for outcome in (*judged, *failed)
        ]

    def __str__(self) -> str:
        return candidates_text(self.explained().results(), self.milliseconds.get("reference", 0.0))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def compare_several(
    reference: Any,
    candidates: Mapping[str, Any],
    inputs: Any = None,
    own_options: Mapping[str, Mapping[str, Any]] | None = None,
    so_far: Comparisons | None = None,
    **options: Any,
) -> Comparisons:
    """Judge several candidates, by name, and time those that agree.

    Args:
        own_options: options of single candidates by name, instead of ``options``.
        so_far: receives each outcome at once, so that a caller keeps it after an interrupt.

    Raises:
        SpecError: if none can be compared.
    """
    so_far = Comparisons() if so_far is None else so_far
    outcomes = so_far.outcomes
    refuse(
        [f"{name!r} is None but must be a candidate" for name, entry in candidates.items() if entry is None]
    )
    references, calls, modules = dict[Any, Any](), dict[str, Callable[[], Any]](), list[ModuleReference]()
    for name, candidate in candidates.items():
        say(f"judging {name}")
        in_way = isinstance(candidate, str) and all(part in WAYS for part in candidate.split("+"))
        candidate_options = {
            **options,
            **(own_options or {}).get(name, {}),
            "way" if in_way else "candidate": candidate,
        }
        try:
            comparison = prepare(reference, inputs=inputs, known=references, **candidate_options)
            verdict = comparison.verdict(several=True)
        except (SpecError, WorkerFailure) as error:
            failure = error if isinstance(error, WorkerFailure) else WorkerFailure("missing", str(error))
            outcomes[name] = Result(
                name, "", "", "float32", failure.status, failure.detail, stderr=failure.stderr
            )
            continue
        outcomes[name] = Result(name, "", "", comparison.reference.precision, verdict.status, verdict=verdict)
        so_far.notes.update({f"{name}, {topic}": text for topic, text in comparison.notes.items()})
        other_batches = in_way and candidate in BATCHES  # their times say nothing about speed
        if verdict.passed and comparison.call and not other_batches:
            calls[name] = comparison.call
            modules += [comparison.theirs] if comparison.theirs else []
    if all(outcome.status == "missing" for outcome in outcomes.values()):
        # A fault of the reference or its inputs is reported for each candidate.
        reasons = dict.fromkeys(outcome.detail for outcome in outcomes.values())
        raise SpecError([*reasons] or "no candidate is given but one must be")
    model = next((entry for entry in references.values() if isinstance(entry, ModuleReference)), None)
    if model and calls and (own := call_of(model, model)):
        calls, modules = {"reference": own, **calls}, [model, *modules]
    with contextlib.ExitStack() as stack:
        for module in modules:  # restores the caller's modules
            stack.enter_context(module.untouched())
        try:
            so_far.milliseconds.update(milliseconds(calls))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a candidate's, whose verdict remains
            so_far.notes["times"] = f"not measured: {described(error)}"
    return so_far


def milliseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median times of calls that take turns."""
    turns = {name: list[float]() for name in calls}
    for call in calls.values():  # a compiled program is compiled in its first call
        call()
    first_start = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() - first_start > SECONDS * len(calls):
            break
        for name, call in calls.items():
            call()  # warms the caches after the previous candidate
            start = _now()
            call()
            turns[name].append(_now() - start)
    return {name: 1000 * statistics.median(seconds) for name, seconds in turns.items()}


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
