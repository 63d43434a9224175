"""The tensor in question, and what it would be if something had gone wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import fits
from concord.conformance.bugs.context import Flags
from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.hypothesis import RIGHT, Hypothesis
from concord.conformance.explain.partial_model import Reached, Step, group_of
from concord.conformance.judging.estimate import Observer, estimate
from concord.conformance.judging.expectation import JudgedProblem, is_gradient
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.precision import PRECISIONS, cut_to_bits, precision, round_to_bits
from concord.spec.tensors import taps

SHORTER = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16")}
"""The shorter formats that numbers of a precision are stored in, from more bits to fewer."""


class Question(Computation):
    """The first tensor of a run that is wrong, with what the run had before it.

    Args:
        case: what was computed.
        pinned: the run's taps.
        tensor: the name of the wrong one.
        actual: the run's values of it.
        region: where it may be wrong: elsewhere it is right; by default it may be everywhere.
    """

    def __init__(
        self,
        case: JudgedProblem,
        pinned: Mapping[str, Array],
        tensor: str,
        actual: Array,
        region: Flags | None = None,
    ) -> None:
        weights, batch = round_inputs(case.weights, case.batch, case.dtype)
        self.case, self.dtype = dataclasses.replace(case, weights=weights, batch=batch), case.dtype
        self.pinned, self.tensor = pinned, tensor
        self.actual, self.region = np.asarray(actual, np.float64), region

    def within(self, region: Flags) -> Question:
        """Return the same question of what is wrong in a region alone."""
        question = Question(self.case, self.pinned, self.tensor, self.actual, region)
        question.exact, question.right = self.exact, self.right
        return question

    def _in_region(self, value: Array, right: Array) -> Array:
        return value if self.region is None else np.where(self.region, value, right)

    @property
    def config(self) -> EncoderConfig:
        """The configuration that the run was asked for."""
        return self.case.config

    @property
    def parameter(self) -> str | None:
        """The parameter whose gradient is in question, if one is."""
        return self.tensor.removeprefix("gradients.") if is_gradient(self.tensor) else None

    def is_tap(self, patterns: Iterable[str]) -> bool:
        """Return whether the tensor in question is a tap, and no gradient by one, whose name fits one of
        several patterns.
        """
        return self.parameter is None and fits(self.tensor, patterns)

    @functools.cached_property
    def names(self) -> list[str]:
        """All taps, in the order of computation."""
        return list(taps(self.config, self.case.part, list(self.case.batch.arrays())))

    @property
    def before(self) -> list[str]:
        """The taps before the one in question; none of a gradient."""
        return self.names[: self.names.index(self.tensor)] if self.tensor in self.names else []

    @property
    def hidden(self) -> list[str]:
        """The taps before the one in question that the run does not deliver."""
        return [name for name in self.before if name not in self.pinned]

    @functools.cached_property
    def span(self) -> tuple[str, ...]:
        """The taps in which the bug may lie.

        The one in question, and those before it that the run does not deliver.
        """
        if self.tensor not in self.names:
            return ()
        group = group_of(self.tensor)
        return (*(name for name in self.hidden if group_of(name) == group), self.tensor)

    @functools.cached_property
    def exact(self) -> Step:
        """The run without any bug."""
        return self.run(RIGHT, Exact(self.case.dtype, keeping=True), whole=self.parameter is not None)

    @property
    def entered(self) -> Array:
        """What went into the step of the tensor; of a residual what stands beside the sublayer."""
        return np.asarray(self.exact.context.source(of=self.tensor).tensor.value)

    def values(self, hypothesis: Hypothesis) -> Array:
        """Return the tensor under a hypothesis, in exact arithmetic."""
        if hypothesis.gradient:
            return hypothesis.gradient(self.right.value)
        value = self._taken(self.run(hypothesis, Exact(self.case.dtype, hypothesis.factors)))
        return self._in_region(value, self.right.value)

    def run(
        self, hypothesis: Hypothesis, arithmetic: Arithmetic, whole: bool = False, wanted: str | None = None
    ) -> Step:
        """Return what was computed on the way to the tensor, or to another: to the loss if it has no name."""
        case = self.case
        if hypothesis.fields:
            case = dataclasses.replace(case, config=case.config.replace(**hypothesis.fields))
        if "request" in hypothesis.change.places:
            dtype = case.dtype if case.dtype in PRECISIONS else "float32"
            asked = Request(case.config, case.weights, case.batch, case.part, dtype)
            made, target = hypothesis.change.request(asked), precision(case.dtype)
            others = {
                name: target.round(array)
                for name, array in made.weights.items()
                if array is not case.weights.get(name)
            }
            case = dataclasses.replace(case, config=made.config, weights={**case.weights, **others})
        others_taken = {name: self.exact.now[other].value for name, other in hypothesis.operands.items()}
        pinned = {**self.pinned, **others_taken}
        wanted = self.tensor if wanted is None else wanted
        step = Step(case, arithmetic, pinned, wanted, hypothesis.change.at, whole)
        with (
            np.errstate(all="ignore"),
            contextlib.suppress(Reached),
        ):  # what is not finite explains nothing that is
            step.compute(case.part)
        return step

    def predict(self, hypothesis: Hypothesis, dtype: str | None = None) -> Prediction:
        """Return the tensor under a hypothesis with its sigma, derived by
        :mod:`concord.conformance.judging.estimate`.

        Args:
            dtype: the precision of the rounding, if it is not the run's.
        """
        if hypothesis.factors:  # rounded factors err in the same way
            return Prediction(self.values(hypothesis), self.right.sigma)
        dtype = dtype or self.case.dtype
        made = hypothesis.gradient or np.asarray
        base = RIGHT if hypothesis.gradient else hypothesis  # such a gradient is made of what is right

        def compute(arithmetic: Arithmetic, observer: Observer) -> int:
            run = self.run(base, arithmetic, whole=base is RIGHT and self.parameter is not None)
            observer(self.tensor, made(self._taken(run)))
            return arithmetic.elements

        values, sigmas = estimate(compute, dtype, truth=Exact(dtype))
        value, sigma = values[self.tensor], sigmas[self.tensor]
        if self.region is None:
            return Prediction(value, sigma)
        return Prediction(self._in_region(value, self.right.value), self._in_region(sigma, self.right.sigma))

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:
        if self.parameter and hypothesis.name != "no_gradient" and not value.any():
            return False  # a reason for having no gradient, and not told apart from others
        return super().near(hypothesis, value)

    def rounded(self, dtype: str) -> Array:
        """Return the tensor as it comes out in a precision."""
        return self._taken(self.run(RIGHT, Arithmetic(dtype)))

    def _taken(self, run: Step) -> Array:
        return run.gradient(self.parameter) if self.parameter else run.values[self.tensor]


class Exact(Arithmetic):
    """What the truth is computed in.

    Args:
        dtype: the precision that it is the truth for.
        factors: the format that factors of products are rounded to first, if they are.
        keeping: whether it is kept what depends on what, and every gradient.
    """

    def __init__(self, dtype: str, factors: str | None = None, keeping: bool = False) -> None:
        super().__init__("extended" if dtype == "float64" else "float64")
        self.keeping = keeping
        self.round_factors = rounding(factors) if factors else None

    def settle(self, values: Array, *size: Any, **more: Any) -> Array:
        return values

    def settle_sum(self, values: Array, *size: Any, **more: Any) -> Array:
        return values

    def _factor(self, values: Array) -> Array:
        return self.round_factors(values) if self.round_factors else values


def rounding(name: str) -> Callable[[Array], Array]:
    """Return what rounds float64 numbers to a format; a factor of TF32 products has 11 significant bits."""
    if name == "tf32":
        return lambda values: round_to_bits(values, 11)
    if name == "tf32 cut off":
        return lambda values: cut_to_bits(values, 11).astype(np.float64)
    return lambda values: precision(name).round(values).astype(np.float64)
