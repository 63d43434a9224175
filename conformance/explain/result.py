"""What is said of the first tensor of a run that is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from concord.conformance.explain.hypothesis import Cause
from concord.conformance.record_fields import Count, Field, Number, also


@dataclass(frozen=True)
class Description:
    """What is seen of a wrong tensor.

    Attributes:
        tensor: its name.
        where: which elements are wrong, in words that follow "only in"; empty if all are.
        what: what they are, in words that follow the name of the tensor; empty if no relation is seen.
        wrong, size: how many elements are wrong, of how many.
        relative: the usual error of a wrong element, as a share of the right number; infinite where that is
            0.
    """

    as_written = also("text")

    tensor: str
    where: str
    what: str
    wrong: Count = 0
    size: Count = 0
    relative: Number = float("inf")

    @property
    def text(self) -> str:
        """One sentence."""
        if self.size == 1 and self.what:
            return f"`{self.tensor}` {self.what}"
        share = f"{self.wrong} of {self.size} elements"
        if self.where:
            there = f": there it {self.what}" if self.what else ""
            return f"`{self.tensor}` is wrong only in {self.where} ({share}){there}"
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
    """

    tensor: str
    clauses: Annotated[tuple[str, ...], Field(min_length=1)]
    cause: Cause | None = None
    description: Description | None = None
    notes: tuple[str, ...] = ()

    @property
    def clause(self) -> str:
        """The clause that it most likely breaks."""
        return self.clauses[0]

    @property
    def seen(self) -> tuple[str, ...]:
        """What is seen, if no cause is certain, and notes."""
        certain = self.cause and self.cause.confident
        return (*((self.description.text,) if self.description and not certain else ()), *self.notes)

    @property
    def lines(self) -> tuple[str, ...]:
        """All that is to be said, in sentences."""
        return (*((self.cause.text,) if self.cause else ()), *self.seen)
