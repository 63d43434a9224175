"""What is seen of a wrong tensor, where nothing that is known explains it.

No cause, and never said as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from concord.conformance.bugs.context import Flags
from concord.conformance.diagnosis.regions import FILLED, Region, everywhere, smallest
from concord.conformance.diagnosis.relations import relate
from concord.conformance.estimate import R, Z
from concord.conformance.explain.question import Question
from concord.conformance.explain.reading import within
from concord.conformance.fields import Count, Number, also


@dataclass(frozen=True)
class Description:
    """What is seen of a wrong tensor.

    Attributes:
        tensor: its name.
        where: which elements are wrong, in words that follow "only"; empty if all are.
        region: the kind of the condition (:class:`concord.conformance.diagnosis.regions.Region`).
        places: axis name to places along it.
        what: what they are, in words that follow the name of the tensor; empty if no relation is seen.
        relation: its kind (:class:`concord.conformance.diagnosis.relations.Relation`).
        numbers: that were read off.
        wrong, size: how many elements are wrong, of how many.
        relative: the usual error of a wrong element, as a share of the right number; infinite where that is
            0.
        exact: whether what is said gives the whole tensor, the right elements included, to within rounding.
    """

    written = also("text")

    tensor: str
    where: str
    region: str
    places: Mapping[str, tuple[int, ...]]
    what: str
    relation: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    wrong: Count = 0
    size: Count = 0
    relative: Number = float("inf")
    exact: bool = False

    @property
    def text(self) -> str:
        """One sentence."""
        share = f"{self.wrong} of {self.size} elements"
        if self.where:
            there = f": there it {self.what}" if self.what else ""
            where = self.where if self.where.startswith("where") else f"in {self.where}"
            return f"`{self.tensor}` is wrong only {where} ({share}){there}"
        if self.what:
            return f"`{self.tensor}` {self.what} ({share} are wrong)"
        size = f", by about {self.relative:.1g} of its size" if 0 < self.relative < 1 else ""
        return f"`{self.tensor}` is wrong in {share}{size}, with no order that is known"


def wrong_elements(question: Question) -> Flags:
    """Return which elements are wrong; if none is by itself, those that err more than chance lets many."""
    actual, right, sigma = question.actual, question.right.value, question.right.sigma
    infinite = np.isfinite(actual) != np.isfinite(right)
    scores = np.where(np.isfinite(sigma), abs(actual - right) / sigma, 0.0)
    for limit in (Z, R):
        wrong = infinite | (np.nan_to_num(scores, nan=np.inf) > limit) & np.isfinite(right)
        if wrong.any():
            return np.asarray(wrong)
    return np.asarray(infinite)


def describe(question: Question) -> tuple[Description, Region] | None:
    """Return what is seen of the tensor in question, and where, if anything is wrong with it by itself."""
    with np.errstate(all="ignore"):
        wrong = wrong_elements(question)
        if not wrong.any():
            return None
        region = smallest(question, wrong)
        filled = float((wrong & region.flags).sum() / region.flags.sum())
        found = relate(question, region)
        if found is None and region.text and filled < FILLED:
            found = relate(question, everywhere(wrong.shape))
            region = everywhere(wrong.shape) if found else region
        exact = bool(found and found.value is not None and _gives(question, region))
        if not exact and filled < FILLED / 2 and not found:
            region = everywhere(wrong.shape)
        shares = abs(question.actual - question.right.value)[wrong] / abs(question.right.value[wrong])
    seen = Description(
        question.tensor,
        region.text,
        region.kind,
        region.places,
        found.text if found else "",
        found.kind if found else "",
        (found.numbers or {}) if found else {},
        int(wrong.sum()),
        wrong.size,
        float(np.median(np.nan_to_num(shares, nan=np.inf, posinf=np.inf))),
        exact,
    )
    return seen, region


def _gives(question: Question, region: Region) -> bool:
    """Return whether the tensor is right but in a region, and is there what is said."""
    right, sigma = question.right.value, np.broadcast_to(question.right.sigma, question.actual.shape)
    left = np.where(region.flags, 0.0, question.actual - right)
    return within(left, sigma)
