"""How far from the truth a correct run may lie. Provisional: one rule for everything, and one number.

For every tensor the reference computes the truth of the run's precision in float64 arithmetic, and beside it examples
of what correct arithmetic of that precision makes of it: the same reference, every operation rounded, sums in another
order each time. The largest error of the examples is a measurement of what rounding does to this tensor of this case. A
run may err by at most :data:`MULTIPLE` times as much; a float64 run by :data:`SHARE` of the tensor's own scale, if that
is more.

A ReLU whose input is zero but for rounding has either slope: a gradient may also lie off by as much as it changes when
every such slope does.

Errors and scales are taken over the last axis of a tap of rank three and more, so that the outsized values of one
padded row do not excuse its neighbours, and over the whole of any other tensor and of every gradient. In the half
precisions errors are taken over the whole of a tap too: all examples round the same few bits alike, and a row on which
they happen not to err says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.batch import Batch
from spec.cases.files import expected
from spec.config import EncoderConfig
from spec.parameters import Weights
from spec.precision import Precision, precision
from spec.reference import reference
from spec.tensors import clause_of

Array = NDArray[np.floating]

MULTIPLE = 32.0
"""Times the error of the examples that a correct run may err: other elementary functions, other ways to round."""

EXAMPLES = 4
"""How many examples are computed: one alone may hit the truth of a small tensor by luck."""

SHARE = 1e-9
"""Share of a tensor's own scale that a float64 run may err."""


@dataclass(frozen=True)
class Expectation:
    """What a run is judged by.

    Attributes:
        dtype: the precision.
        values: tensor name to expected array; taps in the order of computation, then gradients in the order in which
            they are computed, last layer first.
        allowances: for each, how far each element may lie from it, in a shape that broadcasts. NaN or infinity: the
            precision does not determine the value.
        clauses: for each, the clause that defines it.
    """

    dtype: str
    values: dict[str, Array]
    allowances: dict[str, Array]
    clauses: dict[str, str]


def expect(config: EncoderConfig, weights: Weights, batch: Batch, part: str = "model", dtype: str = "float32") -> Expectation:
    """Return what a correct run of a precision yields, and how far it may lie from it."""
    target = precision(dtype)
    truth = expected(reference(config, weights, batch, gradients=True, part=part, dtype=dtype))
    # float64 is judged through a float32 example, scaled: its own errors would be as small as the oracle's.
    shown, shrink = ("float32", 2.0**-29) if dtype == "float64" else (dtype, 1.0)
    exact = truth if shown == dtype else expected(reference(config, weights, batch, gradients=True, part=part, dtype=shown))
    examples = [
        expected(reference(config, weights, batch, gradients=True, part=part, dtype=shown, arithmetic=shown, shuffle=seed, fused=seed % 2 == 1))
        for seed in range(EXAMPLES)
    ]
    half, jumps = target.unit_roundoff > 2.0**-24, _jumps(config, weights, batch, part, dtype)
    values = dict(_in_order(truth))
    allowances = {}
    for name in values:
        error = shrink * _error(name, [example[name] for example in examples], exact[name], half)
        allowances[name] = _allowance(name, target, truth[name], error) + jumps.get(name, 0.0)
    return Expectation(dtype, values, _undetermined(allowances), {name: clause_of(config, name, part) for name in values})


def _jumps(config: EncoderConfig, weights: Weights, batch: Batch, part: str, dtype: str) -> dict[str, Array]:
    """Return how far each gradient moves when every ReLU input within rounding of zero changes sides."""
    if "relu" not in (config.activation, config.qkv_activation):
        return {}
    corner = MULTIPLE * precision(dtype).unit_roundoff
    above, below = (
        reference(config, weights, batch, gradients=True, part=part, dtype=dtype, corner=side).gradients for side in (corner, -corner)
    )
    return {f"gradients.{name}": abs(above[name] - below[name]) for name in above}


def _in_order(tensors: Mapping[str, Array]) -> list[tuple[str, Array]]:
    taps = [(name, array) for name, array in tensors.items() if not name.startswith("gradients.")]
    gradients = [(name, array) for name, array in tensors.items() if name.startswith("gradients.")]
    return taps + gradients[::-1]


def _error(name: str, examples: list[Array], exact: Array, half: bool) -> Array:
    with np.errstate(invalid="ignore"):  # an example that overflows says so by not being finite
        largest: Array = np.max([_largest(name, example.astype(np.float64) - exact) for example in examples], axis=0)
    return largest.max(keepdims=True) if half else largest


def _allowance(name: str, target: Precision, truth: Array, error: Array) -> Array:
    scale = _largest(name, truth)
    with np.errstate(invalid="ignore"):
        least = SHARE * scale if target.name == "float64" else MULTIPLE * target.unit_roundoff * scale
        allowance: Array = np.maximum(np.maximum(least, MULTIPLE * error), target.smallest_normal)
    return np.where(scale > target.largest, np.nan, allowance)


def _undetermined(allowances: dict[str, Array]) -> dict[str, Array]:
    """Let every gradient be undetermined where a tap is: it flows through all of them."""
    if all(np.isfinite(allowance).all() for name, allowance in allowances.items() if not name.startswith("gradients.")):
        return allowances
    return {name: allowance * np.nan if name.startswith("gradients.") else allowance for name, allowance in allowances.items()}


def _largest(name: str, values: Array) -> Array:
    """Return the largest absolute value over the last axis of a tap of rank three and more, or over everything."""
    by_row = values.ndim > 2 and not name.startswith("gradients.")
    largest: Array = np.max(abs(values), axis=-1 if by_row else None, keepdims=True, initial=0.0)
    return largest
