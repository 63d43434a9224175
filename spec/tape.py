"""A value on the tape of an arithmetic, and what ties two of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from concord.spec.arrays import Array, Mask

Pullback = Callable[[Array], Array]

FUNCTION = 4.0
"""Unit roundoffs that an elementary function (exp, log, tanh, erf) may err; an operation errs 1."""


class Node:
    """A value on the tape, with the operands that it came from and how a gradient flows back to each.

    Attributes:
        completed: called once the gradient is the sum of everything that flows back; it may put another in
            its place.
        constant: where it is a constant that absorbs whatever it came from, to its last digit (SPEC MSK-5);
            None: nowhere.
        hidden: where it is a score that a mask hides; None: nowhere.
    """

    __slots__ = ("completed", "constant", "gradient", "hidden", "operands", "shape", "taped", "value")

    def __init__(
        self,
        value: Array,
        shape: tuple[int, ...],
        operands: Sequence[tuple[Node, Pullback]] = (),
        taped: bool = True,
    ) -> None:
        self.value = value
        self.shape = shape
        self.operands = operands
        self.taped = taped
        self.gradient: Array | None = None
        self.completed: Callable[[Node], None] | None = None
        self.constant: Mask | None = None
        self.hidden: Mask | None = None


class RowSums:
    """What ties a softmax to the weighted sum that it is used in.

    The row sums of output times gradient (SPEC ALG-1 to ALG-3).

    They are, but for rounding, the row sums of weights times their gradient that the derivative of the
    softmax needs.
    """

    def __init__(self) -> None:
        self.products: Array | None = None
