"""What is said of the first tensor of a run that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from concord.conformance.explain.hypothesis import Cause
from concord.conformance.fields import Count, Number, also

TELLING = ("zero", "other", "shifted", "reversed", "repeated", "permuted", "transposed")
"""Relations without a number."""


@dataclass(frozen=True)
class Description:
    """What is seen of a wrong tensor.

    Attributes:
        tensor: its name.
        where: which elements are wrong, in words that follow "only"; empty if all are.
        region: the kind of the condition (:class:`concord.conformance.explain.regions.Region`).
        places: axis name to places along it.
        what: what they are, in words that follow the name of the tensor; empty if no relation is seen.
        relation: its kind (:class:`concord.conformance.explain.relations.Relation`).
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
    def telling(self) -> bool:
        """Whether it is other places or tensors, or a simple share: no number that says nothing by itself."""
        simple = "," in self.what or all(number * 4 % 1 == 0 for number in self.numbers.values())
        return self.relation in TELLING or (self.relation in ("multiple", "added") and simple)

    @property
    def where_in_words(self) -> str:
        """Which elements are wrong, in words that follow "only"."""
        return self.where if self.where.startswith("where") else f"in {self.where}"

    @property
    def text(self) -> str:
        """One sentence."""
        share = f"{self.wrong} of {self.size} elements"
        if self.where:
            there = f": there it {self.what}" if self.what else ""
            return f"`{self.tensor}` is wrong only {self.where_in_words} ({share}){there}"
        if self.what:
            return f"`{self.tensor}` {self.what} ({share} are wrong)"
        size = f", by about {self.relative:.1g} of its size" if 0 < self.relative < 1 else ""
        return f"`{self.tensor}` is wrong in {share}{size}, with no order that is known"


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a divergence.

    Attributes:
        tensor: the first one that is wrong.
        clauses: that it may break, the likeliest first.
        cause: what explains it, if anything does.
        description: what is seen of it.
        notes: what else is to be said, in sentences.
        refuted: what was tried and does not hold, and why, in sentences.
    """

    tensor: str
    clauses: Annotated[tuple[str, ...], Field(min_length=1)]
    cause: Cause | None = None
    description: Description | None = None
    notes: tuple[str, ...] = ()
    refuted: tuple[str, ...] = ()

    @property
    def clause(self) -> str:
        """The clause that it most likely breaks."""
        return self.clauses[0]

    @property
    def text(self) -> str:
        """All that is to be said, in sentences."""
        return "; ".join((*self.said, *self.refuted))

    @property
    def lines(self) -> tuple[str, ...]:
        """The same for a terminal: of what was tried and does not hold, how much that is."""
        return (*self.said, *folded(self.refuted))

    @property
    def said(self) -> tuple[str, ...]:
        """The cause if there is one, what is seen if the cause is not certain, and notes."""
        cause = [self.cause.text] if self.cause else []
        seen = self.beside[: len(self.beside) - len(self.notes)]
        return (*cause, *(f"seen: {text}" for text in seen), *self.notes)

    @property
    def beside(self) -> tuple[str, ...]:
        """What is seen, if no cause is certain, and notes."""
        certain = self.cause and (self.cause.confident or self.cause.hypothesis.startswith("seen_"))
        return (*((self.description.text,) if self.description and not certain else ()), *self.notes)


def folded(refuted: Sequence[str]) -> list[str]:
    """Return a line with the number of explanations that were tried and do not hold, if there are any."""
    many = len(refuted) != 1
    return (
        [
            f"{len(refuted)} other explanation{'s were' if many else ' was'} tried "
            f"and {'do' if many else 'does'} not hold"
        ]
        if refuted
        else []
    )
