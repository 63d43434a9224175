"""The reference with a bug, run up to the tensor in question."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from concord.conformance.bugs.context import Edit, Flags
from concord.conformance.bugs.edited_model import Edited
from concord.conformance.judging.expectation import JudgedProblem, is_gradient, subject_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.tape import Node


class Reached(Exception):
    """The tensor in question has been computed."""


class Step(Edited):
    """A reference run on pinned taps that stops at the tensor in question.

    Args:
        case: the problem, with weights and inputs rounded to its precision.
        whole: whether to also compute layers with pinned results.
    """

    def __init__(
        self,
        case: JudgedProblem,
        arithmetic: Arithmetic,
        pinned: Mapping[str, Array],
        wanted: str,
        edits: Callable[[str], Edit | None],
        whole: bool = False,
    ) -> None:
        super().__init__(
            case.config, case.weights, case.batch, case.dtype, arithmetic, pinned, case.deviations
        )
        self.values: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self.wanted, self.whole, self.part = wanted, whole, case.part
        self.edits = edits

    def compute(self, part: str) -> None:
        def keep(name: str, array: Array) -> None:
            kind = self.gradients if is_gradient(name) else self.values
            kind[name.removeprefix("gradients.")] = array

        self.observe(keep, is_gradient(self.wanted), part)

    def gradient(self, name: str) -> Array:
        """Gradient of a parameter (for a table all rows), ``inputs.<name>`` or ``taps.<name>``."""
        if name.startswith("taps.") and name not in self.gradients:  # the loss does not depend on it
            return np.zeros_like(self.values[name.removeprefix("taps.")])
        return self.full(name, self.gradients[name])

    @property
    def parameters(self) -> dict[str, Node]:
        return {**self.weights, **self.looked_up}

    def tap(self, name: str, tensor: Node) -> Node:
        tensor = super().tap(name, tensor)
        if name == self.wanted:
            raise Reached
        return tensor

    # A search recomputes the step for each hypothesis, so it skips layers whose results the run returned.

    def embeddings(self, real: Flags) -> Node:
        last = "embeddings.norm" if self.config.embedding_norm else "embeddings.sum"
        return self.given_tap(last) if self.skips("embeddings", last) else super().embeddings(real)

    def layer(self, name: str, x: Node, real: Flags) -> Node:
        last = f"{name}.residual2" if self.config.norm_placement == "pre" else f"{name}.norm2"
        return self.given_tap(last) if self.skips(name, last) else super().layer(name, x, real)

    def skips(self, group: str, last: str) -> bool:
        """Whether the wanted tensor depends on a group only through the group's last tap."""
        if self.whole or last not in self.pinned:
            return False
        target, gradient = group_of(subject_of(self.wanted)), is_gradient(self.wanted)
        return place_of(group) < place_of(target) if gradient else group != target

    def given_tap(self, name: str) -> Node:
        self.now[name] = self.a.override(self.a.leaf(self.pinned[name]), self.pinned[name])
        return self.now[name]


def group_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def place_of(group: str) -> int:
    return {"inputs": -1, "embeddings": -1}.get(
        group, int(group.removeprefix("layers.")) if group.startswith("layers.") else 1_000_000
    )


def role_of(name: str) -> str:
    """Replace the layer number in a tensor's name by ``*``."""
    subject = subject_of(name)
    return (
        f"layers.*.{subject.split('.', 2)[2]}"
        if subject.startswith("layers.") and subject.count(".") > 1
        else subject
    )
