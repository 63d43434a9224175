"""What a correct run of a case yields, and how far it may lie from it (:mod:`concord.conformance.estimate`).

Each tensor is judged in two ways. *End to end*: against the reference from the inputs. *Locally*: against the
reference that recomputes each tap from the run's own preceding taps, so that only the error of that step
counts; gradients then flow back through the run's own forward values, and from the run's own gradients by its
taps, where it delivers them.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from concord.conformance.estimate import (
    SAMPLES,
    SEVERAL,
    TOGETHER,
    Cache,
    Observer,
    estimate,
    exact,
    least_sigma,
)
from concord.conformance.expectation import (
    Expectation,
    JudgedProblem,
    Pinned,
    is_gradient,
    is_tap_gradient,
)
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import KNOWN_DEVIATIONS, NONE, Deviations
from concord.spec.parameters import Weights
from concord.spec.precision import precision

ALIKE = 2.0**-20
"""Share of a tensor's largest number by which deviations may change the truth where sigma is a first look."""


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
    return _expectation(case, values, sigmas, shapes)


_estimates = Cache()
