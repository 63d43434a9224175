"""Why a run is wrong, as far as that is known: what is said beside a verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from concord.conformance.record_fields import Unwritten, among
from concord.spec.deviations import KNOWN_DEVIATIONS, OF_MODULES

DECLARABLE = {**KNOWN_DEVIATIONS, **OF_MODULES}
"""What a run may declare."""


@dataclass(frozen=True)
class Explanation:
    """What is known of a first divergence.

    Attributes:
        tensor: the first one that is wrong; empty where the words stand beside its name.
        clauses: of SPEC.md that it may break, the likeliest first; a module has none.
        hypothesis: the name of what explains it; several are joined by "or"; empty if nothing known does.
        text: a sentence that says so.
        confident: whether nothing else that was tried explains it as well.
        description: what is seen of the tensor, in a sentence.
        notes: what else is to be said, in sentences.
        undeclared: the deviation (:data:`DECLARABLE`) with whose
            declaration the run would not diverge; empty if there is none.
        hypotheses: those that are named, as they can be tried elsewhere.
    """

    tensor: str
    clauses: tuple[str, ...] = ()
    hypothesis: str = ""
    text: str = ""
    confident: bool = False
    description: str = ""
    notes: tuple[str, ...] = ()
    undeclared: Annotated[str, among("", *DECLARABLE)] = ""
    hypotheses: Unwritten = field(default=(), compare=False, repr=False)  # tuple[Hypothesis, ...]

    @property
    def clause(self) -> str:
        """The clause that is most likely broken."""
        return self.clauses[0] if self.clauses else ""

    @property
    def seen(self) -> tuple[str, ...]:
        """What is seen, if no cause is certain, and notes."""
        return (*((self.description,) if self.description and not self.confident else ()), *self.notes)

    @property
    def lines(self) -> tuple[str, ...]:
        """All that is to be said, in sentences."""
        return (*((self.text,) if self.text else ()), *self.seen)
