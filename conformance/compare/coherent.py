"""Errors that a row or a channel shares in a half precision: no element shows them, but the mean of all does.

A run's errors are summed over the elements of a group: as they are, which shows another mean, and along the
right values, which shows another scale. The same sums of the reference's runs say how large they may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from concord.conformance.judging.estimate import Sigma, namespace_of, on_host
from concord.conformance.judging.judge import NEAR
from concord.conformance.judging.scoring import judge_tensor
from concord.conformance.judging.verdict import NO_ELEMENT, Judgement
from concord.spec.arrays import Array
from concord.spec.precision import precision

# Elements of a group; the mean of fewer shows little more than they do.
LEAST = 16

MEAN, SCALE = "mean", "scale"

Axes = tuple[int, ...]

# Mean or scale, and the axes over which it is taken.
Key = tuple[str, Axes]


def groups(shape: Axes) -> Iterator[Axes]:
    """Yield the axes of a group: the last one, all but the first two, and all but each."""
    # A tensor of one axis is one group alone, whose mean is no surer than its elements are.
    axes = range(len(shape))
    kept = [axes[:-1], axes[:2], *([axis] for axis in axes)] if len(shape) > 1 else []
    over = dict.fromkeys(tuple(axis for axis in axes if axis not in some) for some in kept)
    yield from (some for some in over if some and math.prod(shape[axis] for axis in some) >= LEAST)


def _weights(key: Key, value: Array) -> Array:
    (kind, axes), xp = key, namespace_of(value)
    if kind == MEAN:
        one = xp.ones_like(value[(slice(0, 1),) * value.ndim])
        return one / math.prod(value.shape[axis] for axis in axes)
    norm = xp.sqrt(xp.sum(xp.square(value), axis=axes, keepdims=True))
    return value / xp.where(norm > 0, norm, 1.0)


def _summed(key: Key, values: Array, weights: Array) -> Array:
    return on_host(namespace_of(values).sum(values * weights, axis=key[1])).reshape(-1)


class Shared:
    """What groups of elements share in correct runs: sigma by samples, bounds by low-precision runs.

    Args:
        rounded: the sums of a run that rounds only its result.
    """

    def __init__(self, rounded: Array) -> None:
        self.sigma = Sigma(np.zeros_like(rounded), "float64")
        self.low, self.high = np.minimum(rounded, 0.0), np.maximum(rounded, 0.0)

    def take(self, arithmetic: Any, errors: Array) -> None:
        """Add the sums of a run."""
        if arithmetic.samples:
            self.sigma.take(arithmetic, errors[None])
        else:
            self.low, self.high = np.minimum(self.low, errors), np.maximum(self.high, errors)

    def beyond(self, errors: Array) -> Array:
        """Return the errors beyond those of low-precision runs."""
        # Rounding may be coherent too: times a number near 1, each element of a row is rounded to itself.
        return errors - np.clip(errors, self.low, self.high)


class Coherent:
    """What groups of elements share in the runs of a reference, the exact one first.

    Args:
        dtypes: of each tensor.
    """

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        of = {name: precision(dtype) for name, dtype in dtypes.items()}
        # In float32 nothing is judged so: the efficient attention of an H200 approximates exponentials, errs
        # by 30 sigma of a row's scale, and is right (decision 37).
        self.halves = {
            name: target for name, target in of.items() if target.unit_roundoff > target.accumulation
        }
        self.values: dict[str, Array] = {}
        self.shared: dict[str, dict[Key, Shared]] = {}
        self.repeats: dict[str, float] = {}

    def take(self, arithmetic: Any, name: str, array: Array) -> None:
        """Add a tensor of a run, of a sample (1, …)."""
        if name not in self.halves:
            return
        if name not in self.values:
            self.values[name], value = array, on_host(array)
            if np.isfinite(value).all():
                rounding = self.halves[name].round(value) - value
                keys = [(kind, axes) for axes in groups(value.shape) for kind in (MEAN, SCALE)]
                self.shared[name] = {
                    key: Shared(_summed(key, rounding, _weights(key, value))) for key in keys
                }
            return
        errors = (array[0] if arithmetic.samples else array) - self.values[name]
        for key, shared in self.shared.get(name, {}).items():
            shared.take(arithmetic, _summed(key, errors, _weights(key, self.values[name])))

    def repeated(self, name: str) -> float:
        """Return how often a row of a tensor occurs, on the mean over all rows."""
        if name not in self.repeats:
            value = on_host(self.values[name])
            rows = self.halves[name].round(value).reshape(-1, value.shape[-1])
            counts = np.unique(rows, axis=0, return_counts=True)[1]
            self.repeats[name] = float(np.square(counts).sum() / counts.sum())
        return self.repeats[name]

    def judge(self, name: str, errors: Array, sigma: Array, judged: Judgement) -> Judgement:
        """Return the judgement of a tensor's elements, or of what they share if that is worse.

        Args:
            errors, sigma: of the elements.
            judged: the judgement of the elements.
        """
        known = np.isfinite(sigma) & np.isfinite(errors)
        errors, sigma = np.where(known, errors, 0.0), np.where(known, sigma, 0.0)
        worst, value = judged, on_host(self.values.get(name, errors))
        for key, shared in self.shared.get(name, {}).items():
            weights = _weights(key, value)
            least = np.sqrt(_summed(key, np.square(sigma), np.square(weights)))
            right = _summed(key, value, weights)
            actual = right + shared.beyond(_summed(key, errors, weights))
            # Equal rows, as those of padding, are rounded alike: they count as one.
            rows = key[1] == (value.ndim - 1,)
            repeated = 1.0 if rows else self.repeated(name)
            allowed = np.sqrt(repeated) * np.maximum(shared.sigma.result(), least)
            judgement = judge_tensor(actual, right, allowed, "float64", errors_apart=shared.sigma.independent)
            if judgement.status == "undetermined" or judgement.ratio <= max(worst.ratio, NEAR):
                continue
            worst = replace(
                judged,
                status=judgement.status,
                z=judgement.z,
                rms=judgement.rms,
                independent=judgement.independent,
            )
            if judgement.status == "diverges":
                where = "of rows" if rows else f"over axes {', '.join(map(str, key[1]))}"
                worst = replace(
                    worst,
                    note=f"{NO_ELEMENT}, but the {key[0]} {where} errs by {judgement.rms:.0f} of its sigma",
                )
        return worst
