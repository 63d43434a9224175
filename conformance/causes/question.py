"""The tensor in question, and what it would be if something had gone wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.causes.hypothesis import RIGHT, Hypothesis
from conformance.causes.step import Reached, Step, group_of
from conformance.tolerance import SAMPLES, Case
from spec.arithmetic import Arithmetic
from spec.batch import round_inputs
from spec.config import EncoderConfig
from spec.montecarlo import MonteCarlo
from spec.precision import SHORTENED_BITS, cut_to_bits, precision, round_to_bits
from spec.tensors import taps

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Prediction:
    """What a tensor is under a hypothesis, and the standard deviation of correct results then."""

    value: Array
    sigma: Array


class Question:
    """The first tensor of a run that is wrong, with what the run had before it.

    Args:
        case: what was computed.
        forced: the run's taps.
        tensor: the name of the wrong one.
        actual: the run's values of it.
    """

    def __init__(self, case: Case, forced: Mapping[str, Array], tensor: str, actual: Array) -> None:
        weights, batch = round_inputs(case.weights, case.batch, case.dtype)
        self.case = dataclasses.replace(case, weights=weights, batch=batch)
        self.forced, self.tensor = forced, tensor
        self.actual = np.asarray(actual, np.float64)
        self._runs: dict[str, list[Step]] = {}

    @property
    def config(self) -> EncoderConfig:
        """The configuration that the run was asked for."""
        return self.case.config

    @property
    def parameter(self) -> str | None:
        """The parameter whose gradient is in question, if one is."""
        return self.tensor.removeprefix("gradients.") if self.tensor.startswith("gradients.") else None

    @functools.cached_property
    def span(self) -> tuple[str, ...]:
        """The taps in which the mistake may lie: the one in question, and those before it that the run does not deliver."""
        names = list(taps(self.config, self.case.part, list(self.case.batch.arrays())))
        if self.tensor not in names:
            return ()
        before = names[: names.index(self.tensor)]
        return (*(name for name in before if name not in self.forced and group_of(name) == group_of(self.tensor)), self.tensor)

    @functools.cached_property
    def right(self) -> Prediction:
        """What the tensor should be."""
        return self.predict(RIGHT)

    @functools.cached_property
    def exact(self) -> Step:
        """The run without any mistake."""
        return self._right_runs(self.case.dtype)[0]

    def values(self, hypothesis: Hypothesis) -> Array:
        """Return the tensor under a hypothesis, in exact arithmetic."""
        if hypothesis.gradient:
            return hypothesis.gradient(self.exact.gradient)
        return self._taken(self.run(hypothesis, Exact(hypothesis.factors)))

    def run(self, hypothesis: Hypothesis, arithmetic: Arithmetic, whole: bool = False) -> Step:
        """Return what was computed on the way to the tensor."""
        case = self.case
        if hypothesis.fields:
            case = dataclasses.replace(case, config=case.config.replace(**hypothesis.fields))
        if hypothesis.weights:
            target = precision(case.dtype)
            case = dataclasses.replace(case, weights={**case.weights, **{name: target.round(w) for name, w in hypothesis.weights.items()}})
        if hypothesis.deviations:
            case = dataclasses.replace(case, deviations={**case.deviations, **hypothesis.deviations})
        step = Step(case, arithmetic, self.forced, self.tensor, hypothesis.changes, whole)
        with np.errstate(all="ignore"), contextlib.suppress(Reached):  # what is not finite explains nothing that is
            step.a.backward(step.run(case.part))
        return step

    def predict(self, hypothesis: Hypothesis, dtype: str | None = None) -> Prediction:
        """Return the tensor under a hypothesis with its sigma, derived as :mod:`conformance.tolerance` does.

        Args:
            dtype: the precision of the rounding, if it is not the run's.
        """
        if hypothesis.factors:  # rounded factors err in the same way
            return Prediction(self.values(hypothesis), self.right.sigma)
        dtype = dtype or self.case.dtype
        if hypothesis is RIGHT or hypothesis.gradient:
            runs = self._right_runs(dtype)
        else:
            runs = [self.run(hypothesis, arithmetic) for arithmetic in _arithmetics(dtype)]
        taken = hypothesis.gradient or (lambda of: of(str(self.parameter)))
        value, samples, *shadows = (taken(run.gradient) if self.parameter else self._taken(run) for run in runs)
        return Prediction(value, _sigma(value, samples, np.stack(shadows), dtype))

    def rounded(self, dtype: str) -> Array:
        """Return the tensor as it comes out in a precision."""
        return self._taken(self._right_runs(dtype)[2])

    def _right_runs(self, dtype: str) -> list[Step]:
        if dtype not in self._runs:
            self._runs[dtype] = [self.run(RIGHT, arithmetic, whole=self.parameter is not None) for arithmetic in _arithmetics(dtype)]
        return self._runs[dtype]

    def _taken(self, run: Step) -> Array:
        return run.gradient(self.parameter) if self.parameter else run.taps[self.tensor].value


def _arithmetics(dtype: str) -> Iterator[Arithmetic]:
    """Yield the arithmetics that a value and its sigma come from: exact, perturbed, and rounded in two ways."""
    measured = "shortened" if dtype == "float64" else dtype
    yield Exact()
    yield MonteCarlo(measured, SAMPLES)
    yield Arithmetic(measured)
    yield Arithmetic(measured, shuffle=1, fused=True)


def _sigma(value: Array, samples: Array, shadows: Array, dtype: str) -> Array:
    target, shrink = precision(dtype), np.sqrt(2.0) * 2.0 ** (SHORTENED_BITS - 53) if dtype == "float64" else 1.0
    samples, shadows = (np.where(np.isfinite(value), x - value, 0.0) for x in (samples[1:], shadows))  # an infinity errs nowhere
    noise = np.mean(np.square(samples), axis=0) if len(samples) else np.zeros_like(value)
    bias = np.mean(np.square(shadows), axis=0)
    bias = bias.mean(-1, keepdims=True) if bias.ndim else bias
    floor = np.maximum(target.unit_roundoff / np.sqrt(3) * abs(value), target.smallest_normal)
    return np.where(abs(value) > target.largest, np.nan, np.maximum(shrink * np.sqrt(noise + bias), floor))


class Exact(Arithmetic):
    """Float64.

    Args:
        factors: the format that factors of products are rounded to first, if they are.
    """

    def __init__(self, factors: str | None = None) -> None:
        super().__init__()
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
