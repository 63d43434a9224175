"""Sigma: the deviation of correct results from the truth, per element (decision 10).

Sigma² is the sum of two estimates. **Monte Carlo arithmetic** (:mod:`concord.spec.montecarlo`) gives the mean
square error of :data:`SAMPLES` perturbed samples. **Low-precision runs** round after each operation, in
various admissible orders; their squared error is averaged over the last axis.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, ClassVar, TypeVar

import numpy as np

from concord.backends import heaps
from concord.conformance.progress import Countdown
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Arrays
from concord.spec.montecarlo import MonteCarlo
from concord.spec.precision import precision

T = TypeVar("T", bound=Any)

Observer = Callable[[str, Array], None]

# A function that returns the number of computed elements, if known, which determines the grouping of samples.
Compute = Callable[[Arithmetic, Observer], int | None]

# Largest error of an element, in sigma. With about 300 random encoders per framework, correct float32 runs
# reached 9.3 in a step and 15.1 in a gradient. One value suffices for every tensor and precision (decision
# 10).
Z = 16.0

# Largest root mean square error of a large tensor, in root mean square sigma (rms_limit): 3.0 was observed in
# float32.
R = 4.0

# Fewer samples are unreliable: with 4, 8, 16 and 32, the largest z of a correct run was 12.7, 10.4, 8.2 and
# 7.1.
SAMPLES = 16

# In 19 of 20 cases, sixteen uniform samples overstate the number of independent errors by at most this
# factor.
CONFIDENCE = 5.0

# Number of samples for a first look at a large case. The largest error of BERT base on 512 tokens was 0.66
# tolerances with four samples, and 0.41 with eight. Among millions of elements, some have four small samples.
SEVERAL = 8

# Number of samples for a first look at a training step, with one low-precision run. Only a full estimate may
# reject a run.
FEW = 4

# Maximum number of values in all simultaneous samples, to limit memory; a single sample may have more.
SIDE_BY_SIDE = 1 << 21

# Simultaneous samples of a large case: each takes the memory of a whole run, and one core.
TOGETHER = 2


def rms_limit(size: float) -> float:
    """Tolerance of an RMS error: one of ``size`` independent elements may err by :data:`Z`, others by
    :data:`R`.
    """
    return float(np.sqrt(R**2 + (Z**2 - R**2) / max(size, 1)))


def estimate(
    compute: Compute,
    dtype: str | Mapping[str, str],
    values: Arrays | None = None,
    *,
    arithmetics: Iterable[Any] | None = None,
    count: int = SAMPLES,
    corners: bool = False,
    doing: str = "deriving tolerances",
    **about: Any,
) -> tuple[Arrays, Arrays]:
    """Exact values of a computation and their sigmas, by name.

    A sigma is NaN if the value is out of range, and infinite if it is otherwise not finite.

    Args:
        dtype: precision or mode whose rounding is allowed, or a mapping by tensor.
        values: the truth, if known.
        arithmetics: arithmetics whose errors determine sigma; by default :func:`perturbed`.
        count: number of samples; fewer than :data:`SAMPLES` are a first look.
        corners: whether derivatives of ReLUs may jump.
        about: further arguments of :class:`Estimate`.
    """
    accumulated = Estimate(compute, dtype, values, **about)
    runs = (
        perturbed(accumulated.usual, accumulated.elements, count, corners)
        if arithmetics is None
        else arithmetics
    )
    accumulated.add_runs(runs, doing)
    return accumulated.values, accumulated.sigmas(last=True)


class Estimate:
    """Running sums of squared errors; see also :func:`estimate`.

    Args:
        truth: arithmetic of the truth; by default :func:`exact`.
        elements: elements per sample, if ``compute`` does not return them.
        together: number of simultaneous runs of a large case.
    """

    def __init__(
        self,
        compute: Compute,
        dtype: str | Mapping[str, str],
        values: Arrays | None = None,
        *,
        truth: Any = None,
        elements: int = 1,
        together: int = 1,
    ) -> None:
        self.usual = dtype if isinstance(dtype, str) else "float32"
        if values is None:
            exact_values: Arrays = {}
            elements = compute(truth or exact(self.usual), exact_values.__setitem__) or elements
            values = exact_values
        dtypes = dict.fromkeys(values, dtype) if isinstance(dtype, str) else dtype
        self.compute, self.elements, self.together = compute, elements, together
        self.values = {name: on_host(value) for name, value in values.items()}
        self.by_name = {name: Sigma(value, dtypes[name]) for name, value in values.items()}

    def add_runs(self, arithmetics: Iterable[Any], doing: str = "deriving tolerances") -> None:
        """Accumulate the squared error of a run in each arithmetic."""
        runs = list(arithmetics)
        steps, large = Countdown(doing, len(runs)), self.elements > SIDE_BY_SIDE // 2

        def run(arithmetic: Any) -> None:
            def reduce(name: str, array: Array) -> None:
                if name in self.by_name:
                    self.by_name[name].take(arithmetic, array)

            with np.errstate(all="ignore"):
                self.compute(arithmetic, reduce)
            if large:
                heaps.give_back()
            steps.step()

        # Reduce tensors as they arrive: no sample is kept, so memory use does not depend on the number of
        # samples.
        if large and self.together > 1:
            with ThreadPoolExecutor(max_workers=self.together) as pool:
                list(pool.map(run, runs))
        else:
            for perturbation in runs:
                run(perturbation)

    def sigmas(self, last: bool = False) -> Arrays:
        """Current sigmas; ``last`` frees the sums; otherwise sigmas are those for few samples."""
        sigma_of = self.by_name.pop if last else self.by_name.__getitem__
        with np.errstate(all="ignore"):
            return {name: on_host(sigma_of(name).result(few=not last)) for name in list(self.by_name)}

    def independent(self) -> dict[str, float]:
        """Numbers of independent errors in the samples."""
        return {name: sigma.independent for name, sigma in self.by_name.items()}


def exact(dtype: str) -> Arithmetic:
    """Arithmetic of the truth."""
    # The truth must be more precise than float64: the widest type of the platform (decision 16).
    return Arithmetic("extended" if dtype == "float64" else "float64")


def perturbed(dtype: str, elements: int, count: int, corners: bool) -> Iterator[Arithmetic]:
    """Yield arithmetics for sigma: samples, low-precision runs, and both sides of corners."""
    # As many samples at a time as memory allows.
    together = int(min(max(SIDE_BY_SIDE // max(elements, 1), 1), count))
    for first in range(0, count, together):
        yield MonteCarlo(dtype, min(together, count - first), first)
    yield from low_precision(dtype, count < SAMPLES)
    if corners:
        # All ReLU inputs within rounding of zero, on either side.
        corner = Z * precision(dtype).unit_roundoff
        yield from (Arithmetic(corner=corner), Arithmetic(corner=-corner))


def low_precision(dtype: str, brief: bool = False) -> Iterator[Arithmetic]:
    """Yield arithmetics that round like correct runs; ``brief`` yields only the first."""
    # In order: equal terms added one by one err alike at each step, which samples and pairs miss. The length
    # of 37 equal rows of 15 was off by 18 units, but by only 3 in samples (decision 10).
    yield Arithmetic(dtype, strict=True)
    if not brief:
        # Other orders are random. In TF32 the last two runs truncate factors, since a kernel may truncate or
        # round.
        yield Arithmetic(dtype, shuffle=1, fused=True, strict=True, way="logarithm")
        yield Arithmetic(dtype, shuffle=2, strict=True, cut=True)
        yield Arithmetic(dtype, shuffle=3, fused=True, strict=True, cut=True, way="output")


class Sigma:
    """Sigma of one tensor, accumulated over runs. Thread-safe.

    Args:
        value: the truth; like later values, an array or tensor on any device.
    """

    def __init__(self, value: Array, dtype: str) -> None:
        self.value, self.dtype = value, dtype
        self.namespace: Any = namespace_of(value)
        self.samples = self.rounded = 0
        self.squares: list[float] = []  # mean square error of each sample
        self.noise: Array | None = None
        self.bias: Array | None = None
        self.turned: Array | None = None
        self.jump: Array | None = None
        finite = self.namespace.isfinite(value)
        self.finite = None if finite.all() else finite
        # Takes half the bytes of float64, and is wide enough for errors in float32 and narrower precisions.
        self.storage = self.namespace.float64 if dtype == "float64" else self.namespace.float32
        self.busy = threading.Lock()

    def take(self, arithmetic: Arithmetic, values: Array) -> None:
        """Add the tensor of a run: (n, …) for n samples, or (1, …) without noise."""
        if arithmetic.samples:
            self._sample(values, arithmetic.samples)
        elif arithmetic.corner:
            # Errors need fewer digits than values, so they take half the memory.
            error = self.namespace.asarray(values - self.value, dtype=self.storage)
            with self.busy:
                if self.turned is None:
                    self.turned = error
                else:
                    self.turned, self.jump = None, abs(self.turned - error)
        else:
            xp = self.namespace
            errors = xp.square(values - self.value)
            # A single run has random errors in each element, so its squared error is averaged over the row.
            rows = errors.ndim and all(errors.shape)
            mean_square = xp.mean(errors, axis=-1, keepdims=True) if rows else errors
            if rows and not xp.isfinite(mean_square).all():
                # An overflow says nothing of the other elements of its row.
                finite = xp.isfinite(errors)
                total = xp.sum(xp.where(finite, errors, 0.0), axis=-1, keepdims=True)
                mean_square = xp.where(finite, total / xp.sum(finite, axis=-1, keepdims=True), errors)
            with self.busy:
                self.rounded += 1
                self.bias = mean_square if self.bias is None else self.bias + mean_square

    def _sample(self, values: Array, count: int) -> None:
        errors, xp = values - self.value, self.namespace
        squares, root = xp.square(errors), None
        means = (
            xp.mean(xp.reshape(squares, (len(values), -1)), axis=1).tolist()
            if math.prod(errors.shape)
            else [0.0]
        )
        if len(values) > 1:
            root = xp.sqrt(xp.sum(squares, axis=0))
        elif any(means):
            root = abs(errors[0])
        else:
            means *= count
        with self.busy:
            self.samples += count
            self.squares += means
            if root is None:
                return
            if self.finite is not None:
                self.finite |= xp.any(xp.isfinite(values), axis=0)
            # The root of the sum of squares, since the squares themselves would need twice as many bytes.
            root = xp.asarray(root, dtype=self.storage)
            self.noise = root if self.noise is None else xp.hypot(self.noise, root)

    @property
    def independent(self) -> float:
        """Lower bound on the number of independent errors; infinite without errors."""
        # With N errors, a sample's mean square has a variance of 2 / N of its square. A million elements that
        # share one mean's error count as one (decision 37).
        if not any(self.squares):
            return np.inf
        mean, variance = np.mean(self.squares), np.var(self.squares, ddof=1)
        with np.errstate(all="ignore"):
            return float(np.nan_to_num(2 * mean**2 / (CONFIDENCE * variance), nan=np.inf))

    def result(self, few: bool = False) -> Array:
        """Sigma, in the shape of the value.

        Args:
            few: raise each sigma towards its row's mean square, at most twofold. Six samples give some of a
                million elements only a tenth of their sigma.
        """
        value, xp = self.value, self.namespace
        deviations = [least_sigma(value, self.dtype)]
        # Roots, since squares of the smallest values would underflow.
        if self.noise is not None:
            noise = self.noise / math.sqrt(self.samples)
            if few and noise.ndim:
                row = xp.sqrt(xp.mean(xp.square(noise), axis=-1, keepdims=True))
                noise = xp.minimum(2 * noise, xp.hypot(noise, row) / math.sqrt(2))
            deviations.append(noise)
        if self.bias is not None:
            deviations.append(xp.sqrt(self.bias / self.rounded))
        if self.jump is not None:
            deviations.append(self.jump)
        least, *several = deviations
        sigma = reduce(xp.hypot, several) if several else least
        sigma = xp.where(sigma < least, least, sigma)
        sigma = xp.where(abs(value) > precision(self.dtype).largest, math.nan, sigma)
        if self.finite is not None:
            sigma = xp.where(self.finite, sigma, math.inf)
        with np.errstate(over="ignore"):  # a sigma beyond the storage is infinite
            final: Array = xp.asarray(sigma, dtype=self.storage)
        return final


def least_sigma(value: Array, dtype: str) -> Array:
    """Rounding of the result itself."""
    target = precision(dtype)
    # A uniform error of u has the deviation u / sqrt 3. XLA flushes values below the smallest normal one to
    # zero.
    rounding, smallest = target.unit_roundoff / math.sqrt(3) * abs(value), target.smallest_normal
    least: Array = namespace_of(value).where(rounding < smallest, smallest, rounding)
    return least


def is_half(dtype: str) -> bool:
    """Whether sums are accumulated in a wider precision."""
    target = precision(dtype)
    return target.unit_roundoff > target.accumulation


def namespace_of(array: Any) -> Any:
    """An array's library: NumPy, or PyTorch, which accepts NumPy's names."""
    return np if isinstance(array, (np.ndarray, np.generic)) else sys.modules["torch"]


def on_host(array: Any) -> Array:
    """Convert an array on any device to NumPy."""
    return np.asarray(array if namespace_of(array) is np else array.cpu())


class Cache:
    """A cache of recent results, limited in bytes."""

    LIMIT: ClassVar[int] = 48 << 20

    # Larger results are not cached, since they would evict those of all other cases.
    LARGEST: ClassVar[int] = 16 << 20

    def __init__(self) -> None:
        self.limit, self.largest = self.LIMIT, self.LARGEST
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._making: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def keeping(self, limit: int) -> Iterator[None]:
        """Keep ``limit`` bytes of results of any size within a block."""
        limits = self.limit, self.largest
        self.limit = self.largest = limit
        try:
            yield
        finally:
            self.limit, self.largest = limits
            with self._guard:
                self._shrink()

    def get(self, key: str, make: Callable[[], T]) -> T:
        """Return a cached result; threads with the same request wait for the first."""
        with self._guard:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            with self._guard:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    cached: T = self._kept[key]
                    return cached
            result = make()
            with self._guard:
                if result.nbytes <= self.largest:
                    self._kept[key] = result
                    self._shrink()
            return result

    def _shrink(self) -> None:
        while sum(result.nbytes for result in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
