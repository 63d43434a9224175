"""The verdict on one run: which tensors lie within their tolerance, and where it first leaves it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from concord.conformance.breakdown import Breakdown
from concord.conformance.diagnosis import Diagnosis
from concord.conformance.estimate import Z, rms_limit
from concord.conformance.expectation import JudgedProblem, is_gradient, is_tap_gradient
from concord.conformance.explain import Cause
from concord.spec.deviations import KNOWN_DEVIATIONS

Array = NDArray[np.floating]

NOT_DELIVERED = "not delivered"
"""Note of a tensor that a backend neither delivers nor says that it has not."""

DECLARED = "declared by the backend"
"""Note of a tensor of which a backend says beforehand that it has not."""

UNUSED = "the model does not go on with this activation"
"""Note of a gradient by a tap that is zero where what lies before the tap has the gradient that flows past it."""

STEP_SECTIONS = ("losses", "gradients", "norm", "clipped", "rate", "moments", "parameters")
"""What a step of training is judged by, in the order of computation."""

Z_BINS = tuple(2.0**i for i in range(-8, 9))
"""Edges of the bins in which the errors of a tensor's elements are counted, in sigma."""


def section_of(tensor: str) -> str:
    """Return to which section of a run a tensor belongs: ``"forward"`` or ``"gradients"``; of a step of training, one of :data:`STEP_SECTIONS`."""
    if is_gradient(tensor):
        return "gradients"
    kind, *names = tensor.split(".")
    if kind != "steps":
        return "forward"
    return names[1] if names[1] in STEP_SECTIONS else "moments"


def conclude(statuses: Iterable[tuple[str, str]]) -> tuple[str, tuple[str, ...]]:
    """Return what the judgements of tensors come to, and the sections that none of them judged.

    It agrees only if no tensor diverges and each section has one that was judged: what nobody looked at does not agree.

    Args:
        statuses: of each tensor, its section and its status; what the run said beforehand that it lacks is not among them.
    """
    sections: dict[str, set[str]] = {}
    for section, status in statuses:
        sections.setdefault(section, set()).add(status)
    unjudged = tuple(section for section, found in sections.items() if not found & {"agrees", "diverges"})
    diverges = any("diverges" in found for found in sections.values())
    return "diverges" if diverges else "undetermined" if unjudged or not sections else "agrees", unjudged


@dataclass(frozen=True, slots=True)
class Judgement:
    """One tensor, judged in one way.

    Attributes:
        status: ``"agrees"``, ``"diverges"``, or ``"undetermined"``: the precision does not determine it, or rounding
            alone may have grown too large on the way to it.
        z: the largest error, in sigma; infinite where it cannot be compared.
        rms: the root mean square error, in root mean square sigma.
        element: where the largest error is.
        actual, expected, sigma: the values there.
        beyond: how many elements err more than :data:`concord.conformance.estimate.Z` sigma.
        size: how many elements there are.
        independent: of how many of them the root mean square says something (:func:`concord.conformance.scoring.independent_elements`); 0: of all.
        histogram: how many elements have an error in each bin of :data:`Z_BINS`, and beyond the last.
        note: what else is to be said.
        breakdown: where in the tensor the error lies, if it diverges and this judgement decides.
    """

    DERIVED: ClassVar = ("ratio",)

    status: str
    z: float = 0.0
    rms: float = 0.0
    element: tuple[int, ...] = ()
    actual: float = float("nan")
    expected: float = float("nan")
    sigma: float = float("nan")
    beyond: int = 0
    size: int = 0
    independent: float = 0.0
    histogram: tuple[int, ...] = ()
    note: str = ""
    breakdown: Breakdown | None = None

    @property
    def ratio(self) -> float:
        """The error in tolerances: up to 1 is rounding."""
        return max(self.z / Z, self.rms / rms_limit(self.independent or self.size))


@dataclass(frozen=True, slots=True)
class Row:
    """The judgement of one tensor.

    Attributes:
        tensor: its name.
        clause: the clause of SPEC.md that defines it.
        status: ``"agrees"``, ``"diverges"``, ``"undetermined"`` or ``"undelivered"`` (the backend has no such tensor, or says nothing
            of it, or it is the gradient by a tap that the model does not go on with: it was not checked).
        local: the error of this step alone: against the reference from the run's own preceding taps. It
            decides. None where a run delivers no taps, or is compared with published tensors.
        end_to_end: the error of all steps up to here: against the reference from the inputs. It decides where no other does.
        note: what else is wrong: missing, misshapen, not finite, not of the precision.
        size: how many elements the tensor has.
        axes: the names of its axes.
    """

    DERIVED: ClassVar = ("ratio", "element", "actual", "expected", "tolerance", "beyond")

    tensor: str
    clause: str
    status: str
    local: Judgement | None = None
    end_to_end: Judgement | None = None
    note: str = ""
    size: int = 0
    axes: tuple[str, ...] = ()

    @property
    def deciding(self) -> Judgement | None:
        """The judgement that decides."""
        return self.local or self.end_to_end

    @property
    def ratio(self) -> float:
        """The error in tolerances; infinite where nothing can be compared."""
        if self.deciding is None:
            return float("inf") if self.status == "diverges" else 0.0
        return self.deciding.ratio if self.deciding.status != "undetermined" else 0.0

    @property
    def element(self) -> tuple[int, ...]:
        """Where the largest error is."""
        return self.deciding.element if self.deciding else ()

    @property
    def actual(self) -> float:
        """The run's value there."""
        return self.deciding.actual if self.deciding else float("nan")

    @property
    def expected(self) -> float:
        """The oracle's value there."""
        return self.deciding.expected if self.deciding else float("nan")

    @property
    def tolerance(self) -> float:
        """How far the run may lie from it."""
        return Z * self.deciding.sigma if self.deciding else float("nan")

    @property
    def beyond(self) -> int:
        """How many elements lie further off."""
        return self.deciding.beyond if self.deciding else self.size if self.status == "diverges" else 0


@dataclass(frozen=True)
class Verdict:
    """The judgement of one run.

    Attributes:
        table: one row for each expected tensor, in the order of computation.
        diagnosis: what is known of the first divergence (:mod:`concord.conformance.diagnosis`); None where it was not
            judged locally, or not explained.
        undeclared: the deviation (:data:`concord.spec.deviations.KNOWN_DEVIATIONS`) with whose declaration it would not
            diverge; empty if there is none.
        case: what was judged, where each step was.
        search: finds diagnosis and undeclared deviation; None once it is explained.
    """

    table: list[Row]
    diagnosis: Diagnosis | None = None
    undeclared: str = ""
    case: JudgedProblem | None = field(default=None, repr=False, compare=False)
    search: Callable[[], tuple[Diagnosis | None, str]] | None = field(default=None, repr=False, compare=False)

    def explained(self) -> Verdict:
        """Return the verdict with what explains its first divergence; looking for that takes up to a minute."""
        if self.search is None:
            return self
        diagnosis, undeclared = self.search()
        return dataclasses.replace(self, diagnosis=diagnosis, undeclared=undeclared, search=None)

    def __str__(self) -> str:
        """Return what the terminal says: how near it came, or the first divergence in words."""
        from concord.conformance.report import verdict_lines  # which is made of verdicts

        return "\n".join(verdict_lines(self))

    @functools.cached_property
    def _conclusion(self) -> tuple[str, tuple[str, ...]]:
        return conclude((section_of(row.tensor), row.status) for row in self.table if row.note != DECLARED)

    @property
    def status(self) -> str:
        """``"agrees"``, ``"diverges"``, or ``"undetermined"`` if a section of the run was judged nowhere (:func:`conclude`)."""
        return self._conclusion[0]

    @property
    def unjudged(self) -> tuple[str, ...]:
        """The sections that were judged nowhere."""
        return self._conclusion[1]

    @property
    def passed(self) -> bool:
        """Whether no tensor diverges and each section was judged."""
        return self.status == "agrees"

    @property
    def first_divergence(self) -> Row | None:
        """The first tensor, in the order of computation, that lies beyond its tolerance."""
        return next((row for row in self.table if row.status == "diverges"), None)

    @property
    def alone(self) -> tuple[str, str]:
        """What alone differs in a run that does not declare it, and how to declare it; empty if there is no such thing."""
        if not self.undeclared:
            return "", ""
        known = KNOWN_DEVIATIONS[self.undeclared]
        return (
            known.alone,
            f"if this is meant, declare `{self.undeclared}` among its deviations (SPEC {known.clause}, docs/guides/joining.md): {known.meaning}",
        )

    @property
    def cause(self) -> Cause | None:
        """What explains the first divergence, if anything that is known does (:mod:`concord.conformance.explain`)."""
        return self.diagnosis.cause if self.diagnosis else None

    @property
    def worst(self) -> float:
        """The largest error in tolerances, over all judged tensors."""
        return max((row.ratio for row in self.table if row.status in ("agrees", "diverges")), default=0.0)

    @property
    def growth(self) -> list[tuple[str, float]]:
        """For each tap that can be said of: its error end to end, in tolerances."""
        judged = ((row.tensor, row.end_to_end) for row in self.table if not is_gradient(row.tensor))
        return [
            (name, judgement.ratio)
            for name, judgement in judged
            if judgement and judgement.status != "undetermined"
        ]

    @property
    def unchecked(self) -> str:
        """What was not delivered, and so not checked, in one line; empty if everything was."""
        kinds: dict[str, list[Row]] = {"taps": [], "gradients": [], "gradients by taps": []}
        for row in self.table:
            kinds[
                "gradients by taps"
                if is_tap_gradient(row.tensor)
                else "gradients"
                if is_gradient(row.tensor)
                else "taps"
            ].append(row)
        said = []
        for kind, rows in kinds.items():
            missing = [
                row.tensor for row in rows if row.status == "undelivered" and row.note == NOT_DELIVERED
            ]
            if missing:
                few = len(missing) <= 3 and len(missing) < len(rows)
                said.append(
                    ", ".join(missing)
                    if few
                    else f"{'all' if len(missing) == len(rows) else f'{len(missing)} of'} {len(rows)} {kind}"
                )
        return f"not checked, since not delivered: {'; '.join(said)}" if said else ""

    def row(self, tensor: str) -> Row | None:
        """Return the row of a tensor."""
        return next((row for row in self.table if row.tensor == tensor), None)
