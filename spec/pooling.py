"""The lower bound of the length that divides a pooled vector (SPEC HED-5)."""

from __future__ import annotations

from concord.spec.config import EncoderConfig
from concord.spec.precision import precision


def least_squares(config: EncoderConfig, dtype: str) -> float:
    """Square of ``length_epsilon``, or the precision's smallest normal number."""
    assert config.length_epsilon is not None, "vectors keep their length"
    # float16 cannot represent the square of sentence-bert's 1e-12, and would divide a zero vector by zero.
    return max(config.length_epsilon**2, precision(dtype).smallest_normal)
