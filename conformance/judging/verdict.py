"""The verdict on one run."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from concord.conformance.judging.breakdown import Breakdown
from concord.conformance.judging.estimate import Z, rms_limit
from concord.conformance.judging.exemptions import ABSENT, CONSTANT, DECLARED, NOT_EXPOSED, UNUSED
from concord.conformance.judging.expectation import is_buffer, is_gradient, is_tap_gradient
from concord.conformance.judging.explanation import DECLARABLE, Explanation
from concord.conformance.record_fields import Count, Field, Number, Unwritten, also, among, short
from concord.conformance.wording import counted, distinct, gather
from concord.spec.text import first_of, shown

# Maximum lengths of a line and of a name in it: names are external, and may have any length.
LONGEST_LINE, LONGEST_NAME = 1000, 160

# Cause of a tensor that holds a later one's values.
MERGED = "merged_layers"

# Prefix of a note on an error shared by elements.
NO_ELEMENT = "no single element exceeds its tolerance"


# Statuses of results that a backend failed to return.
FAILED_WORKER = ("missing", "broken", "crashed", "timed out", "out of memory", "error")

# A run that Concord failed to judge, through no fault of the backend.
NOT_JUDGED = "not judged"

# A known divergence that a project has accepted for a reason.
ACCEPTED = "accepted"

# Outcomes of a run, worst first, with their meanings.
STATUSES = {
    "diverges": "a tensor exceeds its tolerance, or is missing, not finite, or in another precision",
    NOT_JUDGED: "a bug in Concord itself, with its traceback; no backend is to blame",
    "missing": "a backend requested by name is not installed, a candidate cannot run, or a case has no run",
    "broken": "its process or framework cannot start, or its answer holds unknown or misshapen tensors",
    "crashed": "its process ended; the message names the signal or the exit code",
    "timed out": "no answer within the time limit",
    "out of memory": "it exceeded its memory limit, or the machine's",
    "error": "it raised an exception, gave an unreadable answer, or computed in another precision",
    "refused": "the backend rejected the input because it does not meet the specification",
    "nondeterministic": "correct each time, but not bit for bit the same (SPEC DRP-1)",
    "undetermined": "an output, the forward pass or the gradients could not be judged: the run does not "
    "return them, or the precision does not determine them",
    ACCEPTED: "it diverges only where the project accepts that, with a stated reason",
    "unsupported": "the backend cannot do this, and says why (SPEC PRC-3)",
    "absent": "not installed, and not requested by name",
    "agrees": "every judged tensor is within its tolerance",
}


# Sections of a training step, in order of computation.
STEP_SECTIONS = ("losses", "gradients", "norm", "clipped", "rate", "moments", "parameters")

# Edges of an error histogram, in sigma; an additional bin counts errors beyond the last edge.
Z_BINS = tuple(2.0**i for i in range(-8, 9))

BINS = len(Z_BINS) + 1


def _kind_of(tensor: str) -> str:
    if is_tap_gradient(tensor):
        return "gradients with respect to activations"
    if is_buffer(tensor):
        return "buffers"
    return "gradients" if is_gradient(tensor) else "activations"


def section_of(tensor: str) -> str:
    """Return ``"forward"``, ``"gradients"``, or one of :data:`STEP_SECTIONS`."""
    if is_gradient(tensor):
        return "gradients"
    kind, *names = tensor.split(".")
    if kind != "steps":
        return "forward"
    return names[1] if names[1] in STEP_SECTIONS else "moments"


def conclude(statuses: Iterable[tuple[str, str]]) -> tuple[str, tuple[str, ...]]:
    """Status of a run, and the sections without a judged tensor.

    Args:
        statuses: section and status of each tensor, and of outputs as their own sections, without tensors
            declared missing.
    """
    # Each section needs a judged tensor: otherwise, runs would agree without any gradient (decision 31).
    sections: dict[str, set[str]] = {}
    for section, status in statuses:
        sections.setdefault(section, set()).add(status)
    judged = {"agrees", "diverges", ACCEPTED}
    unjudged = tuple(section for section, statuses_of in sections.items() if not statuses_of & judged)
    diverges = any("diverges" in statuses_of for statuses_of in sections.values())
    return "diverges" if diverges else "undetermined" if unjudged or not sections else "agrees", unjudged


# A larger ratio only means that the exact value is nearly zero: the values themselves are more informative.
MEASURABLE = 1e12

# Fields of the element with the largest error.
AT_WORST = ("element", "actual", "expected", "sigma")


@dataclass(frozen=True, slots=True)
class Judgement:
    """Local or end-to-end judgement of one tensor."""

    # "undetermined": the precision does not determine the tensor, or accumulated rounding alone may be too
    # large.
    status: Annotated[str, among("agrees", "diverges", "undetermined")]
    z: Number = 0.0  # the largest error, in sigma; infinite if incomparable
    rms: Number = 0.0  # the root mean square error, in root mean square sigma
    element: tuple[Count, ...] = ()  # the position of the largest error
    actual: Number = float("nan")  # the run's value there
    expected: Number = float("nan")  # the reference's value there
    sigma: Number = float("nan")  # the standard deviation of rounding there
    beyond: Count = 0  # number of elements with an error above Z sigma
    size: Count = 0
    independent: Number = 0.0  # from independent_elements or the samples; 0 for all
    # Number of elements whose error is in each bin of Z_BINS, and beyond the last.
    histogram: Annotated[tuple[Count, ...], Field(min_length=BINS, max_length=BINS)] = (0,) * BINS
    note: str = ""  # any other problem
    # Location of the error, if it diverges and this judgement decides.
    breakdown: Breakdown | None = None

    def as_written(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of a record."""
        # For agreeing tensors, the size of the error suffices.
        if self.status == "diverges":
            return fields
        brief = {name: value for name, value in fields.items() if name not in AT_WORST}
        return brief | {name: short(brief[name]) for name in ("z", "rms", "independent") if name in brief}

    @property
    def ratio(self) -> float:
        """Error in tolerances: up to 1 is rounding."""
        return max(self.z / Z, self.rms / rms_limit(self.independent or self.size))

    @property
    def sizes(self) -> str:
        """The largest error of an element in tolerances, and the RMS error if it decides."""
        largest, rms = self.z / Z, f"; {number(self.ratio)} by the RMS of all {counted(self.size, 'element')}"
        return f"{number(largest)} tolerances{rms * (largest < self.ratio)}"

    @property
    def tolerance(self) -> float:
        """Tolerance at the largest error."""
        return Z * self.sigma


@dataclass(frozen=True, slots=True)
class Row:
    """Judgement of one tensor.

    Attributes:
        status: ``"agrees"``, ``"diverges"``, ``"undetermined"``, or ``"not exposed"`` if the run lacks the
            tensor or does not use it.
        local: error of this step alone, from the run's preceding taps; None without taps, or against
            published tensors.
        end_to_end: accumulated error from the inputs; decides if ``local`` is None.
        note: another problem: missing, misshapen, not finite, or of a different precision.
    """

    as_written = also("ratio")

    tensor: str
    clause: str
    status: Annotated[str, among("agrees", "diverges", "undetermined", "not exposed")]
    local: Judgement | None = None
    end_to_end: Judgement | None = None
    note: str = ""
    size: Count = 0
    axes: tuple[str, ...] = ()

    @property
    def deciding(self) -> Judgement | None:
        """The local judgement, or else the end-to-end one."""
        return self.local or self.end_to_end

    def judged(self, way: str) -> Judgement | None:
        """The judgement ``"local"`` or ``"end_to_end"``, unless undetermined."""
        judgement: Judgement | None = getattr(self, way)
        return judgement if judgement and judgement.status != "undetermined" else None

    @property
    def ratio(self) -> float:
        """Error in tolerances; infinite if incomparable."""
        if self.deciding is None:
            return float("inf") if self.status == "diverges" else 0.0
        return self.deciding.ratio if self.deciding.status != "undetermined" else 0.0


@dataclass(frozen=True)
class Verdict:
    """Judgement of one run.

    Attributes:
        table: one row per expected tensor, in order of computation.
        outputs: tensors that must all be judged.
        case: the judged problem, if each step was judged.
        judge: searches for the explanation; None afterwards.
    """

    as_written = also("status", "worst", "first")

    table: list[Row]
    explanation: Explanation | None = None
    outputs: tuple[str, ...] = ()
    case: Unwritten = field(default=None, repr=False, compare=False)  # JudgedProblem | None
    judge: Unwritten = field(default=None, repr=False, compare=False)  # Judge | None
    notes: Unwritten = field(default=(), repr=False, compare=False)  # tuple[str, ...]

    def unexplained(self) -> Verdict:
        """Skip the search for a cause."""
        return replace(self, judge=None)

    def explained(self) -> Verdict:
        """Search for the cause, for up to a minute."""
        if self.judge is None:
            return self
        return replace(self, explanation=self.judge.explain(self), judge=None)

    def __str__(self) -> str:
        """The text for a terminal, with external names made legible."""
        return "\n".join(shown(line, LONGEST_LINE, LONGEST_NAME) for line in verdict_lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @cached_property
    def _conclusion(self) -> tuple[str, tuple[str, ...]]:
        rows = [row for row in self.table if row.note not in (DECLARED, ABSENT)]
        outputs = ((row.tensor, row.status) for row in rows if row.tensor in self.outputs)
        sections = (
            (section_of(row.tensor), "undetermined" if row.note == CONSTANT else row.status) for row in rows
        )
        return conclude([*sections, *outputs])

    @property
    def status(self) -> str:
        """``"agrees"``, ``"diverges"``, or ``"undetermined"`` if a section or output was not judged."""
        return self._conclusion[0]

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Sections and outputs without a judged tensor."""
        return self._conclusion[1]

    @property
    def passed(self) -> bool:
        """Whether the verdict agrees."""
        return self.status == "agrees"

    @property
    def first_divergence(self) -> Row | None:
        """First row beyond its tolerance."""
        return next((row for row in self.table if row.status == "diverges"), None)

    @property
    def first(self) -> str:
        """Tensor of the first divergence."""
        return self.first_divergence.tensor if self.first_divergence else ""

    @property
    def clause(self) -> str:
        """The likeliest broken clause."""
        divergence, explanation = self.first_divergence, self.explanation
        return (explanation.clause if explanation else "") or (divergence.clause if divergence else "")

    @property
    def reason(self) -> str:
        """Why the run does not agree: its cause, if known."""
        if self.cause:
            return self.cause.text
        if self.first:
            return f"`{self.first}`: {self.alone[0] or 'no cause is known'}"
        return "; ".join(unjudged_lines(self)) if self.status != "agrees" else ""

    @property
    def headline(self) -> str:
        """The status, the first divergence and its cause in one line."""
        row = self.first_divergence
        ratio = f" by {number(row.ratio)} tolerances" if row and row.ratio <= MEASURABLE else ""
        return f"{self.status}{f' at {row.tensor}' if row else ''}{ratio}: {self.reason}"

    @property
    def beyond(self) -> str:
        """Count of divergent tensors, in words."""
        delivered = [row.status for row in self.table if row.note != NOT_EXPOSED]
        missing = len(self.table) - len(delivered)
        suffix = f"; {missing} more {'was' if missing == 1 else 'were'} not returned" if missing else ""
        wrong = delivered.count("diverges")
        exceed = "exceeds its" if wrong == 1 else "exceed their"
        return f"{wrong} of {counted(len(delivered), 'tensor')} {exceed} tolerance{suffix}"

    @property
    def arrival(self) -> Row | None:
        """Row of the model's result, or None if the error began there."""
        end = next((row for name in ("logits", "loss") if (row := self.row(name))), None)
        return None if end is self.first_divergence else end

    @property
    def alone(self) -> tuple[str, str]:
        """The undeclared deviation that is the only difference, and its declaration."""
        if not self.undeclared:
            return "", ""
        deviation = DECLARABLE[self.undeclared]
        means = f"among its deviations (SPEC {deviation.clause}, docs/guides/joining.md)"
        meaning = deviation.meaning
        if not _of_family(self):
            means = f"with declared=[{self.undeclared!r}] or --declare"
            meaning = meaning.removesuffix(" (value 1)")
        return deviation.alone, f"if this is intended, declare `{self.undeclared}` {means}: {meaning}"

    @property
    def undeclared(self) -> str:
        """Deviation that would make the run agree if declared."""
        return self.explanation.undeclared if self.explanation else ""

    @property
    def cause(self) -> Explanation | None:
        """The explanation, if it names a cause."""
        return self.explanation if self.explanation and self.explanation.hypothesis else None

    @property
    def nearest(self) -> Row | None:
        """The tensor with the largest error."""
        judged = [row for row in self.table if row.status in ("agrees", "diverges")]
        return max(judged, key=lambda row: row.ratio, default=None)

    @property
    def worst(self) -> float:
        """Largest error in tolerances."""
        return self.nearest.ratio if self.nearest else 0.0

    @property
    def unchecked(self) -> str:
        """Missing tensors in one line."""
        phrases = []
        for kind, rows in gather(self.table, lambda row: _kind_of(row.tensor)).items():
            missing = [row.tensor for row in rows if row.note == NOT_EXPOSED]
            if missing and len(missing) == len(rows):
                phrases.append(f"all {len(rows)} {kind}")
            elif missing:
                few = f"{len(missing)} of {len(rows)} {kind}"
                phrases.append(", ".join(missing) if len(missing) <= 3 else few)
        parts = [f"not checked: the run does not return {'; '.join(phrases)}"] if phrases else []
        notes = [row.note for row in self.table if row.status == "not exposed"]
        odd = [note for note in notes if note not in (NOT_EXPOSED, DECLARED, UNUSED)]
        return "; ".join([*parts, *([f"left out: {first_of(odd, 3, '; ')}"] if odd else [])])

    def row(self, tensor: str) -> Row | None:
        """Row of a tensor."""
        return next((row for row in self.table if row.tensor == tensor), None)


@dataclass(frozen=True)
class Result:
    """Outcome of one job on one backend.

    Attributes:
        backend: name as requested, or as in the run's file.
        group: the variant, or the source of a golden file.
        status: one of :data:`STATUSES`; ``"nondeterministic"`` means correct with varying bits.
        detail: one-line explanation if there is no verdict.
        stderr: last lines of a failed worker, or Concord's own traceback.
        attribution: set if the run diverges only in this precision or when repeated, or is accepted.
        times: number of runs on the same inputs in the same process.
        differing: tensors whose bits differed.
        milliseconds: a candidate's forward pass; 0 if not timed.
    """

    backend: str
    group: str
    case: str
    dtype: str
    status: Annotated[str, among(*STATUSES)]
    detail: str = ""
    verdict: Verdict | None = None
    seconds: Number = 0.0
    stderr: str = ""
    part: str = "model"
    attribution: str = ""
    times: Count = 1
    differing: tuple[str, ...] = ()
    milliseconds: Number = 0.0

    @property
    def table(self) -> list[Row]:
        """Rows of the verdict."""
        return self.verdict.table if self.verdict else []

    @property
    def worst(self) -> float:
        """Largest error in tolerances."""
        return self.verdict.worst if self.verdict else 0.0

    @property
    def first_divergence(self) -> Row | None:
        """The first row beyond its tolerance."""
        return self.verdict.first_divergence if self.verdict else None


def result_lines(result: Result) -> list[str]:
    """Describe a run that does not agree."""
    if result.status == "undetermined" and result.verdict:
        return [f"{result.backend}: {result.case}, {result.dtype}", *verdict_lines(result.verdict)]
    if result.verdict:
        return divergence_lines(result)
    return [
        f"{result.backend} {result.status}: {result.case}, {result.dtype}",
        f"  {result.detail}",
        *(f"  | {line}" for line in result.stderr.splitlines()[-3:]),
    ]


def divergence_lines(result: Result) -> list[str]:
    """Describe a divergence."""
    assert result.verdict is not None
    verdict = result.verdict.explained()
    head = f"{result.backend} diverges: {result.case}, {result.dtype}{_alone(verdict)}"
    return [head, *_divergence(verdict, result.backend, result.attribution), *_next_step(verdict)]


def _alone(verdict: Verdict) -> str:
    only = "only buffers diverge" if is_buffer(verdict.first) else ""  # they come last
    if _only_gradients(verdict):
        only = "the forward pass agrees; only the gradients diverge"
    alone = verdict.alone[0] or only
    return f": {alone}" if alone else ""


def verdict_lines(verdict: Verdict) -> list[str]:
    """Describe the judgement of a run."""
    verdict = verdict.explained()
    if verdict.status == "diverges":
        lines = [*_divergence(verdict, "the run"), *(f"  {note}" for note in verdict.notes)]
        return [f"diverges{_alone(verdict)}", *lines, *_next_step(verdict)]
    nearest, count = verdict.nearest, sum(row.status == "agrees" for row in verdict.table)
    closest = (
        f": the closest call of {counted(count, 'tensor')} is {nearest.tensor}, "
        f"at {number(nearest.ratio)} of its tolerance"
        if nearest
        else ""
    )
    return [
        f"{verdict.status}{closest}",
        *unjudged_lines(verdict),
        *([verdict.unchecked] if verdict.unchecked else []),
        *verdict.notes,
    ]


def unjudged_lines(verdict: Verdict) -> list[str]:
    """Describe sections without a judged tensor."""
    lines = []
    for section in verdict.unjudged:
        rows = [row for row in verdict.table if section in (row.tensor, section_of(row.tensor))]
        why = next((row.note for row in rows if row.note), "")
        is_output = section in verdict.outputs
        if section == "forward" and {*verdict.outputs} & {*verdict.unjudged}:
            continue  # the output's line covers it
        own_notes = [
            row.note for row in rows if row.note not in ("", NOT_EXPOSED, row.deciding and row.deciding.note)
        ]
        if own_notes:  # the section's own note suffices
            lines.append(f"{section} not judged: {own_notes[0]}")
            continue
        if all(row.status == "not exposed" for row in rows):
            without = "leave them out with --forward-only" if _of_family(verdict) else "request none"
            purpose = f'; if the candidate intentionally returns none, give --declare "{section}"'
            absent = purpose if is_output else ""
            advice = f"return them, or {without}" if section == "gradients" else f"return it{absent}"
        elif all(row.local is None for row in (verdict.table if is_output else rows)):
            advice = "return activations: each step is then judged by itself"
        else:
            advice = "the precision does not determine it with these weights and inputs"
        lines.append(f"{section} not judged{f' ({why})' if why else ''}: {advice}")
    return lines


def _divergence(verdict: Verdict, name: str, attribution: str = "") -> list[str]:
    row = verdict.first_divergence
    assert row is not None
    lines = [f"  first at {row.tensor}{in_brackets(verdict.clause)}{_where(row, name)}"]
    lines += [f"  {line}" for line in verdict.explanation.lines] if verdict.explanation else []
    lines += [f"  {attribution}"] if attribution else []
    end = verdict.arrival
    if end and (judgement := end.judged("end_to_end")):
        lines.append(f"  at {end.tensor}, end to end: {number(judgement.ratio)} tolerances")
    elif end and end.end_to_end:
        lines.append(f"  at {end.tensor}: {end.end_to_end.note or 'undetermined'}")
    return [*lines, f"  {verdict.beyond}"]


def _only_gradients(verdict: Verdict) -> bool:
    sections = {(section_of(row.tensor), row.status) for row in verdict.table}
    needed = {("gradients", "diverges"), ("forward", "agrees")}
    return needed <= sections and ("forward", "diverges") not in sections


def _of_family(verdict: Verdict) -> bool:
    # Only tensors of the family have clauses.
    return any(row.clause for row in verdict.table)


def _next_step(verdict: Verdict) -> list[str]:
    row, prefix = verdict.first_divergence, "  next: "
    if row is None:
        return []
    if verdict.undeclared:
        return [f"{prefix}{verdict.alone[1]}"]
    if verdict.cause and verdict.cause.hypothesis == MERGED:
        return [f"{prefix}if the candidate merges these layers on purpose, give their names, and run again"]
    if verdict.cause and verdict.cause.confident:
        return [f"{prefix}fix this, then run again"]
    if _only_gradients(verdict):
        alone = "; with --forward-only the rest is judged without gradients" * _of_family(verdict)
        return [f"{prefix}look at the derivative of this step{alone}"]
    earlier = verdict.table[: verdict.table.index(row)]
    last_right = max(
        (place for place, earlier_row in enumerate(earlier) if earlier_row.status == "agrees"), default=-1
    )
    between = [
        earlier_row.tensor for earlier_row in earlier[last_right + 1 :] if earlier_row.note == NOT_EXPOSED
    ]
    if between:
        start = f"{earlier[last_right].tensor} (correct)" if last_right >= 0 else "the inputs"
        return [
            f"{prefix}return {between[0]} too ({counted(len(between), 'activation')} missing "
            f"between {start} and {row.tensor}, which is wrong)"
        ]
    with_what = f"SPEC {verdict.clause}" if verdict.clause else "the code of the reference"
    return [f"{prefix}compare this step with {with_what}"]


def in_brackets(clause: str) -> str:
    """Format a clause in brackets."""
    return f" (SPEC {clause})" if clause else ""


def _where(row: Row, backend: str) -> str:
    deciding = row.deciding
    if deciding is None:
        return f": {row.note}"
    kind = "local error" if row.local else "end to end"
    if row.note.startswith(NO_ELEMENT):
        return f": {row.note} ({number(row.ratio)} tolerances; {kind})"
    element = f"element ({', '.join(map(str, deciding.element))})" if deciding.element else "the scalar"
    actual, expected = distinct(deciding.actual, deciding.expected, digits=9)
    # Beyond what is measurable, the tolerance is that of an exactly zero value.
    truth = "where the exact value is" if MEASURABLE < row.ratio < math.inf else "reference"
    size = f", tolerance ±{deciding.tolerance:.2g} ({deciding.sizes}; " if row.ratio <= MEASURABLE else " ("
    beyond = (
        f"{deciding.beyond:,} of {counted(row.size, 'element')} beyond" if deciding.beyond else NO_ELEMENT
    )
    note = f"; {row.note}" if row.note else ""
    return f", {element}: {backend} {actual}, {truth} {expected}{size}{kind}; {beyond}{note})"


def number(value: float) -> str:
    """Format a ratio briefly."""
    if not math.isfinite(value):
        return "inf" if value > 0 else str(value)
    if value < 1e4:
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    shown_value = min(value, MEASURABLE)
    return ">" * (value > MEASURABLE) + f"{shown_value:.0e}".replace("e+0", "e").replace("e+", "e")
