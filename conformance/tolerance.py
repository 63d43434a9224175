"""How far from the truth a correct run may lie: derived for every element of every tensor, never set by hand.

For each tensor the reference is computed exactly, and beside it two estimates of what correct arithmetic of the run's
precision does to it: **Monte Carlo arithmetic** (:mod:`concord.spec.montecarlo`), the mean square error of :data:`SAMPLES`
perturbed samples, element by element; and **shadows**, runs of the reference rounded after each operation, in admissible ways
and orders, whose squared error is averaged over the last axis. Their sum is sigma². A tensor is judged by
``z = |error| / sigma``, at most :data:`Z` in every element, and by ``RMS(error) / RMS(sigma)``, at most :data:`R` but for one
element (:func:`rms_limit`).

Samples and shadows are computed a few at a time and reduced tensor by tensor as they come, so that memory does not grow with
their number. What float64 is judged by is computed in the widest type that the platform has.

Each tensor is judged in two ways. *End to end*: against the reference from the inputs. *Locally*: against the
reference that recomputes each tap from the run's own preceding taps, so that only the error of that step
counts; gradients then flow back through the run's own forward values, and from the run's own gradients by its taps, where it
delivers them. Decision 10 gives the reasons, the record of the campaign that confirmed the constants is in
``conformance/results/``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from concord.backends import heaps
from concord.conformance.cache import Cache
from concord.conformance.expectation import (
    Expectation,
    Forced,
    JudgedProblem,
    is_gradient,
    is_tap_gradient,
    least_sigma,
)
from concord.conformance.watching import Steps
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import KNOWN_DEVIATIONS, NONE, Deviations
from concord.spec.montecarlo import MonteCarlo
from concord.spec.parameters import Weights
from concord.spec.precision import precision

Array = NDArray[np.floating]

Z = 16.0
"""The largest error of an element, in sigma."""

R = 4.0
"""The largest root mean square error of a large tensor, in root mean square sigma; see :func:`rms_limit`."""

SAMPLES = 16
"""Samples of Monte Carlo arithmetic."""

FEW = 4
"""Samples of a first look at a step of training, which takes one shadow: what comes near its tolerance by it is judged by all samples and shadows."""

SEVERAL = 8
"""Samples of a first look at a case that is too large to be kept, with one shadow: of its millions of elements some have four small samples."""

ALIKE = 2.0**-20
"""Share of a tensor's largest number by which declared deviations may change the truth of a case whose sigma is a first look at a run."""

SIDE_BY_SIDE = 1 << 21
"""Numbers that samples which are computed side by side may hold together; a single sample may hold more."""

TOGETHER = 2
"""Samples of a large case that are computed at the same time: each takes the memory of a whole run, and NumPy one core."""


def rms_limit(size: float) -> float:
    """Return the largest root mean square error of a tensor: one of its elements may err :data:`Z`, the rest :data:`R`.

    Args:
        size: how many elements it has, or says something of (:func:`concord.conformance.scoring.independent_elements`).
    """
    return float(np.sqrt(R**2 + (Z**2 - R**2) / max(size, 1)))


def expect(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    part: str = "model",
    dtype: str = "float32",
    deviations: Deviations = NONE,
) -> Expectation:
    """Return what a correct run yields from the inputs, and how far it may lie from it: the judgement end to end.

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
    return _kept(f"end to end {case.key}", lambda: _estimate(case, None))


def keeping(limit: int) -> contextlib.AbstractContextManager[None]:
    """Keep so many bytes of what was derived for a while, of large cases too: for who judges several runs of one."""
    return _estimates.keeping(limit)


def outline(case: JudgedProblem) -> Expectation:
    """Return which tensors there are, in which order and of which shapes, and no values."""
    shapes: dict[str, tuple[int, ...]] = {}
    case.observe(Arithmetic("float32"), lambda name, array: shapes.__setitem__(name, array.shape))
    return _expectation(case, {}, {}, shapes)


def plain(case: JudgedProblem, forced: Forced | None = None) -> Expectation:
    """Return what the oracle yields, from the inputs or of each step from forced taps, without saying how far a run may lie from it."""
    return _expectation(case, _values(case, forced), {})


def local(case: JudgedProblem, forced: Forced) -> Expectation:
    """Return what each step of a run should have made of the run's own preceding taps.

    How far a step may err is taken from the same step of the reference, which is at hand for all runs of a case. In the
    half precisions, where a correct run may be far from the reference, for a run that comes near its tolerance by
    this, and for a case that is too large to be kept, it has to be derived from the run's own taps: :func:`local_exactly`,
    of a case that is too large by a first look, if that is enough.

    Args:
        forced: tensors of the run; those that are missing are computed from the ones before.
    """
    common = _without_deviations(case, ALIKE)
    key = f"local {sorted(forced.taps)} {sorted(forced.gradients)} {common.key}"
    usual = _kept(
        key, lambda: replace(_estimate(common, _of_truth(common, forced)), values={})
    )  # those of a run are its own
    values = _values(case, forced)
    sigmas = {
        name: np.maximum(sigma, least_sigma(values[name], case.dtype)) for name, sigma in usual.sigmas.items()
    }
    return _expectation(case, {name: values[name] for name in sigmas}, sigmas)


def local_exactly(case: JudgedProblem, forced: Forced, brief: bool = False) -> Expectation:
    """Return the same as :func:`local`, with tolerances that are derived from the run's own taps too.

    Args:
        brief: whether a first look is enough.
    """
    return _estimate(case, forced, brief)


def is_large(case: JudgedProblem) -> bool:
    """Return whether what a case is judged by is too large to be kept for other runs of it."""
    sizes = (
        sum(array.size for array in case.weights.values())
        + np.prod(next(iter(case.batch.arrays().values())).shape[:2]) * 40 * case.config.d_model
    )
    return int(sizes) * 8 > Cache.LARGEST


def _without_deviations(case: JudgedProblem, share: float) -> JudgedProblem:
    """Return the case without deviations where the truth with them is the same, so that backends with and without share an estimate.

    Args:
        share: of a tensor's largest number, by which it may differ all the same.
    """
    if not case.deviations or any(KNOWN_DEVIATIONS[name].rounds for name in case.deviations):
        return case
    bare = replace(case, deviations=NONE)
    apart = _estimates.get(
        f"deviates by {case.key}", lambda: np.float64(difference(plain(case).values, plain(bare).values))
    )
    return bare if apart <= share else case


def difference(values: dict[str, Array], others: dict[str, Array]) -> float:
    """Return by which share of their largest number tensors differ at most; infinite where what is not finite differs."""
    found = 0.0
    for name, other in others.items():
        finite = np.isfinite(other)
        if not np.array_equal(finite, np.isfinite(values[name])) or not np.array_equal(
            values[name][~finite], other[~finite], equal_nan=True
        ):
            return np.inf
        apart = np.max(
            abs(np.subtract(values[name], other, where=finite, out=np.zeros_like(other))), initial=0.0
        )
        largest = np.max(abs(other), initial=0.0, where=finite)
        if apart:
            found = max(found, float(apart / largest) if largest else np.inf)
    return found


def _of_truth(case: JudgedProblem, forced: Forced) -> Forced:
    """Return the reference's own values of the tensors that a run delivered, as its precision holds them."""
    truth, target = plain(case).values, precision(case.dtype)
    return Forced(
        {name: target.round(truth[name]) for name in forced.taps},
        {name: target.round(truth[f"gradients.taps.{name}"]) for name in forced.gradients},
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


def _values(case: JudgedProblem, forced: Forced | None) -> dict[str, Array]:
    values: dict[str, Array] = {}
    case.observe(exact(case.dtype), values.__setitem__, forced)
    return values


def exact(dtype: str) -> Arithmetic:
    """Return the arithmetic in which the truth for a precision is computed."""
    return Arithmetic("extended" if dtype == "float64" else "float64")


def shadows(dtype: str, brief: bool = False) -> Iterator[Arithmetic]:
    """Yield arithmetics that round as correct runs of a precision may: in admissible ways and orders, and as fused kernels do.

    Sums run as they stand in the first, in orders drawn at random in the others. In TF32 the last two cut factors of products off.

    Args:
        brief: whether a first look is enough: the first alone.
    """
    yield Arithmetic(dtype, strict=True)
    if brief:
        return
    yield Arithmetic(dtype, shuffle=1, fused=True, strict=True, way="logarithm")
    yield Arithmetic(dtype, shuffle=2, strict=True, cut=True)
    yield Arithmetic(dtype, shuffle=3, fused=True, strict=True, cut=True, way="output")


def samples(dtype: str, elements: int, count: int = SAMPLES) -> Iterator[MonteCarlo]:
    """Yield Monte Carlo arithmetics, as many side by side as may be.

    Args:
        elements: that a sample holds on the way forward.
        count: how many samples they are together.
    """
    together = int(min(max(SIDE_BY_SIDE // max(elements, 1), 1), count))
    for first in range(0, count, together):
        yield MonteCarlo(dtype, min(together, count - first), first)


class Sigma:
    """Sigma of one tensor, from samples and shadows that are taken up one after the other.

    Args:
        value: the truth.
        dtype: the precision.
    """

    def __init__(self, value: Array, dtype: str) -> None:
        self.value, self.dtype = value, dtype
        self.noise: Array | None = None
        self.bias: Array | None = None
        known = np.isfinite(value)
        self.finite = None if known.all() else known
        self.storage = np.float64 if dtype == "float64" else np.float32
        self.busy = threading.Lock()

    def sample(self, values: Array) -> None:
        """Take up samples, (n, …) or, where noise reached none, (1, …)."""
        errors = values - self.value
        if len(values) == 1 and not errors.any():
            return
        found = (np.sqrt(np.square(errors).sum(0)) if len(values) > 1 else abs(errors[0])).astype(
            self.storage
        )
        with self.busy:
            if self.finite is not None:
                self.finite |= np.isfinite(values).any(0)
            # The root of the sum of squares: the squares themselves would need twice as many bytes.
            self.noise = (
                np.asarray(found) if self.noise is None else np.hypot(self.noise, found, out=self.noise)
            )

    def shadow(self, values: Array) -> None:
        """Take up a rounded run."""
        errors = np.square(values - self.value)
        found = errors.mean(-1, keepdims=True) if errors.ndim else errors
        with self.busy:
            self.bias = found if self.bias is None else self.bias + found

    def result(self, shadows: int, jump: Array | float = 0.0, count: int = SAMPLES) -> Array:
        """Return sigma, in the shape of the value.

        Args:
            shadows: how many rounded runs were taken up.
            jump: by how much the tensor may change at once besides.
            count: how many samples were taken up.
        """
        value = self.value
        # Of the roots: squares of the smallest numbers would be lost.
        noise = 0.0 if self.noise is None else self.noise / np.sqrt(count)
        bias = 0.0 if self.bias is None else np.sqrt(self.bias / shadows)
        sigma = np.maximum(np.hypot(np.hypot(noise, bias), jump), least_sigma(value, self.dtype))
        sigma = np.where(abs(value) > precision(self.dtype).largest, np.nan, sigma)
        if self.finite is not None:
            sigma = np.where(self.finite, sigma, np.inf)
        return sigma.astype(self.storage)


def _estimate(case: JudgedProblem, forced: Forced | None, brief: bool = False) -> Expectation:
    """Return values and sigmas: from the inputs, or of each step from forced taps."""
    # Gradients by taps are judged locally alone, and only where they are delivered.
    judged = {f"gradients.taps.{name}" for name in forced.gradients} if forced else set()
    values: dict[str, Array] = {}
    shapes: dict[str, tuple[int, ...]] = {}

    def store(name: str, array: Array) -> None:
        shapes[name] = array.shape
        if name in judged or not is_tap_gradient(name):
            values[name] = array

    elements = case.observe(exact(case.dtype), store, forced)
    alone = elements > SIDE_BY_SIDE // 2  # each sample by itself
    found = {name: Sigma(value, case.dtype) for name, value in values.items()}
    rounded, count = list(shadows(case.dtype, brief)), SEVERAL if brief else SAMPLES

    def take_up(arithmetic: Arithmetic) -> None:
        def reduce(name: str, array: Array) -> None:
            if name in found:
                (found[name].sample if isinstance(arithmetic, MonteCarlo) else found[name].shadow)(array)

        case.observe(arithmetic, reduce, forced)
        if alone:
            heaps.give_back()
        steps.step()

    runs = [*samples(case.dtype, elements, count), *rounded]
    steps = Steps(
        "deriving tolerances end to end"
        if forced is None
        else f"deriving tolerances of each step{', a first look' if brief else ''}",
        len(runs),
    )
    with np.errstate(all="ignore"):
        if alone:
            with ThreadPoolExecutor(max_workers=TOGETHER) as pool:
                list(pool.map(take_up, runs))
        else:
            for run in runs:
                take_up(run)
        jumps = _jumps(case) if forced is None else {}
        sigmas = {name: found.pop(name).result(len(rounded), jumps.get(name, 0.0), count) for name in values}
    return _expectation(case, values, sigmas, shapes)


def _jumps(case: JudgedProblem) -> dict[str, Array]:
    """Return how far each gradient moves when every ReLU input within rounding of zero changes sides."""
    if not case.gradients or not case.config.rectifies:
        return {}
    corner = Z * precision(case.dtype).unit_roundoff
    jumps: dict[str, Array] = {}

    def above(name: str, array: Array) -> None:
        if is_gradient(name):
            jumps[name] = array

    def below(name: str, array: Array) -> None:
        if is_gradient(name):
            jumps[name] = abs(jumps[name] - array)

    case.observe(Arithmetic(corner=corner), above)
    case.observe(Arithmetic(corner=-corner), below)
    return jumps


_estimates = Cache()


def _kept(key: str, make: Callable[[], Expectation]) -> Expectation:
    found: Expectation = _estimates.get(key, make)
    return found
