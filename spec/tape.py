"""Values on the tape of an arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from concord.spec.arrays import Array, Mask

Pullback = Callable[[Array], Array]

# Error of an elementary function (exp, log, tanh, erf) in unit roundoffs; other operations err by 1.
FUNCTION = 4.0


class Node:
    """A value on the tape, with its operands and their gradients.

    Attributes:
        completed: called once the gradient is complete; it may replace the gradient.
        constant: where a constant absorbed the value (SPEC MSK-5), or None.
        hidden: where a mask hides a score, or None.
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
    """Products of output and gradient that a weighted sum passes to its softmax.

    Their row sums equal those of weights times gradient, up to rounding (SPEC ALG-3).
    """

    def __init__(self) -> None:
        self.products: Array | None = None
