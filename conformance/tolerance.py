"""How far from the truth a correct run may lie: derived for every element of every tensor, never set by hand.

For each tensor the reference is computed in float64, and beside it two estimates of what correct arithmetic of the
run's precision does to it: **Monte Carlo arithmetic** (:mod:`spec.montecarlo`), the mean square error of
:data:`SAMPLES` perturbed samples, element by element; and a **shadow**, one run of the reference rounded after each
operation, whose squared error is averaged over the last axis. Their sum is sigma². A tensor is judged by
``z = |error| / sigma``, at most :data:`Z` in every element, and by ``RMS(error) / RMS(sigma)``, at most :data:`R` but for one
element (:func:`rms_limit`).

Each tensor is judged in two ways. *End to end*: against the reference from the inputs. *Locally*: against the
reference that recomputes each tap from the run's own preceding taps, so that only the error committed at that step
counts; gradients then flow back through the run's own forward values. Decision 10 gives the reasons, the record of the
campaign that confirmed the constants is in ``conformance/results/``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import Arithmetic
from spec.batch import Batch
from spec.cases.files import expected
from spec.config import EncoderConfig
from spec.deviations import NONE, Deviations
from spec.montecarlo import MonteCarlo
from spec.parameters import Weights
from spec.precision import SHORTENED_BITS, precision
from spec.reference import compute
from spec.tensors import clause_of

Array = NDArray[np.floating]

Z = 16.0
"""The largest error of an element, in sigma."""

R = 4.0
"""The largest root mean square error of a large tensor, in root mean square sigma; see :func:`rms_limit`."""

SAMPLES = 16
"""Samples of Monte Carlo arithmetic."""

SHADOWS = 4
"""Rounded runs: the first with sums as they stand, the others in orders drawn at random, half of them as fused kernels round.
In TF32 the last two cut factors of products off."""

UNDECIDED = 0.1
"""Share of a tap's own size that sigma may have; beyond it, and in every later tap, end to end says nothing."""


@dataclass(frozen=True)
class Case:
    """What a run is asked to compute, and by which rules it is judged.

    Attributes:
        dtype: the precision, or mode of :data:`spec.precision.MODES`, whose rounding is allowed for.
        deviations: that the backend declares.
    """

    config: EncoderConfig
    weights: Weights
    batch: Batch
    part: str = "model"
    dtype: str = "float32"
    deviations: Deviations = field(default_factory=lambda: NONE)

    @functools.cached_property
    def key(self) -> str:
        """A digest of all of its content."""
        plain = [self.config.as_dict(), self.part, self.dtype, sorted(self.deviations.items())]
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
        for name, array in sorted({**self.weights, **self.batch.arrays()}.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Expectation:
    """What a run is judged by, in one of the two ways.

    Attributes:
        dtype: the precision or mode.
        values: tensor name to expected array; taps in the order of computation, then gradients in the order in which
            they are computed, last layer first.
        sigmas: for each, the standard deviation of correct results, in its shape. NaN: undetermined. Infinite: the
            value is not finite, and no rounding makes it so.
        clauses: for each, the clause that defines it.
    """

    dtype: str
    values: dict[str, Array]
    sigmas: dict[str, Array]
    clauses: dict[str, str]


def rms_limit(size: int) -> float:
    """Return the largest root mean square error of a tensor: one of its elements may err :data:`Z`, the rest :data:`R`."""
    return float(np.sqrt(R**2 + (Z**2 - R**2) / max(size, 1)))


def expect(
    config: EncoderConfig, weights: Weights, batch: Batch, part: str = "model", dtype: str = "float32", deviations: Deviations = NONE
) -> Expectation:
    """Return what a correct run yields from the inputs, and how far it may lie from it: the judgement end to end."""
    return end_to_end(Case(config, weights, batch, part, dtype, deviations))


def end_to_end(case: Case) -> Expectation:
    """Return what a correct run yields from the inputs."""
    return _cached(f"end to end {case.key}", lambda: _estimate(case, None))


def plain(case: Case) -> Expectation:
    """Return what the oracle yields from the inputs, without saying how far a run may lie from it."""

    def make() -> Expectation:
        values = _in_order(_tensors(case, Arithmetic()))
        return Expectation(case.dtype, values, {}, {name: clause_of(case.config, name, case.part) for name in values})

    return _cached(f"plain {case.key}", make)


def local(case: Case, taps: Mapping[str, Array]) -> Expectation:
    """Return what each step of a run should have made of the run's own preceding taps.

    How far a step may err is taken from the same step of the reference, which is at hand for all runs of a case. In the
    half precisions, where a correct run may be far from the reference, and for a run that comes near its allowance by
    this, it has to be derived from the run's own taps: :func:`local_exactly`.

    Args:
        taps: of the run; those that are missing are computed from the ones before.
    """
    usual = _cached(f"local {sorted(taps)} {case.key}", lambda: _estimate(case, _truth_taps(case, taps)))
    values = _in_order(_tensors(case, Arithmetic(), taps))
    sigmas = {name: np.maximum(usual.sigmas[name], _least(value, case.dtype)) for name, value in values.items()}
    return Expectation(case.dtype, values, sigmas, usual.clauses)


def local_exactly(case: Case, taps: Mapping[str, Array]) -> Expectation:
    """Return the same as :func:`local`, with allowances that are derived from the run's own taps too."""
    return _estimate(case, taps)


def _truth_taps(case: Case, taps: Mapping[str, Array]) -> dict[str, Array]:
    """Return the reference's own values of the taps that a run delivered, as its precision holds them."""
    truth, target = plain(case).values, precision(case.dtype)
    return {name: target.round(truth[name]).astype(np.float64) for name in taps}


def _tensors(case: Case, arithmetic: Arithmetic, forced: Mapping[str, Array] | None = None) -> dict[str, Array]:
    truth = compute(case.config, case.weights, case.batch, arithmetic, True, case.part, case.dtype, forced, case.deviations)
    return expected(truth)


def _estimate(case: Case, forced: Mapping[str, Array] | None) -> Expectation:
    """Return values and sigmas: from the inputs, or of each step from forced taps."""
    # The errors of float64 are as small as the oracle's own: they are measured in fewer bits, and scaled.
    measured, shrink = ("shortened", np.sqrt(2.0) * 2.0 ** (SHORTENED_BITS - 53)) if case.dtype == "float64" else (case.dtype, 1.0)
    truth = _tensors(case, Arithmetic(), forced)
    samples = _tensors(case, MonteCarlo(measured, SAMPLES), forced)
    shadows = [
        _tensors(case, Arithmetic(measured, shuffle=seed or None, fused=seed % 2 == 1, strict=True, cut=seed >= 2), forced)
        for seed in range(SHADOWS)
    ]
    jumps = _jumps(case) if forced is None else {}
    values, sigmas, target = _in_order(truth), {}, precision(case.dtype)
    with np.errstate(all="ignore"):  # what is not finite is undetermined, and says so
        for name, value in values.items():
            noise = root_mean_square(samples[name][1:] - value, 0) if len(samples[name]) > 1 else np.zeros_like(value)
            errors = np.stack([shadow[name] - value for shadow in shadows])
            sigma = shrink * np.hypot(noise, root_mean_square(errors, (0, -1) if value.ndim else 0))
            sigma = np.maximum(np.hypot(sigma, jumps.get(name, 0.0)), _least(value, case.dtype))
            sigma = np.where(abs(value) > target.largest, np.nan, sigma)
            sigmas[name] = np.where(np.isfinite(samples[name]).any(0) | np.isfinite(value), sigma, np.inf)
    return Expectation(case.dtype, values, sigmas, {name: clause_of(case.config, name, case.part) for name in values})


def _least(value: Array, dtype: str) -> Array:
    """Return what sigma is at least: the result itself has to be rounded."""
    target = precision(dtype)
    least: Array = np.maximum(target.unit_roundoff / np.sqrt(3) * abs(value), target.smallest_normal)
    return least


def root_mean_square(values: Array, axes: int | tuple[int, ...]) -> Array:
    """Return the root mean square over axes, scaled so that squares neither overflow nor vanish; a last axis stays, with size 1."""
    largest = np.max(abs(values), axis=axes, keepdims=True, initial=0.0)
    scaled = values / np.where(largest > 0, largest, 1.0)
    root: Array = largest * np.sqrt(np.mean(np.square(scaled), axis=axes, keepdims=True)) if values.size else largest
    return root.squeeze(0)


def _jumps(case: Case) -> dict[str, Array]:
    """Return how far each gradient moves when every ReLU input within rounding of zero changes sides."""
    if "relu" not in (case.config.activation, case.config.qkv_activation):
        return {}
    corner = Z * precision(case.dtype).unit_roundoff
    above, below = (_tensors(case, Arithmetic(corner=side)) for side in (corner, -corner))
    return {name: abs(above[name] - below[name]) for name in above if name.startswith("gradients.")}


def _in_order(tensors: Mapping[str, Array]) -> dict[str, Array]:
    taps = [(name, array) for name, array in tensors.items() if not name.startswith("gradients.")]
    gradients = [(name, array) for name, array in tensors.items() if name.startswith("gradients.")]
    return dict(taps + gradients[::-1])


KEPT = 512
"""Estimates that are kept in memory: a campaign's backends come to the same case one after the other."""

_kept: OrderedDict[str, Expectation] = OrderedDict()
_making: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def _cached(key: str, make: Callable[[], Expectation]) -> Expectation:
    """Return what was made for a key before, or make it; threads that want the same wait for the first."""
    with _guard:
        lock = _making.setdefault(key, threading.Lock())
    with lock:
        with _guard:
            if key in _kept:
                _kept.move_to_end(key)
                return _kept[key]
        made = make()
        with _guard:
            _kept[key] = made
            while len(_kept) > KEPT:
                _making.pop(_kept.popitem(last=False)[0], None)
        return made
