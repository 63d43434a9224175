"""Half-precision errors shared by a row or channel, visible only in its mean or scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from concord.conformance.judging.estimate import Sigma, is_half, namespace_of, on_host
from concord.conformance.judging.judge import NEAR
from concord.conformance.judging.scoring import judge_tensor
from concord.conformance.judging.verdict import NO_ELEMENT, Judgement
from concord.spec.arrays import Array, Arrays
from concord.spec.precision import precision

# Minimum number of elements in a group; the mean of fewer elements adds little information.
LEAST = 16

MEAN, SCALE = "mean", "scale"

Axes = tuple[int, ...]

# MEAN or SCALE, and the axes of the group.
Key = tuple[str, Axes]


def groups(shape: Axes) -> Iterator[Axes]:
    """Yield axes of groups: the last, all but the first two, all but one."""
    # A tensor with one axis is a single group, whose mean adds no certainty to its elements.
    axes = range(len(shape))
    kept = [axes[:-1], axes[:2], *([axis] for axis in axes)] if len(shape) > 1 else []
    over = dict.fromkeys(tuple(axis for axis in axes if axis not in some) for some in kept)
    yield from (some for some in over if some and math.prod(shape[axis] for axis in some) >= LEAST)


def _weights(key: Key, value: Array) -> Array:
    (kind, axes), xp = key, namespace_of(value)
    if kind == MEAN:
        ones = xp.ones_like(value[(slice(0, 1),) * value.ndim])
        return ones / math.prod(value.shape[axis] for axis in axes)
    norm = xp.sqrt(xp.sum(xp.square(value), axis=axes, keepdims=True))
    return value / xp.where(norm > 0, norm, 1.0)


def _summed(key: Key, values: Array, weights: Array) -> Array:
    return on_host(namespace_of(values).sum(values * weights, axis=key[1])).reshape(-1)


class Shared:
    """Sums over groups in correct runs, with sigma from samples and bounds from low-precision runs."""

    def __init__(self, rounded: Array) -> None:
        self.sigma = Sigma(np.zeros_like(rounded), "float64")
        self.low, self.high = np.minimum(rounded, 0.0), np.maximum(rounded, 0.0)

    def take(self, arithmetic: Any, errors: Array) -> None:
        """Add a run."""
        if arithmetic.samples:
            self.sigma.take(arithmetic, errors[None])
        else:
            # A run that overflows bounds nothing: otherwise a finite candidate would err without limit.
            low, high = (np.where(np.isnan(errors), end, errors) for end in (-np.inf, np.inf))
            self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)

    def beyond(self, errors: Array) -> Array:
        """Errors outside the bounds."""
        # Rounding may also be coherent: multiplied by a value near 1, each element of a row rounds to itself.
        return errors - np.clip(errors, self.low, self.high)


class Coherent:
    """Errors that groups share in correct runs; the exact run comes first."""

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        # Half precisions only. In float32, an H200's efficient attention approximates exponentials: its error
        # is 30 sigma of a row's scale, and is correct (decision 37).
        self.halves = {name: precision(dtype) for name, dtype in dtypes.items() if is_half(dtype)}
        self.values: Arrays = {}
        self.shared: dict[str, dict[Key, Shared]] = {}
        self.repeats: dict[str, float] = {}

    def take(self, arithmetic: Any, name: str, array: Array) -> None:
        """Add a tensor; samples form a leading axis."""
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
        """Mean number of occurrences of a row."""
        if name not in self.repeats:
            value = on_host(self.values[name])
            rows = self.halves[name].round(value).reshape(-1, value.shape[-1])
            counts = np.unique(rows, axis=0, return_counts=True)[1]
            self.repeats[name] = float(np.square(counts).sum() / counts.sum())
        return self.repeats[name]

    def judge(self, name: str, errors: Array, sigma: Array, judged: Judgement) -> Judgement:
        """The worse of the judgements on elements and on groups."""
        is_finite = np.isfinite(sigma) & np.isfinite(errors)
        errors, sigma = np.where(is_finite, errors, 0.0), np.where(is_finite, sigma, 0.0)
        worst, value = judged, on_host(self.values.get(name, errors))
        for key, shared in self.shared.get(name, {}).items():
            weights = _weights(key, value)
            least_sigma = np.sqrt(_summed(key, np.square(sigma), np.square(weights)))
            expected = _summed(key, value, weights)
            actual = expected + shared.beyond(_summed(key, errors, weights))
            # Equal rows, such as rows of padding, are rounded alike and count as one.
            rows = key[1] == (value.ndim - 1,)
            repetitions = 1.0 if rows else self.repeated(name)
            group_sigma = np.sqrt(repetitions) * np.maximum(shared.sigma.result(), least_sigma)
            judgement = judge_tensor(
                actual, expected, group_sigma, "float64", errors_apart=shared.sigma.independent
            )
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
                    worst, note=f"{NO_ELEMENT}, but the {key[0]} {where} is off by {judgement.rms:.0f} sigma"
                )
        return worst
