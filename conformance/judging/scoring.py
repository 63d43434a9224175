"""Error of one tensor in sigma."""

from __future__ import annotations

import numpy as np

from concord.conformance.judging.estimate import R, Z, rms_limit
from concord.conformance.judging.exemptions import OUT_OF_RANGE
from concord.conformance.judging.expectation import root_mean_square
from concord.conformance.judging.verdict import Z_BINS, Judgement
from concord.spec.arrays import Array, Mask
from concord.spec.precision import precision

# Within these bounds a float64 sum of squares has neither underflowed nor overflowed.
SAFE = (1e-200, 1e200)

# Exponent of the first bin. Edges are powers of two, so a score's exponent is its bin.
LOWEST = int(np.log2(Z_BINS[0]))


# If rounding determines half of a tensor, or half of an operation's decisions, agreement proves nothing:
# ``floor`` would agree with ``round`` (decision 36).
WHOLE = 0.5


def judge_tensor(
    actual: Array,
    value: Array,
    sigma: Array,
    dtype: str,
    why: str = OUT_OF_RANGE,
    errors_apart: float = np.inf,
) -> Judgement:
    """Judge one tensor.

    Args:
        sigma: standard deviation of correct results; not finite where undetermined.
        errors_apart: number of independent errors in the samples.
    """
    flat, allowed, actual_values = (
        value.reshape(-1),
        sigma.astype(np.float64, copy=False).reshape(-1),
        actual.reshape(-1),
    )
    with np.errstate(all="ignore"):
        errors = np.abs(actual_values.astype(value.dtype, copy=False) - flat).astype(np.float64, copy=False)
        scores: Array = errors / allowed
        squares, sigmas = float(errors @ errors), float(allowed @ allowed)
    # Common case first: without infinities, no mask is needed, and a large tensor is scored once.
    judged: Mask | slice = slice(None)
    rms, note = float("inf"), ""
    if SAFE[0] < sigmas < SAFE[1] and (SAFE[0] < squares < SAFE[1] or not errors.any()):
        rms = float(np.sqrt(squares / sigmas))  # every element can be compared
    else:
        scores, finite = scores_of(actual_values, flat, allowed), np.isfinite(flat)
        comparable = ~np.isnan(scores)
        judged = comparable & finite
        if not comparable.any():
            note = f"{dtype} does not determine it: {why}" if why == OUT_OF_RANGE else why
            return Judgement("undetermined", size=value.size, note=note)
        scores = np.where(comparable, scores, 0.0)
        if np.isfinite(scores).all():
            rms = root_mean_square(errors[judged]) / root_mean_square(allowed[judged])
        if (comparable & ~finite).any():
            note = "finite where the reference is not"
        elif not np.isfinite(actual_values[judged]).all():
            note = "not finite"
        elif not judged.all():
            note = f"{judged.size - judged.sum()} elements are not judged: {why}"
    place = int(scores.argmax())
    z, beyond = float(scores[place]), int((scores > Z).sum())
    # Counting equal elements needs a sort, which is only done for tensors whose result may depend on it.
    independent = float(value.size)
    if R < rms < np.inf:
        independent = min(errors_apart, independent_elements(flat[judged], allowed[judged], dtype))
    exponents = np.frexp(np.clip(scores[judged], Z_BINS[0] / 2, Z_BINS[-1]))[1]
    return Judgement(
        status="diverges" if beyond or rms > rms_limit(independent) else "agrees",
        z=z,
        rms=rms,
        element=tuple(int(i) for i in np.unravel_index(place, value.shape)),
        actual=float(actual_values[place]),
        expected=float(flat[place]),
        sigma=float(allowed[place]),
        beyond=beyond,
        size=value.size,
        independent=independent,
        histogram=tuple(np.bincount(exponents - LOWEST, minlength=len(Z_BINS) + 1).tolist()),
        note=note,
    )


def scores_of(actual: Array, value: Array, sigma: Array) -> Array:
    """Errors in sigma: NaN if not judged, infinite if only one value is finite."""
    finite, sound = np.isfinite(value), np.isfinite(actual)
    with np.errstate(all="ignore"):
        errors = np.where(sound, abs(actual.astype(value.dtype, copy=False) - value) / sigma, np.inf)
    return np.where(
        finite & np.isfinite(sigma),
        np.nan_to_num(errors, nan=0.0, posinf=np.inf),
        np.where(~finite & np.isposinf(sigma) & sound, np.inf, np.nan),
    )


def finite_alone(sigma: Array, *values: Array) -> Array:
    """Set sigma to NaN where a value is not finite."""
    return np.where(np.logical_and.reduce([np.isfinite(value) for value in values]), sigma, np.nan)


def independent_elements(value: Array, sigma: Array, dtype: str) -> float:
    """Number of elements that determine the root mean square of sigma."""
    # Equal elements count once: 38 rows of the same inputs share one error. Elements far smaller than others
    # do not count.
    _, first = np.unique(precision(dtype).round(value), return_index=True)
    powers = np.square(sigma.reshape(-1)[first] / np.max(sigma, initial=0.0), dtype=np.float64)
    return float(np.square(powers.sum()) / np.square(powers).sum())


def mostly(unsure: Mask, value: Array, dtype: str) -> bool:
    """Whether most elements, or most of the sum of squares within the range, are not judged."""
    if not unsure.any():
        return False
    squares = np.square(np.where(abs(value) <= precision(dtype).largest, value, 0.0))
    return bool(unsure.mean() >= WHOLE or squares[unsure].sum() >= WHOLE * squares.sum() > 0)
