"""A wrong tensor of the family, and its predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
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

# Shorter storage formats of each precision, in order of decreasing bits.
SHORTER = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16")}


class Question(Computation):
    """The first wrong tensor of a run, with preceding ones.

    Args:
        region: elements that a bug may change; by default all.
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
        self.case, self.dtype = replace(case, weights=weights, batch=batch), case.dtype
        self.pinned, self.tensor = pinned, tensor
        self.actual, self.region = np.asarray(actual, np.float64), region

    def within(self, region: Flags) -> Question:
        question = Question(self.case, self.pinned, self.tensor, self.actual, region)
        question.exact, question.right = self.exact, self.right
        return question

    def _in_region(self, value: Array, right: Array) -> Array:
        return value if self.region is None else np.where(self.region, value, right)

    @property
    def config(self) -> EncoderConfig:
        return self.case.config

    @property
    def parameter(self) -> str | None:
        return self.tensor.removeprefix("gradients.") if is_gradient(self.tensor) else None

    def is_tap(self, patterns: Iterable[str]) -> bool:
        return self.parameter is None and fits(self.tensor, patterns)

    @cached_property
    def names(self) -> list[str]:
        return list(taps(self.config, self.case.part, list(self.case.batch.arrays())))

    @property
    def before(self) -> list[str]:
        """Preceding taps; none for a gradient."""
        return self.names[: self.names.index(self.tensor)] if self.tensor in self.names else []

    @property
    def hidden(self) -> list[str]:
        return [name for name in self.before if name not in self.pinned]

    @cached_property
    def span(self) -> tuple[str, ...]:
        """Taps that may contain the bug: the wrong one, and hidden ones before it."""
        if self.tensor not in self.names:
            return ()
        group = group_of(self.tensor)
        return (*(name for name in self.hidden if group_of(name) == group), self.tensor)

    @cached_property
    def exact(self) -> Step:
        return self.run(RIGHT, Exact(self.case.dtype, keeping=True), whole=self.parameter is not None)

    @property
    def entered(self) -> Array:
        """Input of the tensor's step; for a residual, the operand that bypasses the sublayer."""
        return np.asarray(self.exact.context.source(of=self.tensor).tensor.value)

    def values(self, hypothesis: Hypothesis) -> Array:
        if hypothesis.gradient:
            return hypothesis.gradient(self.right.value)
        value = self._taken(self.run(hypothesis, Exact(self.case.dtype, hypothesis.factors)))
        return self._in_region(value, self.right.value)

    def run(
        self, hypothesis: Hypothesis, arithmetic: Arithmetic, whole: bool = False, wanted: str | None = None
    ) -> Step:
        """Recompute under a hypothesis, up to the tensor in question or to ``wanted``; if that is empty, to
        the end.
        """
        case = self.case
        if hypothesis.fields:
            case = replace(case, config=case.config.replace(**hypothesis.fields))
        if "request" in hypothesis.change.places:
            dtype = case.dtype if case.dtype in PRECISIONS else "float32"
            request = Request(case.config, case.weights, case.batch, case.part, dtype)
            edited, target = hypothesis.change.request(request), precision(case.dtype)
            # Round only new arrays, since the others already have this precision.
            new_weights = {
                name: target.round(array)
                for name, array in edited.weights.items()
                if array is not case.weights.get(name)
            }
            case = replace(case, config=edited.config, weights={**case.weights, **new_weights})
        replacements = {name: self.exact.now[source].value for name, source in hypothesis.operands.items()}
        pinned = {**self.pinned, **replacements}
        wanted = self.tensor if wanted is None else wanted
        step = Step(case, arithmetic, pinned, wanted, hypothesis.change.at, whole)
        # A hypothesis that yields infinity or NaN is not an error: it does not explain finite values.
        with np.errstate(all="ignore"), contextlib.suppress(Reached):
            step.compute(case.part)
        return step

    def predict(self, hypothesis: Hypothesis, dtype: str | None = None) -> Prediction:
        """Predict the tensor with the sigma of the hypothesis' own arithmetic."""
        if hypothesis.factors:  # products of rounded factors have the usual errors
            return Prediction(self.values(hypothesis), self.right.sigma)
        dtype = dtype or self.case.dtype
        edit = hypothesis.gradient or np.asarray
        base = RIGHT if hypothesis.gradient else hypothesis  # the edit follows a correct backward pass

        def compute(arithmetic: Arithmetic, observer: Observer) -> int:
            run = self.run(base, arithmetic, whole=base is RIGHT and self.parameter is not None)
            observer(self.tensor, edit(self._taken(run)))
            return arithmetic.elements

        values, sigmas = estimate(compute, dtype, truth=Exact(dtype))
        value, sigma = values[self.tensor], sigmas[self.tensor]
        if self.region is None:
            return Prediction(value, sigma)
        return Prediction(self._in_region(value, self.right.value), self._in_region(sigma, self.right.sigma))

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:
        if self.parameter and hypothesis.name != "no_gradient" and not value.any():
            return False  # a gradient of zeros has many causes, which zeros do not distinguish
        return super().near(hypothesis, value)

    def rounded(self, dtype: str) -> Array:
        return self._taken(self.run(RIGHT, Arithmetic(dtype)))

    def _taken(self, run: Step) -> Array:
        return run.gradient(self.parameter) if self.parameter else run.values[self.tensor]


class Exact(Arithmetic):
    """Arithmetic that rounds factors, on request."""

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
    if name == "tf32":
        return lambda values: round_to_bits(values, 11)
    if name == "tf32 cut off":
        return lambda values: cut_to_bits(values, 11).astype(np.float64)
    return lambda values: precision(name).round(values).astype(np.float64)
