"""Explanations: why a run is wrong, as far as that is known, beside its verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from concord.conformance.record_fields import Unwritten, among
from concord.spec.deviations import KNOWN_DEVIATIONS, OF_MODULES

DECLARABLE = {**KNOWN_DEVIATIONS, **OF_MODULES}


@dataclass(frozen=True)
class Explanation:
    """What is known of a first divergence."""

    tensor: str  # the first that is wrong; empty where the words stand beside its name
    clauses: tuple[str, ...] = ()  # that it may break, the likeliest first; a module has none
    hypothesis: str = ""  # names of what explains it, joined by "or"; empty if nothing known does
    text: str = ""  # a sentence
    confident: bool = False  # whether nothing else that was tried explains it as well
    description: str = ""  # what is seen of the tensor, in a sentence
    notes: tuple[str, ...] = ()
    # The deviation with whose declaration the run would not diverge; empty if none.
    undeclared: Annotated[str, among("", *DECLARABLE)] = ""
    # Those that are named, as they can be tried elsewhere.
    hypotheses: Unwritten = field(default=(), compare=False, repr=False)  # tuple[Hypothesis, ...]

    @property
    def clause(self) -> str:
        """The clause that is most likely broken."""
        return self.clauses[0] if self.clauses else ""

    @property
    def seen(self) -> tuple[str, ...]:
        """The description, if no cause is certain, and notes."""
        return (*((self.description,) if self.description and not self.confident else ()), *self.notes)

    @property
    def lines(self) -> tuple[str, ...]:
        """All sentences."""
        return (*((self.text,) if self.text else ()), *self.seen)
