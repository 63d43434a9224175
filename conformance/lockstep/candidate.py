"""One backend in lockstep: what it delivers of each step, judged and kept as curves."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from concord.backends.interface import TrainingSession
from concord.backends.wire import arrays_of
from concord.conformance.campaign import failure_of, own_bug
from concord.conformance.fields import short
from concord.conformance.judging import NEAR
from concord.conformance.lockstep.cause import cause_of
from concord.conformance.lockstep.envelope import Envelope, Start, carried
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.lockstep.outcome import Curve, Divergence, Track
from concord.conformance.verdict import NOT_JUDGED, Row, conclude, section_of
from concord.conformance.wording import few
from concord.spec.arrays import Array
from concord.spec.batch import Batch
from concord.spec.deviations import NONE, Deviations
from concord.spec.text import first_line, shown

WITNESSES = 3
"""Steps that diverge by which causes are told apart."""

WITNESSED = 4_000_000
"""Numbers of a state beyond which only the first step that diverges is kept."""


@dataclass
class Candidate:
    """A backend in lockstep.

    Attributes:
        session: its training.
        deviations: that it declares.
        environment: what it says of itself.
        failure: status, line and last output of what kept it from going on, if anything did.
        agreed, diverging: steps that tell causes apart: the first and last that agree, and the first that
            diverge.
    """

    name: str
    session: TrainingSession
    deviations: Deviations = field(default_factory=lambda: NONE)
    environment: dict[str, Any] = field(default_factory=dict)
    failure: tuple[str, str, str] | None = field(default=None, init=False)
    agreed: list[MadeStep] = field(default_factory=list, init=False)
    diverging: list[MadeStep] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.steps, self.diverged, self.seconds = 0, 0, 0.0
        self.statuses: set[tuple[str, str]] = set()
        self.curves: dict[str, Curve] = {}
        self.carried: dict[str, Array] = {}

    def step(
        self, state: Mapping[str, Array] | None, step: int, batches: Sequence[Batch]
    ) -> dict[str, Array]:
        """Return what the backend reports of a step, from a state or from where it stands."""
        started = time.perf_counter()
        try:
            if state is not None:
                self.session.load(state, step)
            found = arrays_of("step", self.session.step(batches, report=True))
        finally:
            self.seconds += time.perf_counter() - started
        return {f"steps.{step}.{name}": array for name, array in found.items()}

    def receive(self, asked: Future[dict[str, Array]], envelope: Envelope, start: Start) -> None:
        """Take up what came of a step."""
        try:
            delivered = asked.result()
        except Exception as error:  # whatever keeps one backend from going on keeps no other
            line = f"{type(error).__name__}: {first_line(error)}"
            self.failure = failure_of(error) or ("error", line, traceback.format_exc())
            return
        if wrong := misfits(delivered, envelope.values):
            self.failure = ("broken", f"step() returned {'; '.join(wrong)}", "")
            return
        try:
            self.judge(delivered, envelope, start)
        except Exception as error:  # what was delivered is in order
            self.fail(f"judging step {start.step + 1}", error)

    def judge(self, delivered: dict[str, Array], envelope: Envelope, start: Start) -> None:
        """Judge a step; what comes near a tolerance by a first look is judged by the whole."""
        again = envelope.again
        start = replace(start, carried=self.carried, resumed=start.step if again else 0)
        made = MadeStep(envelope.case, start, delivered, envelope.of_run(delivered, whole=not again))
        if again and not self.diverging and (made.tensor or made.verdict.worst > NEAR):
            made = MadeStep(envelope.case, start, delivered, envelope.of_run(delivered))
        self.add(made, again)
        if not again:
            self.carried = carried(envelope.case, start.step, made.expected)

    def add(self, made: MadeStep, again: bool) -> None:
        """Keep what is to be said of a step.

        Args:
            again: whether each step starts from the oracle's state; else those after the first divergence
                explain nothing.
        """
        large = sum(array.size for array in made.start.state.values()) > WITNESSED
        if made.tensor:
            if not self.diverging or (again and not large and len(self.diverging) < WITNESSES):
                self.diverging.append(made)
        elif not self.diverging and not large:
            self.agreed = [*self.agreed[:1], made]
        self.steps += 1
        self.statuses |= made.statuses
        self.diverged += bool(made.tensor)
        rows: dict[str, list[Row]] = {}
        for row in made.verdict.table:
            rows.setdefault(section_of(row.tensor), []).append(row)
        for section, found in rows.items():
            self.curves[section] = extended(self.curves.get(section), section, found, made)

    def fail(self, doing: str, error: Exception) -> None:
        """Keep that Concord itself failed, while the backend did not."""
        self.failure = (NOT_JUDGED, own_bug(doing, error), traceback.format_exc())

    def track(self) -> Track:
        """Return what it came to, with the cause of its first divergence."""
        first = Divergence.of(self.diverging[0]) if self.diverging else None
        if first is not None:
            try:
                others = [*self.agreed, *self.diverging[1:]]
                first = replace(first, cause=cause_of(self.diverging[0], others))
            except Exception as error:  # the divergence stands
                self.fail(f"explaining step {first.step + 1}", error)
        status, detail, stderr = self.failure or (conclude(self.statuses)[0], "", "")
        return Track(
            self.name,
            "diverges" if self.diverged else status,
            self.steps,
            self.diverged,
            tuple(self.curves.values()),
            first,
            detail,
            stderr,
            self.seconds,
        )


def extended(curve: Curve | None, section: str, rows: list[Row], made: MadeStep) -> Curve:
    """Return a curve with a point more."""
    curve = curve or Curve(section, [])
    worst = max(rows, key=lambda row: row.ratio)
    if not curve.worst or worst.ratio > max(curve.ratio):
        curve = replace(curve, worst=worst.tensor.split(".", 2)[2], at=made.start.step)
    judged = any(row.status in ("agrees", "diverges") for row in rows)
    return replace(curve, unjudged=curve.unjudged + (not judged), ratio=[*curve.ratio, short(worst.ratio)])


def misfits(delivered: Mapping[str, Array], expected: Mapping[str, Array]) -> list[str]:
    """Return what of a step is unknown, or of a wrong shape or type; the first of each kind is shown."""
    unknown, misshapen, mistyped = (list[str]() for _ in range(3))
    for name, array in delivered.items():
        said, right = repr(shown(name.split(".", 2)[2])), expected.get(name)
        if right is None:
            unknown.append(said)
        elif array.shape != right.shape:
            misshapen.append(f"{said} of shape {array.shape} but must be {right.shape}")
        elif array.dtype.kind != "f":
            mistyped.append(f"{said} of dtype {array.dtype} but must be a floating-point type")
    sections = ", ".join(dict.fromkeys(name.split(".")[2] for name in expected))
    problems = [f"{few(unknown, most=3)}, but this training has only {sections}"] if unknown else []
    return problems + [
        first + (f" (and {len(more)} like it)" if more else "")
        for first, *more in filter(None, (misshapen, mistyped))
    ]
