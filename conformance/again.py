"""Jobs that run several times on the same inputs: how often, what is kept between two runs, and what they say together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from concord.spec.tensors import output_name

if TYPE_CHECKING:
    from concord.backends.interface import Run
    from concord.conformance.campaign import Job, Result
    from concord.conformance.comparison import Verdict

Tensors = Mapping[str, NDArray[np.floating]]

WORST_LAST = ("agrees", "undetermined", "diverges")


@dataclass(frozen=True)
class Repeats:
    """What came of running one job several times, on the same inputs and in the same process.

    Attributes:
        times: how often it ran, the first run included.
        differing: the tensors that did not always have the same bits, in the order of computation.
    """

    DERIVED: ClassVar = ("equal",)

    times: int
    differing: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every tensor had the same bits each time."""
        return not self.differing


def repeated(jobs: Sequence[Job], least: int = 1) -> list[Job]:
    """Return a list in which each job stands so often at least, and knows how often.

    What is added follows the place where the job stood last.
    """
    listed = Counter(map(id, jobs))
    counted = {id(job): dataclasses.replace(job, times=max(listed[id(job)], least)) for job in jobs}
    missing = {key: job.times - listed[key] for key, job in counted.items()}
    turns: list[Job] = []
    for job in reversed(jobs):
        turns += [counted[id(job)]] * (1 + missing.pop(id(job), 0))
    return turns[::-1]


@dataclass(frozen=True)
class Kept:
    """What is kept of a job until it comes again.

    Attributes:
        result: what came of all its runs so far.
        first: the tensors of its first run, by name; None if the job failed, and is not run again.
        times: how often it ran.
        turn: the turn of its backend in which it last ran.
    """

    result: Result
    first: Tensors | None
    times: int
    turn: int

    def words(self, job: Job, turn: int) -> str:
        """Say which run of a job the next one is, in a turn of its backend, and what the earlier ones came to."""
        between = ", after others" if turn > self.turn + 1 else ""
        came_to = said(self.result.verdict.status if self.result.verdict else self.result.status)
        return f"only when it is run again: run {self.times + 1} of {job.times}{between}; the first {came_to}"

    def repeats(self, differing: set[str], verdict: Verdict) -> Repeats:
        """Return what has come of all runs, with those of the next one that differ from the first one."""
        differing = differing | {*(self.result.repeats.differing if self.result.repeats else ())}
        order = {row.tensor: place for place, row in enumerate(verdict.table)}
        return Repeats(
            self.times + 1, tuple(sorted(differing, key=lambda name: (order.get(name, len(order)), name)))
        )


def worse(later: Verdict, earlier: Verdict) -> bool:
    """Return whether a later run came to less than an earlier one."""
    return WORST_LAST.index(later.status) > WORST_LAST.index(earlier.status)


def said(status: str) -> str:
    """Return what a run came to, as the verb of a sentence."""
    return "is undetermined" if status == "undetermined" else status


def tensors_of(job: Job, run: Run) -> Tensors:
    """Return every tensor of a run by the name that a verdict gives it."""
    taps = {**run.taps, **run.results(output_name(job.config, job.part))}
    by_taps = {f"taps.{name}": array for name, array in run.tap_gradients.items()}
    return {
        **taps,
        **{f"gradients.{name}": array for name, array in {**run.gradients, **by_taps}.items()},
        **run.steps,
    }


def differing(first: Tensors, later: Tensors) -> set[str]:
    """Return the names of tensors that are not the same in both, bit for bit."""
    return {name for name in {*first, *later} if not _same_bits(first.get(name), later.get(name))}


def _same_bits(a: NDArray[np.floating] | None, b: NDArray[np.floating] | None) -> bool:
    return (
        a is not None and b is not None and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    )
