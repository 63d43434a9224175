"""The protocol of a reference, which says of every tensor what a correct run makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from concord.conformance.judging.expectation import Expectation
from concord.spec.arrays import Array

# Returns the tensor that replaces a computed one, by name; None: goes on with the computed one.
Pin = Callable[[str], "Array | None"]


@dataclass(frozen=True)
class Activation:
    """A tensor without its values: an activation, an output, a loss or a gradient."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # the precision or mode whose rounding is allowed for
    clause: str = ""  # of SPEC.md, if one defines it
    axes: tuple[str, ...] | None = None  # their names; None: unknown
    # Rows of a table's gradient that can be other than zero; None: all.
    rows: NDArray[np.int64] | None = None
    absent: str = ""  # why a run may lack it; empty: it must not
    wider: bool = False  # whether it may hold more digits than its precision
    pinned: bool = True  # whether later steps are computed from the run's own tensor


class Reference(Protocol):
    """What is right: the family, a training step, a PyTorch module, or a NumPy function."""

    @property
    def activations(self) -> Mapping[str, Activation]:
        """Every tensor that is judged, in the order of computation."""

    def expect(self, pin: Pin | None) -> Iterable[Expectation]:
        """Yield what is expected, first looks before the final one.

        Args:
            pin: gives the run's own tensors, from which each step is computed; None: end to end.
        """

    def compute_exactly(self, pin: Pin) -> Mapping[str, Array]:
        """Return every tensor in exact arithmetic."""

    def excused(self, name: str) -> NDArray[np.bool_] | bool:
        """Return which elements are declared not to be computed, in a shape that broadcasts."""

    def contradiction(self, name: str) -> str:
        """Return a false statement of the run about a tensor; empty if there is none."""


class PublishedReference:
    """Given tensors, which judge a run end to end alone.

    Args:
        looks: give what is expected, the final one last.
        wider: whether tensors may hold more digits than their precision.
    """

    def __init__(self, *looks: Callable[[], Expectation], wider: bool = False) -> None:
        self.looks, self.wider = [functools.cache(look) for look in looks], wider

    @functools.cached_property
    def activations(self) -> dict[str, Activation]:
        """The given tensors; a run must have each."""
        first = self.looks[0]()
        return {
            name: Activation(value.shape, first.dtype, first.clauses[name], wider=self.wider)
            for name, value in first.values.items()
        }

    def expect(self, pin: Pin | None) -> Iterator[Expectation]:
        """Yield what is expected from the inputs; of single steps nothing is known."""
        if pin is None:
            yield from (look() for look in self.looks)

    def compute_exactly(self, pin: Pin) -> dict[str, Array]:  # noqa: ARG002
        """Return nothing: no arithmetic is at hand."""
        return {}

    def excused(self, name: str) -> bool:  # noqa: ARG002
        """Excuse nothing."""
        return False

    def contradiction(self, name: str) -> str:  # noqa: ARG002
        """Return nothing."""
        return ""
