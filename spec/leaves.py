"""Weights as inputs of a computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Ids
from concord.spec.tape import Node


class Leaves(dict[str, Node]):
    """Weights that become inputs on first use.

    Args:
        carried: whether this arithmetic computed them, with its leading axes.
    """

    def __init__(self, arithmetic: Arithmetic, arrays: Mapping[str, Array], carried: bool = False) -> None:
        super().__init__()
        self.arithmetic, self.arrays, self.carried = arithmetic, arrays, carried
        self.lead = arithmetic.lead if carried else 0

    def __missing__(self, name: str) -> Node:
        leaf = self.leaf(self.arrays[name])
        if self.arithmetic.recording:
            self[name] = leaf
        return leaf

    def leaf(self, values: Array) -> Node:
        """Turn weights into an input."""
        return (
            Node(values, values.shape[self.lead :], taped=False)
            if self.carried
            else self.arithmetic.leaf(values)
        )

    def rows(self, name: str, rows: Ids) -> Node:
        """Turn some rows of a table into an input."""
        where: Any = (*(slice(None),) * self.lead, rows)
        return self.leaf(self.arrays[name][where])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight, without leading axes."""
        return self.arrays[name].shape[self.lead :]

    def get(self, name: str, default: Any = None) -> Any:
        """A weight, or the default if missing."""
        return self[name] if name in self.arrays else default
