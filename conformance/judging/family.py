"""The family as a reference: what a correct run of a case yields, and how far it may lie from it.

Each tensor is judged in two ways. *End to end*: against the oracle from the inputs. *Locally*: against the
oracle that recomputes each tap from the run's own preceding taps, so that only the error of that step counts;
gradients then flow back through the run's own forward values, and from the run's own gradients by its taps,
where it delivers them. Sigma is derived by :mod:`concord.conformance.judging.estimate`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
from concord.conformance.judging.judge import is_half
from concord.conformance.judging.padding import uncomputed
from concord.conformance.judging.protocol import Activation, Pin
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import (
    KNOWN_DEVIATIONS,
    NONE,
    UNCOMPUTED_PADDING,
    WIDER_OUTPUT,
    Deviations,
)
from concord.spec.parameters import Weights, trainable
from concord.spec.precision import precision
from concord.spec.tensors import from_output_on, output_name

ALIKE = 2.0**-20
"""Share of a tensor's largest number by which deviations may change the truth where sigma is a first look."""

SUM = " + "
"""Stands between the names of tensors of which a published one is the sum."""


@dataclass(frozen=True)
class FamilyReference:
    """What is right of a run of a member of the family.

    Attributes:
        case: what was asked of the run, with the deviations that it declares.
        run: what it promises: sections, taps that it has not, results beside their taps.
        excuses: what the run declares that the judge leaves out
            (:attr:`concord.spec.deviations.KnownDeviation.excuses`).
        published: what to compare with end to end, in place of the oracle's own.
        end_to_end: whether gradients of a large model are judged from the inputs too.
    """

    case: JudgedProblem
    run: Run
    excuses: frozenset[str] = frozenset()
    published: Expectation | None = None
    end_to_end: bool = True

    @property
    def local(self) -> bool:
        """Whether each step is judged by itself."""
        return self.published is None and bool(self.run.taps)

    @functools.cached_property
    def output(self) -> str:
        """The name of the result."""
        return output_name(self.case.config, self.case.part)

    @functools.cached_property
    def whole(self) -> Expectation:
        """What is expected from the inputs; where gradients are judged locally alone, its outline."""
        if self.published:
            return replace(self.published, norms=norms(self.published.values))
        return outline(self.case) if self.brief else end_to_end(self.case)

    @functools.cached_property
    def activations(self) -> dict[str, Activation]:
        """Every tensor that was requested, in the order of computation."""
        whole = self.whole
        shapes = whole.shapes or {name: value.shape for name, value in whole.values.items()}
        names = [name for name in shapes if self.requested(name) and (self.local or name in whole.values)]
        found = {name: self.activation(name, shapes[name]) for name in names}
        if "gradients" in self.run.requested and not self.case.gradients:  # the run delivers none at all
            for name in trainable(self.case.config, self.case.part):
                clause = self.case.clause(f"gradients.{name}")
                found[f"gradients.{name}"] = Activation((0,), self.case.dtype, clause, absent=NOT_EXPOSED)
        return found

    def activation(self, name: str, shape: tuple[int, ...]) -> Activation:
        """Return what is known of a tensor."""
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
        """Whether gradients are judged locally alone, since the oracle's are too large to be kept."""
        return self.local and (not self.end_to_end or is_large(self.case))

    def expect(self, pin: Pin | None) -> Iterator[Expectation]:
        """Yield what a correct run yields: of each step, or from the inputs."""
        if pin is not None:
            yield from self.expect_steps(pin)
        elif not self.brief:
            yield self.whole
        elif self.end_to_end:
            yield end_to_end(replace(self.case, gradients=False))

    def expect_steps(self, pin: Pin) -> Iterator[Expectation]:
        """Yield the same of each step.

        In the half precisions a correct run may be far from the oracle: sigma is derived at the run's own
        taps at once. Else the oracle's own steps do for a first look, which all runs of a case share.
        """
        pinned = self.pinned(pin)
        if not is_half(self.case.dtype):
            large = is_large(self.case)
            yield local_exactly(self.case, pinned, brief=True) if large else local(self.case, pinned)
        yield local_exactly(self.case, pinned)

    def compute_exactly(self, pin: Pin) -> dict[str, Array]:
        """Return what the oracle makes of pinned tensors."""
        return plain(self.case, self.pinned(pin))

    def pinned(self, pin: Pin) -> Pinned:
        """Return the run's tensors from which others are computed."""
        arrays = {name: array for name in self.activations if (array := pin(name)) is not None}
        gradients = {subject_of(name): array for name, array in arrays.items() if is_gradient(name)}
        return Pinned({name: array for name, array in arrays.items() if not is_gradient(name)}, gradients)

    def requested(self, name: str) -> bool:
        """Return whether a run owes a tensor."""
        if is_tap_gradient(name):
            return self.run.tap_gradients.get(subject_of(name)) is not None
        if is_gradient(name) or (name == "loss" and self.run.loss is None):
            return "gradients" in self.run.requested
        return "taps" in self.run.requested or name in ("loss", self.output)

    def absent(self, name: str) -> str:
        """Return why a run may lack a tensor: a tap that was declared away, or any if none are declared."""
        hidden = self.run.info.get("not_exposed")
        if is_gradient(name) or name == self.output or (name == "loss" and "gradients" in self.run.requested):
            return ""
        if hidden is None:
            return NOT_EXPOSED
        matches = name != "loss" and any(fnmatch.fnmatch(name, pattern) for pattern in hidden)
        return DECLARED if matches else ""

    @functools.cached_property
    def wider(self) -> frozenset[str]:
        """Output and loss, which may have more digits if others show the run's precision, or it says so."""
        results = frozenset(from_output_on(self.case.config, self.case.part))
        return results if WIDER_OUTPUT in self.excuses or self.run.taps.keys() - results else frozenset()

    def excused(self, name: str) -> NDArray[np.bool_] | bool:
        """Return which elements stand in rows of padding that the run does not compute."""
        if UNCOMPUTED_PADDING not in self.excuses:
            return False
        axes = self.activations[name].axes or ()
        return uncomputed(self.case.config, self.case.batch, self.case.part, name, axes)

    def contradiction(self, name: str) -> str:
        """Return that a result is not its own tap."""
        result, tap = self.run.results(self.output).get(name), self.run.taps.get(name)
        if result is None or tap is None:
            return ""
        rounded = precision(self.case.dtype).round
        if np.array_equal(rounded(result), rounded(tap), equal_nan=True):
            return ""
        return f"the run's {'output' if name == self.output else 'loss'} is not its tap of this name"


def norms(names: Collection[str]) -> list[str]:
    """Return the activations that are divided by a deviation or a length, by their names."""
    return [name for name in names if "norm" in name.rpartition(".")[2] and not is_gradient(name)]


def expect(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    part: str = "model",
    dtype: str = "float32",
    deviations: Deviations = NONE,
) -> Expectation:
    """Return what a correct run yields from the inputs, and how far it may lie from it.

    The judgement end to end.

    Gradients of tables are given in full.
    """
    found = end_to_end(JudgedProblem(config, weights, batch, part, dtype, deviations))
    full = {
        name: found.whole(name, weights[name.removeprefix("gradients.")].shape)
        for name in found.rows
        if name in found.values
    }
    values = {**found.values, **{name: value for name, (value, _) in full.items()}}
    return Expectation(
        found.dtype,
        values,
        {**found.sigmas, **{name: sigma for name, (_, sigma) in full.items()}},
        found.clauses,
    )


def end_to_end(case: JudgedProblem) -> Expectation:
    """Return what a correct run yields from the inputs."""
    case = _without_deviations(case, 0.0)
    return _estimates.get(f"end to end {case.key}", lambda: _estimate(case, None))


def keeping(limit: int) -> contextlib.AbstractContextManager[None]:
    """Keep so many bytes of what was derived for a while, of large cases too.

    For who judges several runs of one.
    """
    return _estimates.keeping(limit)


def outline(case: JudgedProblem) -> Expectation:
    """Return which tensors there are, in which order and of which shapes, and no values."""
    shapes: dict[str, tuple[int, ...]] = {}
    case.observe(Arithmetic("float32"), lambda name, array: shapes.__setitem__(name, array.shape))
    return _expectation(case, {}, {}, shapes)


def plain(case: JudgedProblem, pinned: Pinned | None = None) -> dict[str, Array]:
    """Return what the oracle yields, from the inputs or of each step from pinned taps."""
    values: dict[str, Array] = {}
    case.observe(exact(case.dtype), values.__setitem__, pinned)
    return values


def local(case: JudgedProblem, pinned: Pinned) -> Expectation:
    """Return what each step of a run should have made of the run's own preceding taps.

    How far a step may err is taken from the same step of the reference, which is at hand for all runs of a
    case. In the half precisions, where a correct run may be far from the reference, for a run that comes near
    its tolerance by this, and for a case that is too large to be kept, it has to be derived from the run's
    own taps: :func:`local_exactly`, of a case that is too large by a first look, if that is enough.

    Args:
        pinned: tensors of the run; those that are missing are computed from the ones before.
    """
    common = _without_deviations(case, ALIKE)
    key = f"local {sorted(pinned.taps)} {sorted(pinned.gradients)} {common.key}"
    usual = _estimates.get(
        key, lambda: replace(_estimate(common, _of_truth(common, pinned)), values={})
    )  # those of a run are its own
    values = plain(case, pinned)
    sigmas = {
        name: np.maximum(sigma, least_sigma(values[name], case.dtype)) for name, sigma in usual.sigmas.items()
    }
    return _expectation(case, {name: values[name] for name in sigmas}, sigmas)


def local_exactly(case: JudgedProblem, pinned: Pinned, brief: bool = False) -> Expectation:
    """Return the same as :func:`local`, with tolerances that are derived from the run's own taps too.

    Args:
        brief: whether a first look is enough.
    """
    return _estimate(case, pinned, brief)


def is_large(case: JudgedProblem) -> bool:
    """Return whether what a case is judged by is too large to be kept for other runs of it."""
    sizes = (
        sum(array.size for array in case.weights.values())
        + np.prod(next(iter(case.batch.arrays().values())).shape[:2]) * 40 * case.config.d_model
    )
    return int(sizes) * 8 > Cache.LARGEST


def _without_deviations(case: JudgedProblem, share: float) -> JudgedProblem:
    """Return the case without deviations where the truth is the same: backends then share an estimate.

    Args:
        share: of a tensor's largest number, by which it may differ all the same.
    """
    if not case.deviations or any(KNOWN_DEVIATIONS[name].rounds for name in case.deviations):
        return case
    bare = replace(case, deviations=NONE)
    apart = _estimates.get(
        f"deviates by {case.key}", lambda: np.float64(difference(plain(case), plain(bare)))
    )
    return bare if apart <= share else case


def difference(values: dict[str, Array], others: dict[str, Array]) -> float:
    """Return by which share of their largest number tensors differ at most.

    Infinite, or no number, where what is not finite differs.
    """
    found = 0.0
    for name, other in others.items():
        value, finite = values[name], np.isfinite(other)
        if not np.array_equal(value[~finite], other[~finite], equal_nan=True):
            return np.inf
        with np.errstate(all="ignore"):
            apart = np.max(abs(value - other)[finite], initial=0.0)
            share = apart / np.max(abs(other)[finite], initial=0.0) if apart else 0.0
        found = np.maximum(found, share)
    return float(found)


def _of_truth(case: JudgedProblem, pinned: Pinned) -> Pinned:
    """Return the reference's own values of the tensors that a run delivered, as its precision holds them."""
    truth, target = plain(case), precision(case.dtype)
    return Pinned(
        {name: target.round(truth[name]) for name in pinned.taps},
        {name: target.round(truth[f"gradients.taps.{name}"]) for name in pinned.gradients},
    )


def _expectation(
    case: JudgedProblem,
    values: dict[str, Array],
    sigmas: dict[str, Array],
    shapes: dict[str, tuple[int, ...]] | None = None,
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
    """Return values and sigmas: from the inputs, or of each step from pinned taps."""
    # Gradients by taps are judged locally alone, and only where they are delivered.
    judged = {f"gradients.taps.{name}" for name in pinned.gradients} if pinned else set()
    shapes: dict[str, tuple[int, ...]] = {}

    def compute(arithmetic: Arithmetic, observer: Observer) -> int:
        def judge(name: str, array: Array) -> None:
            shapes.setdefault(name, array.shape)
            moves = is_gradient(name) or not arithmetic.corner
            if moves and (name in judged or not is_tap_gradient(name)):
                observer(name, array)

        return case.observe(arithmetic, judge, pinned)

    what = "end to end" if pinned is None else f"of each step{', a first look' if brief else ''}"
    values, sigmas = estimate(
        compute,
        case.dtype,
        count=SEVERAL if brief else SAMPLES,
        corners=pinned is None and case.gradients and case.config.rectifies,
        together=TOGETHER,
        doing=f"deriving tolerances {what}",
    )
    return _expectation(case, values, sigmas, shapes, few=brief)


_estimates = Cache()
