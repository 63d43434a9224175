"""Position tables and position numbers (SPEC POS-1 to POS-7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from concord.spec.arrays import Ids, Mask
from concord.spec.config import EncoderConfig


def sinusoid(config: EncoderConfig) -> NDArray[np.float64]:
    """Return the fixed position table of a configuration (SPEC POS-2 to POS-4, POS-6).

    Row p, frequency of column j: ``1 / base ** e(j)``, with e(j) = 2 (j // 2) / D for the exponent ``pair``
    and j / D for ``column``. ``interleaved`` puts the sine on even columns and the cosine on odd ones;
    ``halves`` puts all sines before all cosines.

    Returns:
        (max_positions, d_model), float64. Row 0 is zero where ``position_of_padding`` is ``zero_row``.
    """
    column = columns(config)
    angle = angles(config)
    table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    if config.position_of_padding == "zero_row":
        table[0] = 0.0
    return table


def columns(config: EncoderConfig) -> Ids:
    """Return of each column of the table which one it is in the interleaved layout: (D,)."""
    if config.position_layout == "halves":
        # Column j of the first half and column j + D/2 share a frequency, as columns 2j and 2j + 1 do above.
        return np.concatenate([np.arange(0, config.d_model, 2), np.arange(1, config.d_model, 2)])
    return np.arange(config.d_model)


def angles(config: EncoderConfig) -> NDArray[np.float64]:
    """Return the angle of each entry of the table: (max_positions, d_model)."""
    assert config.position_base is not None, "a learned table is not computed"
    column = columns(config)
    exponent = (2 * (column // 2) if config.position_exponent == "pair" else column) / config.d_model
    angle: NDArray[np.float64] = np.arange(config.max_positions)[:, None] / config.position_base**exponent
    return angle


def float32_noise(config: EncoderConfig) -> NDArray[np.float64]:
    """Return by how much each entry of the fixed table may err where it was computed in float32, step by
    step.

    The frequency and the angle are rounded, which moves the sine by as much as the angle; then it is rounded
    itself.

    Returns:
        (max_positions, d_model), float64.
    """
    return 2.0**-24 * (1 + 2 * angles(config))


def position_ids(config: EncoderConfig, real: Mask) -> Ids:
    """Return the row of the position table that each token takes (SPEC POS-5, POS-6).

    Args:
        real: (B, T), True where a token is not padding.

    Returns:
        (B, T): ``position_start`` + t; 0 for padding where ``position_of_padding`` is ``zero_row``. A padded
        position inside the text still uses up its number; not so with ``pad_row``, where padding takes row
        ``pad_id``.
    """
    if config.position_of_padding == "pad_row":
        return np.where(real, np.cumsum(real, axis=1) - 1 + config.position_start, config.pad_id)
    numbers = np.broadcast_to(np.arange(real.shape[1]) + config.position_start, real.shape)
    return np.where(real, numbers, 0) if config.position_of_padding == "zero_row" else numbers.copy()
