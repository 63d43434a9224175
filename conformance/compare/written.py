"""A NumPy model as the reference, written like :mod:`concord.spec.encoder`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from concord.conformance.compare.aten_operations import Tensors
from concord.conformance.compare.decisions import Decisions
from concord.conformance.compare.module_reference import (
    OUTPUT,
    ModelReference,
    dtype_name,
    nothing,
    numbers,
    running,
)
from concord.conformance.judging.estimate import Observer, low_precision
from concord.conformance.judging.protocol import Pin
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Arrays
from concord.spec.errors import SpecError
from concord.spec.leaves import Leaves
from concord.spec.montecarlo import MonteCarlo
from concord.spec.precision import precision
from concord.spec.tape import Node

# A function that names an activation, and returns the node to continue with.
Tap = Callable[[str, Node], Node]

# A function that computes outputs from an arithmetic, weights and inputs.
Function = Callable[[Arithmetic, Mapping[str, Node], Arrays, Tap], "Node | Mapping[str, Node]"]


class Guarded(Arithmetic):
    """Exact arithmetic that rejects ineffective mask constants."""

    occurred, without_rule, recorded = (), (), Decisions()  # of operations by dispatch, which it lacks

    def __init__(self, dtype: str) -> None:
        super().__init__("float64")
        # Beyond this, values of the precision are 1 apart: added to it, a score loses all its digits.
        self.largest = 0.5 / precision(dtype).unit_roundoff

    def softmax(self, a: Node, floor: Any = None, sums: Any = None) -> Node:
        """Return the softmax, or reject a mask-like score that is not hidden."""
        # Its tolerance would be so wide that even zeros agree (decision 32).
        scores = a.value if a.hidden is None else np.where(a.hidden, 0, a.value)
        if (scores < -self.largest).any():
            raise SpecError(
                f"a softmax has a score of {scores.min():.3g} that no mask hides: "
                "hide it with replace or add_where, as the last step before the softmax"
            )
        return super().softmax(a, floor, sums)


@dataclass(frozen=True)
class Written(ModelReference):
    """A function that computes a model in any arithmetic.

    It uses operations of :class:`concord.spec.arithmetic.Arithmetic`, and calls ``tap(name, node)`` for each
    activation. The last step before a softmax must hide scores with ``replace`` or ``add_where``.

    Attributes:
        function: takes an arithmetic, weights, inputs and ``tap``; returns a node, or nodes by
            ``output[NAME]``.
        dtype: the judged precision.
    """

    function: Function
    weights: Arrays
    dtype: str = "float32"

    def cast(self, dtype: torch.dtype) -> Written:
        """The reference in another dtype."""
        return replace(self, dtype=dtype_name(dtype), **self.inputs_in(dtype))

    @functools.cached_property
    def plain(self) -> Tensors:
        """The tensors of one correct run."""
        tensors: Tensors = {}

        def take(name: str, array: Array) -> None:
            tensors[name] = torch.from_numpy(np.array(array)).to(getattr(torch, self.dtype))

        with running(self.role):
            self.compute(Arithmetic(self.dtype), take, nothing)
        return tensors

    def exact(self) -> Arithmetic:
        """Exact arithmetic."""
        return Guarded(self.dtype)

    def runs(self, seeds: range, truth: Arithmetic) -> list[Arithmetic]:  # noqa: ARG002
        """Samples for these seeds.

        The first call also returns the first low-precision run, and later calls return the others.
        """
        first, *others = low_precision(self.dtype)
        samples = (MonteCarlo(self.dtype, 1, seed) for seed in seeds)
        return [*samples, *(others if seeds.start else [first])]

    def compute(self, arithmetic: Arithmetic, observer: Observer, pin: Pin) -> None:
        """Compute every activation and gradient."""
        m, arithmetic.recording = arithmetic, self.cotangents is not None
        m.blind_rows_zero = self.blind_rows == "zero"
        rounded = {name: precision(self.dtype).round(array) for name, array in self.weights.items()}
        weights = Leaves(m, rounded)

        def complete(name: str, node: Node) -> None:
            assert node.gradient is not None
            observer(name, node.gradient)
            if (array := pin(name)) is not None:
                node.gradient = m.given_gradient(array)

        def tap(name: str, node: Node) -> Node:
            observer(name, node.value)
            node.completed = functools.partial(complete, f"gradients.taps.{name}")
            array = pin(name)
            return node if array is None else m.override(node, array)

        result = self.function(m, weights, self.inputs, tap)
        outputs = {OUTPUT: result} if isinstance(result, Node) else result
        for name, node in outputs.items():
            observer(name, node.value)
        if self.cotangents is not None:
            for name, leaf in weights.items():
                leaf.completed = functools.partial(complete, f"gradients.{name}")
            cotangents = {name: m.leaf(numbers(cotangent)) for name, cotangent in self.cotangents.items()}
            parts = [m.sum(m.multiply(node, cotangents[name])) for name, node in outputs.items()]
            m.backward(functools.reduce(m.add, parts))
