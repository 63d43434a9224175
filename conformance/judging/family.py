"""The family as a reference: expected values of a case.

*End to end*, it computes from the inputs. *Locally*, it recomputes each tap from the run's preceding taps;
gradients flow back through the run's values, from its tap gradients if returned.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from concord.backends.interface import Run
from concord.conformance.judging.breakdown import axes_of
from concord.conformance.judging.estimate import (
    SAMPLES,
    SEVERAL,
    TOGETHER,
    Cache,
    Observer,
    estimate,
    exact,
    is_half,
    least_sigma,
)
from concord.conformance.judging.exemptions import DECLARED, NOT_EXPOSED
from concord.conformance.judging.expectation import (
    Expectation,
    JudgedProblem,
    Pinned,
    is_gradient,
    is_tap_gradient,
    subject_of,
)
from concord.conformance.judging.padding import uncomputed
from concord.conformance.judging.protocol import Activation, Pin
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Arrays, Mask, Shape
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import KNOWN_DEVIATIONS, NONE, UNCOMPUTED_PADDING, WIDER_OUTPUT, Deviations
from concord.spec.parameters import Weights, trainable
from concord.spec.precision import precision
from concord.spec.tensors import from_output_on, output_name

# Deviations that change the truth by less than this share of a tensor's maximum share the first look. Weights
# of 1e-28 for masked keys have no effect, so all backends share one estimate. A run near its tolerance is
# judged from its own taps (decision 16).
ALIKE = 2.0**-20

# Separator between the names of tensors whose sum was published.
SUM = " + "


@dataclass(frozen=True)
class FamilyReference:
    """Expected values for a run of the family."""

    case: JudgedProblem  # the request, with the deviations that the run declares
    run: Run  # determines the promised sections, hidden taps, and results
    excuses: frozenset[str] = frozenset()  # declarations that the judge follows instead of the reference
    published: Expectation | None = None  # replaces the reference's expectation end to end
    end_to_end: bool = True  # whether to judge a large model's gradients end to end

    @property
    def local(self) -> bool:
        """Whether each step is judged locally."""
        return self.published is None and bool(self.run.taps)

    @cached_property
    def output(self) -> str:
        """Name of the result."""
        return output_name(self.case.config, self.case.part)

    @cached_property
    def whole(self) -> Expectation:
        """Expectation end to end; an outline if gradients are judged only locally."""
        if self.published:
            return replace(self.published, norms=norms(self.published.values))
        return outline(self.case) if self.brief else end_to_end(self.case)

    @cached_property
    def activations(self) -> dict[str, Activation]:
        """Every requested tensor, in order of computation."""
        expected = self.whole
        shapes = expected.shapes or {name: value.shape for name, value in expected.values.items()}
        names = [name for name in shapes if self.requested(name) and (self.local or name in expected.values)]
        activations = {name: self.activation(name, shapes[name]) for name in names}
        if "gradients" in self.run.requested and not self.case.gradients:  # the run returns none at all
            for name in trainable(self.case.config, self.case.part):
                clause = self.case.clause(f"gradients.{name}")
                activations[f"gradients.{name}"] = Activation(
                    (0,), self.case.dtype, clause, absent=NOT_EXPOSED
                )
        return activations

    def activation(self, name: str, shape: Shape) -> Activation:
        """Describe a tensor."""
        rows = self.whole.rows.get(name)
        shape = shape if rows is None else self.case.weights[name.removeprefix("gradients.")].shape
        return Activation(
            shape,
            self.case.dtype,
            self.whole.clauses[name],
            axes_of(self.case, name, len(shape)),
            rows,
            self.absent(name),
            name in self.wider,
            is_tap_gradient(name) or (name in self.run.taps and name != "loss"),
        )

    @property
    def brief(self) -> bool:
        """Whether gradients are judged only locally."""
        # A large model's reference gradients are too large to keep.
        return self.local and (not self.end_to_end or is_large(self.case))

    def expect(self, pin: Pin | None) -> Iterator[Expectation]:
        """Yield expected values, locally or end to end."""
        if pin is not None:
            yield from self.expect_steps(pin)
        elif not self.brief:
            yield self.whole
        elif self.end_to_end:
            yield end_to_end(replace(self.case, gradients=False))

    def expect_steps(self, pin: Pin) -> Iterator[Expectation]:
        """Yield expected values of each step."""
        pinned = self.pinned(pin)
        # In half precision, a correct run and a step's sigma may be far from the reference's. Otherwise the
        # reference's own steps suffice for a first look, shared by all runs of a case.
        if not is_half(self.case.dtype):
            large = is_large(self.case)
            yield _estimate(self.case, pinned, brief=True) if large else local(self.case, pinned)
        yield _estimate(self.case, pinned)

    def compute_exactly(self, pin: Pin) -> Arrays:
        """Compute from pinned tensors."""
        return plain(self.case, self.pinned(pin))

    def pinned(self, pin: Pin) -> Pinned:
        """The run's tensors from which others are computed."""
        arrays = {name: array for name in self.activations if (array := pin(name)) is not None}
        gradients = {subject_of(name): array for name, array in arrays.items() if is_gradient(name)}
        return Pinned({name: array for name, array in arrays.items() if not is_gradient(name)}, gradients)

    def requested(self, name: str) -> bool:
        """Whether a run must return a tensor."""
        if is_tap_gradient(name):
            return self.run.tap_gradients.get(subject_of(name)) is not None
        if is_gradient(name) or (name == "loss" and self.run.loss is None):
            return "gradients" in self.run.requested
        return "taps" in self.run.requested or name in ("loss", self.output)

    def absent(self, name: str) -> str:
        """Reason why a run may lack a tensor, if any."""
        hidden = self.run.info.get("not_exposed")
        if is_gradient(name) or name == self.output or (name == "loss" and "gradients" in self.run.requested):
            return ""
        # A run without declarations, such as tensors of any origin, may lack any tap.
        if hidden is None:
            return NOT_EXPOSED
        matches = name != "loss" and any(fnmatch.fnmatch(name, pattern) for pattern in hidden)
        return DECLARED if matches else ""

    @cached_property
    def wider(self) -> frozenset[str]:
        """Output and loss, if other taps establish the run's precision or it declares them wider."""
        results = frozenset(from_output_on(self.case.config, self.case.part))
        return results if WIDER_OUTPUT in self.excuses or self.run.taps.keys() - results else frozenset()

    def excused(self, name: str) -> Mask | bool:
        """Elements in uncomputed rows."""
        if UNCOMPUTED_PADDING not in self.excuses:
            return False
        axes = self.activations[name].axes or ()
        return uncomputed(self.case.config, self.case.batch, self.case.part, name, axes)

    def contradiction(self, name: str) -> str:
        """Report a result that differs from its own tap."""
        result, tap = self.run.results(self.output).get(name), self.run.taps.get(name)
        if result is None or tap is None:
            return ""
        # A result may be returned wider than its tap.
        rounded = precision(self.case.dtype).round
        if np.array_equal(rounded(result), rounded(tap), equal_nan=True):
            return ""
        return (
            f"the run's {'output' if name == self.output else 'loss'} differs from the tap of the same name"
        )


def norms(names: Collection[str]) -> list[str]:
    """Activations whose rows are divided by a standard deviation or length."""
    return [name for name in names if "norm" in name.rpartition(".")[2] and not is_gradient(name)]


def expect(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    part: str = "model",
    dtype: str = "float32",
    deviations: Deviations = NONE,
) -> Expectation:
    """The end-to-end expectation, with full gradients of tables."""
    expected = end_to_end(JudgedProblem(config, weights, batch, part, dtype, deviations))
    full = {
        name: expected.whole(name, weights[name.removeprefix("gradients.")].shape)
        for name in expected.rows
        if name in expected.values
    }
    values = {**expected.values, **{name: value for name, (value, _) in full.items()}}
    return Expectation(
        expected.dtype,
        values,
        {**expected.sigmas, **{name: sigma for name, (_, sigma) in full.items()}},
        expected.clauses,
    )


def end_to_end(case: JudgedProblem) -> Expectation:
    """The end-to-end expectation."""
    case = _without_deviations(case, 0.0)
    return _estimates.get(f"end to end {case.key}", lambda: _estimate(case, None))


def keeping(limit: int) -> contextlib.AbstractContextManager[None]:
    """Cache ``limit`` bytes of estimates within a block."""
    return _estimates.keeping(limit)


def outline(case: JudgedProblem) -> Expectation:
    """Names, order and shapes of all tensors."""
    shapes: dict[str, Shape] = {}
    case.observe(Arithmetic("float32"), lambda name, array: shapes.__setitem__(name, array.shape))
    return _expectation(case, {}, {}, shapes)


def plain(case: JudgedProblem, pinned: Pinned | None = None) -> Arrays:
    """The reference's tensors, computed from the inputs, or from pinned tensors where given."""
    values: Arrays = {}
    case.observe(exact(case.dtype), values.__setitem__, pinned)
    return values


def local(case: JudgedProblem, pinned: Pinned) -> Expectation:
    """The local expectation, with sigmas shared by all runs of a case.

    Not for half precision, near a tolerance, or for a large case: these need sigmas from the run's own taps.
    """
    common = _without_deviations(case, ALIKE)
    key = f"local {sorted(pinned.taps)} {sorted(pinned.gradients)} {common.key}"
    # The cache excludes values, which differ between runs.
    usual = _estimates.get(key, lambda: replace(_estimate(common, _of_truth(common, pinned)), values={}))
    values = plain(case, pinned)
    sigmas = {
        name: np.maximum(sigma, least_sigma(values[name], case.dtype)) for name, sigma in usual.sigmas.items()
    }
    return _expectation(case, {name: values[name] for name in sigmas}, sigmas)


def is_large(case: JudgedProblem) -> bool:
    """Whether the estimate is too large to keep."""
    sizes = (
        sum(array.size for array in case.weights.values())
        + np.prod(next(iter(case.batch.arrays().values())).shape[:2]) * 40 * case.config.d_model
    )
    return int(sizes) * 8 > Cache.LARGEST


def _without_deviations(case: JudgedProblem, share: float) -> JudgedProblem:
    # If the truth hardly changes, backends share an estimate.
    if not case.deviations or any(KNOWN_DEVIATIONS[name].rounds for name in case.deviations):
        return case
    standard = replace(case, deviations=NONE)
    deviation = _estimates.get(
        f"deviates by {case.key}", lambda: np.float64(difference(plain(case), plain(standard)))
    )
    return standard if deviation <= share else case


def difference(values: Arrays, others: Arrays) -> float:
    """The largest difference, relative to each tensor's maximum."""
    worst = 0.0
    for name, reference in others.items():
        value, finite = values[name], np.isfinite(reference)
        if not np.array_equal(value[~finite], reference[~finite], equal_nan=True):
            return np.inf
        with np.errstate(all="ignore"):
            largest = np.max(abs(value - reference)[finite], initial=0.0)
            share = largest / np.max(abs(reference)[finite], initial=0.0) if largest else 0.0
        worst = np.maximum(worst, share)
    return float(worst)


def _of_truth(case: JudgedProblem, pinned: Pinned) -> Pinned:
    truth, target = plain(case), precision(case.dtype)
    return Pinned(
        {name: target.round(truth[name]) for name in pinned.taps},
        {name: target.round(truth[f"gradients.taps.{name}"]) for name in pinned.gradients},
    )


def _expectation(
    case: JudgedProblem,
    values: Arrays,
    sigmas: Arrays,
    shapes: dict[str, Shape] | None = None,
    few: bool = False,
) -> Expectation:
    shapes = shapes or {name: value.shape for name, value in values.items()}
    clauses = {name: case.clause(name) for name in shapes}
    return Expectation(
        case.dtype,
        values,
        sigmas,
        clauses,
        {name: rows for name, rows in case.rows.items() if name in shapes},
        shapes,
        norms=norms(shapes),
        few=few,
    )


def _estimate(case: JudgedProblem, pinned: Pinned | None, brief: bool = False) -> Expectation:
    # Tap gradients are judged only locally, if they are returned: others need no sigma.
    tap_gradients = {f"gradients.taps.{name}" for name in pinned.gradients} if pinned else set()
    shapes: dict[str, Shape] = {}

    def compute(arithmetic: Arithmetic, observer: Observer) -> int:
        def judge(name: str, array: Array) -> None:
            shapes.setdefault(name, array.shape)
            moves = is_gradient(name) or not arithmetic.corner
            if moves and (name in tap_gradients or not is_tap_gradient(name)):
                observer(name, array)

        return case.observe(arithmetic, judge, pinned)

    scope = "end to end" if pinned is None else f"of each step{' (first pass)' if brief else ''}"
    values, sigmas = estimate(
        compute,
        case.dtype,
        count=SEVERAL if brief else SAMPLES,
        corners=pinned is None and case.gradients and case.config.rectifies,
        together=TOGETHER,
        doing=f"deriving tolerances {scope}",
    )
    return _expectation(case, values, sigmas, shapes, few=brief)


_estimates = Cache()
