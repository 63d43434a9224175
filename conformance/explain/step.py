"""One step of the model, recomputed from what a run had when it came to it, as the model would be with some mistake."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.expectation import JudgedProblem, is_gradient, subject_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.masks import real_tokens
from concord.spec.model import Model
from concord.spec.tape import Node

Array = NDArray[np.floating]
Flags = NDArray[np.bool_]

Change = Callable[["Step", str, Node], Node]
"""Takes the run, the name of a tap and what it rightly is; returns what it is with the mistake."""


class Reached(Exception):
    """The tensor in question has been computed."""


class Step(Model):
    """A run of the reference on forced taps, which ends at the tensor in question.

    Args:
        case: with weights and inputs rounded to its precision.
        arithmetic: in which it is computed.
        forced: taps that what follows is computed from.
        wanted: the tensor in question.
        changes: gives, for the name of a tap, what is made of it.
        whole: whether everything is computed, and not only what the tensor in question depends on.

    Attributes:
        taps: each tap as it was computed.
        now: each tap as what follows sees it.
        x: what went into the last linear layer or norm.
        inputs: the same, by the name of the tap that followed.
        entered: what went into each sublayer, by its norm's name.
    """

    def __init__(
        self,
        case: JudgedProblem,
        arithmetic: Arithmetic,
        forced: Mapping[str, Array],
        wanted: str,
        changes: Callable[[str], Change | None],
        whole: bool = False,
    ) -> None:
        super().__init__(
            case.config, case.weights, case.batch, case.dtype, arithmetic, forced, case.deviations
        )
        self.values: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self.wanted, self.changes, self.whole = wanted, changes, whole
        self.taps: dict[str, Node] = {}
        self.now: dict[str, Node] = {}
        self.x = self.a.leaf(np.zeros(()))
        self.inputs: dict[str, Node] = {}
        self.entered: dict[str, Node] = {}

    def compute(self, part: str) -> None:
        """Compute the part, and the gradients of everything that has one."""

        def keep(name: str, array: Array) -> None:
            kind = self.gradients if is_gradient(name) else self.values
            kind[name.removeprefix("gradients.")] = array

        self.observe(keep, is_gradient(self.wanted), part)

    def gradient(self, name: str) -> Array:
        """Return the gradient of a parameter, ``inputs.<name>`` or ``taps.<name>``, of every row of a table."""
        if name.startswith("taps.") and name not in self.gradients:  # the loss does not depend on it
            return np.zeros_like(self.values[name.removeprefix("taps.")])
        return self.full(name, self.gradients[name])

    @property
    def parameters(self) -> dict[str, Node]:
        """The parameters on the tape by name, tables by the rows that are looked up."""
        return {**self.weights, **self.looked_up}

    def tap(self, name: str, tensor: Node) -> Node:
        change = self.changes(name)
        if change:
            tensor = change(self, name, tensor)
        self.inputs[name] = self.x
        self.taps[name] = tensor
        self.now[name] = super().tap(name, tensor)
        if name == self.wanted:
            raise Reached
        return self.now[name]

    # What went into a step is kept, for a change that takes something else of it.

    def linear(self, name: str, x: Node) -> Node:
        self.x = x
        return super().linear(name, x)

    def norm(self, name: str, x: Node) -> Node:
        self.x = x
        return super().norm(name, x)

    def sublayer(self, name: str, number: int, x: Node, function: Callable[[Node], Node]) -> Node:
        self.entered[f"{name}.norm{number}"] = x
        return super().sublayer(name, number, x, function)

    # Layers that are not in question are not computed where the run says what came out of them.

    def embeddings(self, real: Flags) -> Node:
        last = "embeddings.norm" if self.config.embedding_norm else "embeddings.sum"
        return self.given_tap(last) if self.skips("embeddings", last) else super().embeddings(real)

    def layer(self, name: str, x: Node, real: Flags) -> Node:
        last = f"{name}.residual2" if self.config.norm_placement == "pre" else f"{name}.norm2"
        return self.given_tap(last) if self.skips(name, last) else super().layer(name, x, real)

    def skips(self, group: str, last: str) -> bool:
        """Return whether nothing of a group matters to what is wanted but its last tap."""
        if self.whole or last not in self.forced:
            return False
        wanted, gradient = group_of(subject_of(self.wanted)), is_gradient(self.wanted)
        return place_of(group) < place_of(wanted) if gradient else group != wanted

    def given_tap(self, name: str) -> Node:
        self.now[name] = self.a.override(self.a.leaf(self.forced[name]), self.forced[name])
        return self.now[name]

    # What changes are made of.

    def beside(self, tap: str, name: str) -> Node:
        """Return another tap of the same layer or sublayer; what would be one may have been given instead."""
        full = f"{tap.rpartition('.')[0]}.{name}"
        return self.given[name] if full not in self.now and name in self.given else self.now[full]

    def key_mask(self) -> Flags:
        """Return which keys are visible: (B, S), or (B, Q, S)."""
        if self.batch.key_mask is not None:
            return self.batch.key_mask
        return real_tokens(self.config, self.batch.required("input_ids"))

    def query_mask(self) -> Flags:
        """Return which queries are real: (B, Q)."""
        if self.batch.query_mask is not None:
            return self.batch.query_mask
        return real_tokens(self.config, self.batch.required("input_ids"))

    def plain(self, tensor: Node) -> Array:
        """Return a tensor's values; where there are samples, those of the exact one."""
        return tensor.value[0] if self.a.lead else tensor.value

    def constant(self, values: NDArray[Any]) -> Node:
        """Return numbers that no gradient flows to."""
        return self.a.leaf(values)

    def stopped(self, tensor: Node) -> Node:
        """Return the same numbers; no gradient flows through them."""
        return self.a.freeze(tensor, np.ones(tensor.shape, bool))

    def straight(self, forward: Node, backward: Node) -> Node:
        """Return the numbers of one tensor, whose gradient flows to where the other came from."""
        return self.a._record(forward.value, (backward, lambda g: g))

    def rearranged(self, tensor: Node, order: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> Node:
        """Return the elements of a tensor in another order, given as what it makes of their numbers."""
        numbers = order(np.arange(int(np.prod(tensor.shape))).reshape(tensor.shape))
        flat = self.a.reshape(tensor, (int(np.prod(tensor.shape)),))
        return self.a.reshape(self.a.index(flat, numbers.reshape(-1)), numbers.shape)

    def function(self, tensor: Node, function: Callable[[Array], Array], absolute: bool = False) -> Node:
        """Return a function of each element; no gradient flows through it.

        Args:
            absolute: whether it may err as much near 0 as near 1.
        """
        return self.a._record(
            self.a._function(function(tensor.value).astype(tensor.value.dtype), absolute),
            (tensor, np.zeros_like),
        )


def matches(tap: str, patterns: Iterable[str]) -> bool:
    """Return whether the name of a tap fits one of several patterns."""
    return any(
        tap == pattern or ("*" in pattern and fnmatch.fnmatchcase(tap, pattern)) for pattern in patterns
    )


def group_of(name: str) -> str:
    """Return which layer, or which other part of the model, a tap or a parameter belongs to."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def place_of(group: str) -> int:
    """Return where a group stands in the order of computation."""
    return {"inputs": -1, "embeddings": -1}.get(
        group, int(group.removeprefix("layers.")) if group.startswith("layers.") else 1_000_000
    )
