"""The protocol of a reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from concord.conformance.judging.expectation import Expectation
from concord.spec.arrays import Array, Arrays, Ids, Mask, Shape

# A function that returns the replacement of a computed tensor by name, or None to keep it.
Pin = Callable[[str], "Array | None"]


@dataclass(frozen=True)
class Activation:
    """A description of a tensor: an activation, output, loss or gradient."""

    shape: Shape  # of the whole tensor
    dtype: str  # precision or mode whose rounding is allowed
    clause: str = ""  # the defining clause of SPEC.md, if any
    axes: tuple[str, ...] | None = None  # names; None if unknown
    # Rows of a table's gradient that may be nonzero; None for all.
    rows: Ids | None = None
    absent: str = ""  # why a run may lack it; empty if it is required
    wider: bool = False  # whether it may have more digits than its precision
    pinned: bool = True  # whether later steps are computed from the run's tensor


class Reference(Protocol):
    """Expected values of the family, a training step, a PyTorch module, or a NumPy function."""

    @property
    def activations(self) -> Mapping[str, Activation]:
        """Every judged tensor, in order of computation."""

    def expect(self, pin: Pin | None) -> Iterable[Expectation]:
        """Yield expected values, with first looks before the final one.

        Args:
            pin: returns the run's tensors to compute steps from; None judges end to end.
        """

    def compute_exactly(self, pin: Pin) -> Arrays:  # noqa: ARG002
        """Compute every tensor in exact arithmetic, unless a run is only judged end to end."""
        return {}

    def excused(self, name: str) -> Mask | bool:  # noqa: ARG002
        """Elements declared uncomputed, broadcastable."""
        return False

    def contradiction(self, name: str) -> str:  # noqa: ARG002
        """The run's false statement about a tensor, if any."""
        return ""


class PublishedReference(Reference):
    """Published tensors, which judge a run only end to end.

    Args:
        looks: functions that return expected values, the final ones last.
        wider: whether tensors may have more digits than their precision.
    """

    def __init__(self, *looks: Callable[[], Expectation], wider: bool = False) -> None:
        self.looks, self.wider = [functools.cache(look) for look in looks], wider

    @functools.cached_property
    def activations(self) -> dict[str, Activation]:
        """The published tensors, all of them required."""
        first = self.looks[0]()
        return {
            name: Activation(value.shape, first.dtype, first.clauses[name], wider=self.wider)
            for name, value in first.values.items()
        }

    def expect(self, pin: Pin | None) -> Iterator[Expectation]:
        """Yield expected values, only end to end."""
        if pin is None:
            yield from (look() for look in self.looks)
