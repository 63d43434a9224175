"""Explanations of a wrong run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from concord.conformance.record_fields import Unwritten, among
from concord.spec.deviations import KNOWN_DEVIATIONS, OF_MODULES

DECLARABLE = {**KNOWN_DEVIATIONS, **OF_MODULES}


@dataclass(frozen=True)
class Explanation:
    """An explanation of a first divergence, as far as known."""

    tensor: str  # the first wrong tensor; empty if the text is shown next to its name
    clauses: tuple[str, ...] = ()  # clauses that it may break, likeliest first; a module has none
    hypothesis: str = ""  # names of the explaining hypotheses, joined by "or"
    text: str = ""  # a sentence
    confident: bool = False  # whether no other tested hypothesis explains it as well
    description: str = ""  # observations about the tensor, as a sentence
    notes: tuple[str, ...] = ()
    # Deviation that would make the run agree if declared; empty if none.
    undeclared: Annotated[str, among("", *DECLARABLE)] = ""
    # Named hypotheses, to be tried in other cases.
    hypotheses: Unwritten = field(default=(), compare=False, repr=False)  # tuple[Hypothesis, ...]

    @property
    def clause(self) -> str:
        """The likeliest clause."""
        return self.clauses[0] if self.clauses else ""

    @property
    def seen(self) -> tuple[str, ...]:
        """The description, unless a cause is certain, and notes."""
        return (*((self.description,) if self.description and not self.confident else ()), *self.notes)

    @property
    def lines(self) -> tuple[str, ...]:
        """All sentences."""
        return (*((self.text,) if self.text else ()), *self.seen)
