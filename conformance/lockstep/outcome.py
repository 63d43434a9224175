"""The outcome of lockstep training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from concord.conformance.judging.explanation import Explanation
from concord.conformance.judging.verdict import STEP_SECTIONS, Row, Verdict
from concord.conformance.record_fields import Config, Count, Number, also, short
from concord.conformance.run.campaign import Setup
from concord.conformance.wording import counted

MODES = ("resynchronised", "free-running")


@dataclass(frozen=True)
class Curve:
    """Errors of one section of tensors over the steps."""

    section: str  # losses, gradients, norm, clipped, rate, moments or parameters
    ratio: list[Number]  # largest error per step in tolerances; 0 if not judged
    worst: str = ""  # tensor with the largest error
    at: Count = 0  # its step, from 0
    unjudged: Count = 0  # number of steps without a judged tensor

    @classmethod
    def of(cls, section: str, rows: Sequence[Row]) -> Curve:
        """A curve from the worst row of each step."""
        worst = max(rows, key=lambda row: row.ratio)
        _, step, tensor = worst.tensor.split(".", 2)
        unjudged = sum(not judged(row) for row in rows)
        return cls(section, [short(row.ratio) for row in rows], tensor, int(step), unjudged)

    @property
    def judged(self) -> bool:
        """Whether a tensor was judged in any step."""
        return self.unjudged < len(self.ratio)

    @property
    def largest(self) -> float:
        """The largest error in tolerances."""
        return max(self.ratio, default=0.0)


def judged(row: Row) -> bool:
    """Whether a tensor was judged."""
    return row.status in ("agrees", "diverges")


@dataclass(frozen=True)
class Divergence:
    """A backend's first divergence."""

    as_written = also("text")

    step: Count  # from 0
    row: Row  # row of the first divergent tensor in order of computation
    cause: Explanation | None = None  # the explanation, if known
    more: Count = 0  # number of other divergent tensors in the step

    @classmethod
    def of(cls, verdict: Verdict) -> Divergence:
        """A step's first divergence."""
        first, *more = [row for row in verdict.table if row.status == "diverges"]
        return cls(int(first.tensor.split(".")[1]), first, more=len(more))

    @property
    def tensor(self) -> str:
        """The tensor's name without the step."""
        return self.row.tensor.split(".", 2)[-1]

    @property
    def text(self) -> str:
        """A sentence about it."""
        row, judgement, cause = self.row, self.row.deciding, self.cause
        clauses = ", ".join(cause.clauses) if cause else row.clause
        finite = np.isfinite(row.ratio)
        size = f"{row.ratio:.3g} tolerances" if finite else row.note or "nothing can be compared"
        text = f"step {self.step + 1}, {self.tensor} ({clauses}), by {size}"
        if judgement and (judgement.element or row.size == 1):
            right = f"{judgement.expected:.9g} ± {judgement.tolerance:.2g} is correct"
            text += f" at {list(judgement.element)}: {judgement.actual:.9g}, but {right}"
        if self.more:
            diverge = "diverges" if self.more == 1 else "diverge"
            text += f"; {counted(self.more, 'more tensor')} of the step {diverge}"
        return f"{text}; {cause.text}" if cause else text


@dataclass(frozen=True)
class Track:
    """One backend's training."""

    as_written = also("worst", "unjudged")

    backend: str
    # "agrees", "diverges", "undetermined" if a section was never judged, or the failure that stopped it, such
    # as "unsupported" or "crashed".
    status: str
    steps: Count = 0
    diverged: Count = 0
    curves: tuple[Curve, ...] = ()
    first: Divergence | None = None
    detail: str = ""  # reason why it stopped, in one line
    stderr: str = ""  # last output of a failed worker
    seconds: Number = 0.0  # time of steps in its worker

    @property
    def worst(self) -> float:
        """The largest error in tolerances."""
        return max((curve.largest for curve in self.curves), default=0.0)

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Sections that were never judged."""
        return tuple(curve.section for curve in self.curves if not curve.judged)

    def curve(self, section: str) -> Curve | None:
        """A section's curve."""
        return next((curve for curve in self.curves if curve.section == section), None)


@dataclass(frozen=True)
class LockstepCase:
    """A description of the training."""

    steps: Count
    seed: int  # of batches, weights and dropout
    part: str
    config: Config
    recipe: dict[str, Any]
    settings: Setup


@dataclass(frozen=True)
class Lockstep:
    """The outcome of lockstep training."""

    # Resynchronised: each step starts from the reference's state. Free-running: each backend continues from
    # its own state, without judgement.
    mode: str
    dtype: str
    about: LockstepCase
    tracks: tuple[Track, ...] = ()
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: Number = 0.0
    # Hyperparameters that the precision cannot represent, one line each (SPEC OPT-11).
    lost: list[str] = field(default_factory=list)

    @property
    def sections(self) -> list[str]:
        """Sections with a curve."""
        return [name for name in STEP_SECTIONS if any(track.curve(name) for track in self.tracks)]

    @property
    def exit_code(self) -> int:
        """0: all agree; 1: a divergence; 3: a section was not judged."""
        statuses = {track.status for track in self.tracks}
        if "diverges" in statuses:
            return 1
        return 3 if "agrees" not in statuses or statuses - {"agrees", "unsupported", "absent"} else 0
