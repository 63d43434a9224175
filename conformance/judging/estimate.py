"""How far from the truth a correct computation may lie.

Derived for every element of every tensor, never set by hand.

:func:`estimate` takes whatever computes tensors under an arithmetic. It computes the truth, and beside it two
estimates of what correct arithmetic of a precision does to it: **Monte Carlo arithmetic**
(:mod:`concord.spec.montecarlo`), the mean square error of :data:`SAMPLES` perturbed samples, element by
element; and **low-precision runs**, rounded after each operation, in admissible ways and orders, whose
squared error is averaged over the last axis. Their sum is sigma². A tensor is judged by ``z = |error| /
sigma``, at most :data:`Z` in every element, and by ``RMS(error) / RMS(sigma)``, at most :data:`R` but for one
element (:func:`rms_limit`).

Samples are computed a few at a time and reduced tensor by tensor as they come: memory does not grow with
their number. The truth for float64 is computed in the widest type that the platform has. Decision 10 gives
the reasons; the record of the campaign that confirmed the constants is in ``conformance/results/``.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import numpy as np

from concord.backends import heaps
from concord.conformance.progress import Countdown
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.montecarlo import MonteCarlo
from concord.spec.precision import precision

T = TypeVar("T", bound=Any)

Observer = Callable[[str, Array], None]
"""Takes each tensor by name as soon as it is computed."""

Compute = Callable[[Arithmetic, Observer], int | None]
"""Computes tensors under an arithmetic.

May return how many elements it computed, by which samples are grouped.
"""

Z = 16.0
"""The largest error of an element, in sigma."""

R = 4.0
"""The largest root mean square error of a large tensor, in root mean square sigma; see :func:`rms_limit`."""

SAMPLES = 16
"""Samples of Monte Carlo arithmetic."""

CONFIDENCE = 5.0
"""How many times too many independent errors 16 samples of uniform ones say at most, in 19 of 20 cases."""

SEVERAL = 8
"""Samples of a first look at a large case: of its millions of elements some have four small samples."""

FEW = 4
"""Samples of a first look at a step of training. A first look takes one low-precision run.

Only a full one decides against a run.
"""

SIDE_BY_SIDE = 1 << 21
"""Numbers that samples which are computed side by side may hold together; a single sample may hold more."""

TOGETHER = 2
"""Samples of a large case that are computed at the same time.

Each takes the memory of a whole run, and NumPy one core.
"""


def rms_limit(size: float) -> float:
    """Return the largest root mean square error of a tensor.

    One of its elements may err :data:`Z`, the rest :data:`R`.

    Args:
        size: how many elements it has, or says something of
            (:func:`concord.conformance.judging.scoring.independent_elements`).
    """
    return float(np.sqrt(R**2 + (Z**2 - R**2) / max(size, 1)))


def estimate(
    compute: Compute,
    dtype: str | Mapping[str, str],
    values: Mapping[str, Array] | None = None,
    *,
    truth: Any = None,
    arithmetics: Iterable[Any] | None = None,
    elements: int = 1,
    count: int = SAMPLES,
    corners: bool = False,
    together: int = 1,
    doing: str = "deriving tolerances",
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the tensors that a computation yields in exact arithmetic, and their sigmas.

    Sigma is the standard deviation of correct results.

    Sigma has the shape of its tensor. NaN: the value is out of the precision's range. Infinite: the value is
    not finite, and no rounding makes it so.

    Args:
        compute: the computation. Only tensors that the truth has are taken up.
        dtype: the precision or mode whose rounding is allowed for; of each tensor its own, where they differ.
        values: the truth, where it is at hand; by default it is computed.
        truth: what it is computed in; by default :func:`exact`.
        arithmetics: those whose errors are taken up; by default :func:`perturbed`.
        elements: that one sample holds, where ``compute`` does not return it.
        count: of samples; fewer than :data:`SAMPLES` are a first look.
        corners: whether derivatives of ReLUs may jump.
        together: of large samples, how many are computed at the same time.
        doing: says what is being done, to who waits for it.
    """
    found = Estimate(compute, dtype, values, truth=truth, elements=elements, together=together)
    runs = perturbed(found.usual, found.elements, count, corners) if arithmetics is None else arithmetics
    found.add_runs(runs, doing)
    return found.values, found.sigmas(last=True)


class Estimate:
    """The tensors of a computation, and their sigmas, which each run that is taken up makes surer.

    Args:
        compute, dtype, values, truth, elements, together: as :func:`estimate` takes them.
    """

    def __init__(
        self,
        compute: Compute,
        dtype: str | Mapping[str, str],
        values: Mapping[str, Array] | None = None,
        *,
        truth: Any = None,
        elements: int = 1,
        together: int = 1,
    ) -> None:
        self.usual = dtype if isinstance(dtype, str) else "float32"
        if values is None:
            made: dict[str, Array] = {}
            elements = compute(truth or exact(self.usual), made.__setitem__) or elements
            values = made
        of = dict.fromkeys(values, dtype) if isinstance(dtype, str) else dtype
        self.compute, self.elements, self.together = compute, elements, together
        self.values = dict(values)
        self.by_name = {name: Sigma(value, of[name]) for name, value in values.items()}

    def add_runs(self, arithmetics: Iterable[Any], doing: str = "deriving tolerances") -> None:
        """Compute in each arithmetic, and take up how far that is from the truth."""
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

        if large and self.together > 1:
            with ThreadPoolExecutor(max_workers=self.together) as pool:
                list(pool.map(run, runs))
        else:
            for each in runs:
                run(each)

    def sigmas(self, last: bool = False) -> dict[str, Array]:
        """Return the sigmas by what was taken up so far; the last time, let go of that."""
        of = self.by_name.pop if last else self.by_name.__getitem__
        with np.errstate(all="ignore"):
            return {name: of(name).result() for name in list(self.by_name)}

    def independent(self) -> dict[str, float]:
        """Return how many independent errors the samples of each tensor show (:meth:`Sigma.independent`)."""
        return {name: sigma.independent for name, sigma in self.by_name.items()}


def exact(dtype: str) -> Arithmetic:
    """Return the arithmetic in which the truth for a precision is computed."""
    return Arithmetic("extended" if dtype == "float64" else "float64")


def perturbed(
    dtype: str, elements: int = 1, count: int = SAMPLES, corners: bool = False
) -> Iterator[Arithmetic]:
    """Yield the arithmetics whose errors make sigma.

    Samples, low-precision runs, and both sides of every corner.

    Args:
        elements, count, corners: as :func:`estimate` takes them.
    """
    yield from samples(dtype, elements, count)
    yield from low_precision(dtype, count < SAMPLES)
    if corners:
        # Every ReLU input within rounding of zero, on the one side and on the other.
        corner = Z * precision(dtype).unit_roundoff
        yield from (Arithmetic(corner=corner), Arithmetic(corner=-corner))


def low_precision(dtype: str, brief: bool = False) -> Iterator[Arithmetic]:
    """Yield arithmetics that round as correct runs of a precision may.

    In admissible ways and orders, and fused.

    Sums run as they stand in the first, in orders drawn at random in the others. In TF32 the last two cut
    factors off.

    Args:
        brief: whether a first look is enough: the first alone.
    """
    yield Arithmetic(dtype, strict=True)
    if not brief:
        yield Arithmetic(dtype, shuffle=1, fused=True, strict=True, way="logarithm")
        yield Arithmetic(dtype, shuffle=2, strict=True, cut=True)
        yield Arithmetic(dtype, shuffle=3, fused=True, strict=True, cut=True, way="output")


def samples(dtype: str, elements: int, count: int = SAMPLES) -> Iterator[MonteCarlo]:
    """Yield Monte Carlo arithmetics of ``count`` samples, as many side by side as may be.

    Args:
        elements: that a sample holds on the way forward.
    """
    together = int(min(max(SIDE_BY_SIDE // max(elements, 1), 1), count))
    for first in range(0, count, together):
        yield MonteCarlo(dtype, min(together, count - first), first)


class Sigma:
    """Sigma of one tensor, from runs that are taken up one after the other, by several threads.

    Args:
        value: the truth.
        dtype: the precision.
    """

    def __init__(self, value: Array, dtype: str) -> None:
        self.value, self.dtype = value, dtype
        self.samples = self.rounded = 0
        self.squares: list[float] = []  # the mean square error of each sample
        self.noise: Array | None = None
        self.bias: Array | None = None
        self.turned: Array | None = None
        self.jump: Array | float = 0.0
        known = np.isfinite(value)
        self.finite = None if known.all() else known
        self.storage = np.float64 if dtype == "float64" else np.float32
        self.busy = threading.Lock()

    def take(self, arithmetic: Arithmetic, values: Array) -> None:
        """Take up what an arithmetic makes of the tensor.

        Of samples (n, …), or (1, …) where noise reached none.
        """
        if arithmetic.samples:
            self._sample(values, arithmetic.samples)
        elif arithmetic.corner:
            with self.busy:
                if self.turned is None:
                    self.turned = values
                else:
                    self.jump = abs(self.turned - values)
        else:
            errors = np.square(values - self.value)
            found = errors.mean(-1, keepdims=True) if errors.ndim else errors
            with self.busy:
                self.rounded += 1
                self.bias = found if self.bias is None else self.bias + found

    def _sample(self, values: Array, count: int) -> None:
        errors = values - self.value
        if len(values) > 1 or errors.any():
            squares = np.square(errors)
            found = np.sqrt(squares.sum(0)) if len(values) > 1 else abs(errors[0])
            found = found.astype(self.storage)
            means = squares.reshape(len(values), -1).mean(1).tolist()
        else:
            found, means = None, [0.0] * count
        with self.busy:
            self.samples += count
            self.squares += means
            if found is None:
                return
            if self.finite is not None:
                self.finite |= np.isfinite(values).any(0)
            # The root of the sum of squares: the squares themselves would need twice as many bytes.
            self.noise = (
                np.asarray(found) if self.noise is None else np.hypot(self.noise, found, out=self.noise)
            )

    @property
    def independent(self) -> float:
        """How many independent errors the samples show at least; infinite where they show none.

        Of N errors the mean square varies from sample to sample by 2 / N of its own square. A million
        elements that share the error of one mean have one.
        """
        if not any(self.squares):
            return np.inf
        mean, variance = np.mean(self.squares), np.var(self.squares, ddof=1)
        with np.errstate(all="ignore"):
            return float(np.nan_to_num(2 * mean**2 / (CONFIDENCE * variance), nan=np.inf))

    def result(self) -> Array:
        """Return sigma, in the shape of the value."""
        value = self.value
        # Of the roots: squares of the smallest numbers would be lost.
        noise = 0.0 if self.noise is None else self.noise / np.sqrt(self.samples)
        bias = 0.0 if self.bias is None else np.sqrt(self.bias / self.rounded)
        sigma = np.maximum(np.hypot(np.hypot(noise, bias), self.jump), least_sigma(value, self.dtype))
        sigma = np.where(abs(value) > precision(self.dtype).largest, np.nan, sigma)
        if self.finite is not None:
            sigma = np.where(self.finite, sigma, np.inf)
        return sigma.astype(self.storage)


def least_sigma(value: Array, dtype: str) -> Array:
    """Return what sigma is at least: the result itself has to be rounded."""
    target = precision(dtype)
    least: Array = np.maximum(target.unit_roundoff / np.sqrt(3) * abs(value), target.smallest_normal)
    return least


class Cache:
    """What was derived before, by key: the results used last, up to a number of bytes.

    Each has ``nbytes``.
    """

    LIMIT: ClassVar[int] = 48 << 20
    """Bytes that are kept in all."""

    LARGEST: ClassVar[int] = 16 << 20
    """Bytes of one result that is kept; what is larger is made anew each time."""

    def __init__(self) -> None:
        self.limit, self.largest = self.LIMIT, self.LARGEST
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._making: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def keeping(self, limit: int) -> Iterator[None]:
        """Keep so many bytes for a while, in results of any size."""
        before = self.limit, self.largest
        self.limit = self.largest = limit
        try:
            yield
        finally:
            self.limit, self.largest = before
            with self._guard:
                self._shrink()

    def get(self, key: str, make: Callable[[], T]) -> T:
        """Return what was made for a key before, or make it.

        Threads that want the same wait for the first.
        """
        with self._guard:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            with self._guard:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    found: T = self._kept[key]
                    return found
            made = make()
            with self._guard:
                if made.nbytes <= self.largest:
                    self._kept[key] = made
                    self._shrink()
            return made

    def _shrink(self) -> None:
        while sum(kept.nbytes for kept in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
