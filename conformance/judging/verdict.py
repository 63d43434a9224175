"""The verdict on one run: which tensors lie within their tolerance, and where it first leaves it."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from concord.conformance.judging.breakdown import Breakdown
from concord.conformance.judging.estimate import Z, rms_limit
from concord.conformance.judging.exemptions import ABSENT, CONSTANT, DECLARED, NOT_EXPOSED, UNUSED
from concord.conformance.judging.expectation import is_gradient, is_tap_gradient
from concord.conformance.judging.explanation import DECLARABLE, Explanation
from concord.conformance.record_fields import Count, Field, Number, Unwritten, also, among, short
from concord.conformance.wording import distinct, gather
from concord.spec.text import first_of, shown

LONGEST_LINE, LONGEST_NAME = 1000, 160
"""Characters of a line of a verdict, and of a name in it, that are shown."""

NO_ELEMENT = "no element shows it"
"""With this begins the note of an error that elements share."""


FAILED_WORKER = ("missing", "broken", "crashed", "timed out", "out of memory", "error")
"""Statuses of results that a backend owes."""

NOT_JUDGED = "not judged"
"""The status of a run that Concord failed to judge: no backend owes it."""

STATUSES = (
    "diverges",
    NOT_JUDGED,
    *FAILED_WORKER,
    "refused",
    "nondeterministic",
    "undetermined",
    "unsupported",
    "absent",
    "agrees",
)
"""What can become of a run, the worst first."""


STEP_SECTIONS = ("losses", "gradients", "norm", "clipped", "rate", "moments", "parameters")
"""What a step of training is judged by, in the order of computation."""

Z_BINS = tuple(2.0**i for i in range(-8, 9))
"""Edges of the bins in which the errors of a tensor's elements are counted, in sigma."""

BINS = len(Z_BINS) + 1
"""There is one more, for errors beyond the last edge."""


def _kind_of(tensor: str) -> str:
    if is_tap_gradient(tensor):
        return "gradients by taps"
    return "gradients" if is_gradient(tensor) else "taps"


def section_of(tensor: str) -> str:
    """Return to which section of a run a tensor belongs: ``"forward"`` or ``"gradients"``.

    Of a step of training, one of :data:`STEP_SECTIONS`.
    """
    if is_gradient(tensor):
        return "gradients"
    kind, *names = tensor.split(".")
    if kind != "steps":
        return "forward"
    return names[1] if names[1] in STEP_SECTIONS else "moments"


def conclude(statuses: Iterable[tuple[str, str]]) -> tuple[str, tuple[str, ...]]:
    """Return what the judgements of tensors come to, and the sections that none of them judged.

    It agrees only if no tensor diverges and each section has one that was judged: what nobody looked at does
        not agree. What is judged at all is judged in a finite element that rounding does not decide.

    Args:
        statuses: of each tensor, its section and its status, and of an output, which is a section of its own,
            once more; what the run said beforehand that it lacks is not among them.
    """
    sections: dict[str, set[str]] = {}
    for section, status in statuses:
        sections.setdefault(section, set()).add(status)
    unjudged = tuple(section for section, found in sections.items() if not found & {"agrees", "diverges"})
    diverges = any("diverges" in found for found in sections.values())
    return "diverges" if diverges else "undetermined" if unjudged or not sections else "agrees", unjudged


MEASURABLE = 1e12
"""A larger ratio says only that the exact value is zero, or nearly so: the numbers say more."""

AT_WORST = ("element", "actual", "expected", "sigma")
"""What a judgement says of the element with the largest error."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One tensor, judged in one way.

    Attributes:
        status: ``"agrees"``, ``"diverges"``, or ``"undetermined"``: the precision does not determine it, or
            rounding alone may have grown too large on the way to it.
        z: the largest error, in sigma; infinite where it cannot be compared.
        rms: the root mean square error, in root mean square sigma.
        element: where the largest error is.
        actual, expected, sigma: the values there.
        beyond: how many elements err more than :data:`concord.conformance.judging.estimate.Z` sigma.
        size: how many elements there are.
        independent: of how many of them the root mean square says something
            (:func:`concord.conformance.judging.scoring.independent_elements`); 0: of all.
        histogram: how many elements have an error in each bin of :data:`Z_BINS`, and beyond the last.
        note: what else is to be said.
        breakdown: where in the tensor the error lies, if it diverges and this judgement decides.
    """

    status: Annotated[str, among("agrees", "diverges", "undetermined")]
    z: Number = 0.0
    rms: Number = 0.0
    element: tuple[Count, ...] = ()
    actual: Number = float("nan")
    expected: Number = float("nan")
    sigma: Number = float("nan")
    beyond: Count = 0
    size: Count = 0
    independent: Number = 0.0
    histogram: Annotated[tuple[Count, ...], Field(min_length=BINS, max_length=BINS)] = (0,) * BINS
    note: str = ""
    breakdown: Breakdown | None = None

    def as_written(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields as they are written: of what agrees, how large its error is and no more."""
        if self.status == "diverges":
            return fields
        brief = {name: value for name, value in fields.items() if name not in AT_WORST}
        return brief | {name: short(brief[name]) for name in ("z", "rms", "independent") if name in brief}

    @property
    def ratio(self) -> float:
        """The error in tolerances: up to 1 is rounding."""
        return max(self.z / Z, self.rms / rms_limit(self.independent or self.size))

    @property
    def tolerance(self) -> float:
        """How far the run may lie from what is expected, where the largest error is."""
        return Z * self.sigma


@dataclass(frozen=True, slots=True)
class Row:
    """The judgement of one tensor.

    Attributes:
        tensor: its name.
        clause: the clause of SPEC.md that defines it.
        status: ``"agrees"``, ``"diverges"``, ``"undetermined"`` or ``"not exposed"`` (the backend has no such
            tensor, or says nothing of it, or it is the gradient by a tap that the model does not go on with:
            it was not checked).
        local: the error of this step alone: against the reference from the run's own preceding taps. It
            decides. None where a run delivers no taps, or is compared with published tensors.
        end_to_end: the error of all steps up to here: against the reference from the inputs. It decides where
            no other does.
        note: what else is wrong: missing, misshapen, not finite, not of the precision.
        size: how many elements the tensor has.
        axes: the names of its axes.
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
        """The judgement that decides."""
        return self.local or self.end_to_end

    def judged(self, way: str) -> Judgement | None:
        """Return what is known of the error, ``"local"`` or ``"end_to_end"``; None if nothing is."""
        judgement: Judgement | None = getattr(self, way)
        return judgement if judgement and judgement.status != "undetermined" else None

    @property
    def ratio(self) -> float:
        """The error in tolerances; infinite where nothing can be compared."""
        if self.deciding is None:
            return float("inf") if self.status == "diverges" else 0.0
        return self.deciding.ratio if self.deciding.status != "undetermined" else 0.0


@dataclass(frozen=True)
class Verdict:
    """The judgement of one run.

    Attributes:
        table: one row for each expected tensor, in the order of computation.
        explanation: what is known of the first divergence (:mod:`concord.conformance.explain`); None until
            somebody has asked for it.
        outputs: of these tensors each has to be judged, not one of them alone.
        case: what was judged, where each step was.
        judge: who can explain it (:meth:`~concord.conformance.judging.judge.Judge.explain`), until it is.
        notes: what else is to be said of the run.
    """

    as_written = also("status", "worst", "first")

    table: list[Row]
    explanation: Explanation | None = None
    outputs: tuple[str, ...] = ()
    case: Unwritten = field(default=None, repr=False, compare=False)  # JudgedProblem | None
    judge: Unwritten = field(default=None, repr=False, compare=False)  # Judge | None
    notes: Unwritten = field(default=(), repr=False, compare=False)  # tuple[str, ...]

    def unexplained(self) -> Verdict:
        """Return the verdict without the judge that could explain it."""
        return dataclasses.replace(self, judge=None)

    def explained(self) -> Verdict:
        """Return the verdict with what explains its first divergence.

        Looking for that takes up to a minute.
        """
        if self.judge is None:
            return self
        return dataclasses.replace(self, explanation=self.judge.explain(self), judge=None)

    def __str__(self) -> str:
        """Return what the terminal says: how near it came, or the first divergence in words.

        Names may come from outside: they are made legible, and shortened.
        """
        return "\n".join(shown(line, LONGEST_LINE, LONGEST_NAME) for line in verdict_lines(self))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the words of the terminal."""
        return f"<pre>{html.escape(str(self))}</pre>"

    @functools.cached_property
    def _conclusion(self) -> tuple[str, tuple[str, ...]]:
        wanted = [row for row in self.table if row.note not in (DECLARED, ABSENT)]
        outputs = ((row.tensor, row.status) for row in wanted if row.tensor in self.outputs)
        sections = (
            (section_of(row.tensor), "undetermined" if row.note == CONSTANT else row.status) for row in wanted
        )
        return conclude([*sections, *outputs])

    @property
    def status(self) -> str:
        """``"agrees"``, ``"diverges"``, or ``"undetermined"`` if a section or an output was not judged."""
        return self._conclusion[0]

    @property
    def unjudged(self) -> tuple[str, ...]:
        """The sections, and the outputs, that were judged nowhere."""
        return self._conclusion[1]

    @property
    def passed(self) -> bool:
        """Whether no tensor diverges, and each section and output was judged."""
        return self.status == "agrees"

    @property
    def first_divergence(self) -> Row | None:
        """The first tensor, in the order of computation, that lies beyond its tolerance."""
        return next((row for row in self.table if row.status == "diverges"), None)

    @property
    def first(self) -> str:
        """The name of that tensor; empty if there is none."""
        return self.first_divergence.tensor if self.first_divergence else ""

    @property
    def clause(self) -> str:
        """The clause that it most likely breaks."""
        first, known = self.first_divergence, self.explanation
        return (known.clause if known else "") or (first.clause if first else "")

    @property
    def beyond(self) -> str:
        """How many tensors lie beyond, of those that were delivered, in words."""
        there = [row.status for row in self.table if row.note != NOT_EXPOSED]
        lost = len(self.table) - len(there)
        more = f"; {lost} more {'was' if lost == 1 else 'were'} not delivered" if lost else ""
        return f"{there.count('diverges')} of {len(there)} tensors lie beyond their tolerance{more}"

    @property
    def arrival(self) -> Row | None:
        """The model's result, where what is wrong arrives; None where it began there."""
        end = next((row for name in ("logits", "loss") if (row := self.row(name))), None)
        return None if end is self.first_divergence else end

    @property
    def alone(self) -> tuple[str, str]:
        """What alone differs in a run that does not declare it, and how to declare it.

        Empty if there is no such thing.
        """
        if not self.undeclared:
            return "", ""
        known = DECLARABLE[self.undeclared]
        how = f"among its deviations (SPEC {known.clause}, docs/guides/joining.md)"
        if not _of_family(self):
            how = f"by declared=[{self.undeclared!r}] or --declare"
        meaning = known.meaning.removesuffix(" (value 1)") if how.startswith("by") else known.meaning
        return known.alone, f"if this is meant, declare `{self.undeclared}` {how}: {meaning}"

    @property
    def undeclared(self) -> str:
        """The deviation with whose declaration it would not diverge; empty if none is known."""
        return self.explanation.undeclared if self.explanation else ""

    @property
    def cause(self) -> Explanation | None:
        """What explains the first divergence, if anything known does (:mod:`concord.conformance.explain`)."""
        return self.explanation if self.explanation and self.explanation.hypothesis else None

    @property
    def nearest(self) -> Row | None:
        """The tensor with the largest error in tolerances, of those that were judged."""
        judged = [row for row in self.table if row.status in ("agrees", "diverges")]
        return max(judged, key=lambda row: row.ratio, default=None)

    @property
    def worst(self) -> float:
        """The largest error in tolerances, over all judged tensors."""
        return self.nearest.ratio if self.nearest else 0.0

    @property
    def unchecked(self) -> str:
        """What was not delivered, and so not checked, in one line; empty if everything was."""
        said = []
        for kind, rows in gather(self.table, lambda row: _kind_of(row.tensor)).items():
            missing = [row.tensor for row in rows if row.note == NOT_EXPOSED]
            if missing and len(missing) == len(rows):
                said.append(f"all {len(rows)} {kind}")
            elif missing:
                few = f"{len(missing)} of {len(rows)} {kind}"
                said.append(", ".join(missing) if len(missing) <= 3 else few)
        lost = [f"not checked, since not delivered: {'; '.join(said)}"] if said else []
        others = [row.note for row in self.table if row.status == "not exposed"]
        odd = [note for note in others if note not in (NOT_EXPOSED, DECLARED, UNUSED)]
        return "; ".join([*lost, *([f"left out: {first_of(odd, 3, '; ')}"] if odd else [])])

    def row(self, tensor: str) -> Row | None:
        """Return the row of a tensor."""
        return next((row for row in self.table if row.tensor == tensor), None)


@dataclass(frozen=True)
class Result:
    """What came of one job on one backend.

    Attributes:
        backend: as it was asked for; of a run that came as a file, as the file says.
        group: the variant; for golden files the source.
        case: the name of the case.
        dtype: the precision, or mode, that it was judged by.
        status: ``"agrees"``, ``"diverges"``, ``"nondeterministic"`` (right each time, but not the same bit
            for bit), ``"undetermined"``, ``"unsupported"``, ``"refused"``, ``"absent"``, :data:`NOT_JUDGED`,
            or one of :data:`FAILED_WORKER`.
        detail: one line of explanation where there is no verdict.
        verdict: the judgement, if there is one.
        seconds: run and judgement; 0 where it came as a file.
        stderr: the last lines of a worker that failed, or the traceback of a bug in Concord.
        part: the part of the model that ran.
        attribution: one line that says that it diverges in this precision alone, or only when it is run
            again.
        times: how often it ran, on the same inputs and in the same process.
        differing: the tensors that did not always have the same bits, in the order of computation.
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

    @property
    def table(self) -> list[Row]:
        """The judgements of its tensors."""
        return self.verdict.table if self.verdict else []

    @property
    def worst(self) -> float:
        """The largest error in tolerances."""
        return self.verdict.worst if self.verdict else 0.0

    @property
    def first_divergence(self) -> Row | None:
        """Where the run first left its tolerance."""
        return self.verdict.first_divergence if self.verdict else None


def result_lines(result: Result) -> list[str]:
    """Say what came of a run that does not agree."""
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
    """Say where a run first diverged, why if that is known, what became of it, and what to do next."""
    assert result.verdict is not None
    verdict = result.verdict.explained()
    head = f"{result.backend} diverges: {result.case}, {result.dtype}{_alone(verdict)}"
    return [head, *_divergence(verdict, result.backend, result.attribution), *_next_step(verdict)]


def _alone(verdict: Verdict) -> str:
    """Say what alone differs, where that is all that there is to mend."""
    alone = verdict.alone[0] or (
        "the forward pass agrees, only gradients diverge" if _only_gradients(verdict) else ""
    )
    return f": {alone}" if alone else ""


def verdict_lines(verdict: Verdict) -> list[str]:
    """Say what came of judging one run."""
    verdict = verdict.explained()
    if verdict.status == "diverges":
        lines = [*_divergence(verdict, "the run"), *(f"  {note}" for note in verdict.notes)]
        return [f"diverges{_alone(verdict)}", *lines, *_next_step(verdict)]
    nearest, count = verdict.nearest, sum(row.status == "agrees" for row in verdict.table)
    near = (
        f": of {count} tensors {nearest.tensor} comes nearest to its tolerance, {number(nearest.ratio)}"
        if nearest
        else ""
    )
    return [
        f"{verdict.status}{near}",
        *unjudged_lines(verdict),
        *([verdict.unchecked] if verdict.unchecked else []),
        *verdict.notes,
    ]


def unjudged_lines(verdict: Verdict) -> list[str]:
    """Say which sections of a run were judged nowhere, why, and what to do about it."""
    lines = []
    for section in verdict.unjudged:
        rows = [row for row in verdict.table if section in (row.tensor, section_of(row.tensor))]
        why = next((row.note for row in rows if row.note), "")
        is_output = section in verdict.outputs
        if section == "forward" and {*verdict.outputs} & {*verdict.unjudged}:
            continue  # the output says it
        own = [
            row.note for row in rows if row.note not in ("", NOT_EXPOSED, row.deciding and row.deciding.note)
        ]
        if own:  # what is said of it says all
            lines.append(f"{section} not judged: {own[0]}")
            continue
        if all(row.status == "not exposed" for row in rows):
            without = "leave them out with --forward-only" if _of_family(verdict) else "ask for none"
            absent = "; if the candidate has none on purpose, declare it" if is_output else ""
            advice = f"deliver them, or {without}" if section == "gradients" else f"deliver it{absent}"
        elif all(row.local is None for row in (verdict.table if is_output else rows)):
            advice = "deliver activations: each step is then judged by itself"
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
    if end and (there := end.judged("end_to_end")):
        lines.append(f"  at {end.tensor}, end to end: {number(there.ratio)} tolerances")
    elif end and end.end_to_end:
        lines.append(f"  at {end.tensor}: {end.end_to_end.note or 'undetermined'}")
    return [*lines, f"  {verdict.beyond}"]


def _only_gradients(verdict: Verdict) -> bool:
    """Return whether gradients alone diverge, and the forward pass was judged."""
    sections = {(section_of(row.tensor), row.status) for row in verdict.table}
    return (
        ("gradients", "diverges") in sections
        and ("forward", "agrees") in sections
        and ("forward", "diverges") not in sections
    )


def _of_family(verdict: Verdict) -> bool:
    """Return whether a member of the family was judged: its tensors alone have clauses."""
    return any(row.clause for row in verdict.table)


def _next_step(verdict: Verdict) -> list[str]:
    """Say in one line what to do next; nothing where all agrees."""
    row, before = verdict.first_divergence, "  next: "
    if row is None:
        return []
    if verdict.undeclared:
        return [f"{before}{verdict.alone[1]}"]
    if verdict.cause and verdict.cause.confident:
        return [f"{before}mend this and run it again"]
    if _only_gradients(verdict):
        alone = "; with --forward-only the rest is judged without gradients" * _of_family(verdict)
        return [f"{before}look at the derivative of this step{alone}"]
    earlier = verdict.table[: verdict.table.index(row)]
    right = max((place for place, one in enumerate(earlier) if one.status == "agrees"), default=-1)
    between = [one.tensor for one in earlier[right + 1 :] if one.note == NOT_EXPOSED]
    if between:
        after = f"{earlier[right].tensor} (right)" if right >= 0 else "the inputs"
        return [
            f"{before}deliver {between[0]}, the first of {len(between)} missing "
            f"between {after} and {row.tensor} (wrong)"
        ]
    with_what = f"SPEC {verdict.clause}" if verdict.clause else "the code of the reference"
    return [f"{before}compare this step with {with_what}"]


def in_brackets(clause: str) -> str:
    """Return a clause as it stands behind a tensor; nothing where there is none."""
    return f" (SPEC {clause})" if clause else ""


def _where(row: Row, backend: str) -> str:
    there = row.deciding
    if there is None:
        return f": {row.note}"
    element = f"element ({', '.join(map(str, there.element))})" if there.element else "the scalar"
    actual, expected = distinct(there.actual, there.expected, digits=9)
    kind = "local error" if row.local else "end to end"
    note = f"; {row.note}" if row.note else ""
    beyond = f"{there.beyond} of {row.size} elements beyond{note}"
    if not math.isfinite(row.ratio):
        return f", {element}: {backend} {actual}, oracle {expected} ({kind}; {beyond})"
    if row.ratio > MEASURABLE:  # the tolerance is that of a number that is exactly zero
        return f", {element}: {backend} {actual}, where the exact value is {expected} ({kind}; {beyond})"
    if row.note.startswith(NO_ELEMENT):
        return f": {row.note} ({number(row.ratio)} tolerances, {kind})"
    if not there.beyond:
        beyond = f"by the root mean square of all {row.size} elements: none alone lies beyond{note}"
    values = f"{backend} {actual}, oracle {expected}, tolerance ±{there.tolerance:.2g}"
    return f", {element}: {values} ({number(row.ratio)} tolerances, {kind}; {beyond})"


def number(value: float) -> str:
    """Return a ratio in as few characters as say it."""
    if not math.isfinite(value):
        return "inf" if value > 0 else str(value)
    if value > MEASURABLE:
        return f">{MEASURABLE:.0e}".replace("e+", "e")
    return (
        f"{value:.2f}"
        if value < 10
        else f"{value:.0f}"
        if value < 1e4
        else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    )
