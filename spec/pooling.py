"""The lower bound of the length that divides a pooled vector (SPEC HED-5)."""

from __future__ import annotations

from concord.spec.config import EncoderConfig
from concord.spec.precision import precision


def least_squares(config: EncoderConfig, dtype: str) -> float:
    """Return the square of ``length_epsilon``, or the smallest normal number where a precision cannot hold
    it.
    """
    assert config.length_epsilon is not None, "vectors keep their length"
    return max(config.length_epsilon**2, precision(dtype).smallest_normal)
