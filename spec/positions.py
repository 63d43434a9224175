"""Position tables and position numbers (SPEC POS-1 to POS-7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from concord.spec.arrays import Ids, Mask
from concord.spec.config import EncoderConfig


def sinusoid(config: EncoderConfig) -> NDArray[np.float64]:
    """The fixed position table (SPEC POS-2 to POS-4, POS-6): (max_positions, d_model), float64.

    All backends share it, since implementations of ``sin`` and ``pow`` differ at large angles (decision
    0002).
    """
    column = columns(config)
    angle = angles(config)
    table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    if config.position_of_padding == "zero_row":
        table[0] = 0.0
    return table


def columns(config: EncoderConfig) -> Ids:
    """Index of each column in the interleaved layout: (D,)."""
    if config.position_layout == "halves":
        # Columns j and j + D/2 share a frequency, as columns 2j and 2j + 1 do in the interleaved layout.
        return np.concatenate([np.arange(0, config.d_model, 2), np.arange(1, config.d_model, 2)])
    return np.arange(config.d_model)


def angles(config: EncoderConfig) -> NDArray[np.float64]:
    """Angle of each entry: (max_positions, d_model)."""
    assert config.position_base is not None, "a learned table is not computed"
    column = columns(config)
    exponent = (2 * (column // 2) if config.position_exponent == "pair" else column) / config.d_model
    angle: NDArray[np.float64] = np.arange(config.max_positions)[:, None] / config.position_base**exponent
    return angle


def float32_noise(config: EncoderConfig) -> NDArray[np.float64]:
    """Possible error of each entry of a float32 table: (max_positions, d_model)."""
    # Frequency and angle are rounded, which shifts the sine by as much as the angle; the sine is rounded too.
    return 2.0**-24 * (1 + 2 * angles(config))


def position_ids(config: EncoderConfig, real: Mask) -> Ids:
    """Row of the position table for each token (SPEC POS-5, POS-6).

    Args:
        real: (B, T), True where a token is not padding.
    """
    if config.position_of_padding == "pad_row":
        return np.where(real, np.cumsum(real, axis=1) - 1 + config.position_start, config.pad_id)
    # Here padding inside the text occupies a position; with ``pad_row`` only real tokens count.
    numbers = np.broadcast_to(np.arange(real.shape[1]) + config.position_start, real.shape)
    return np.where(real, numbers, 0) if config.position_of_padding == "zero_row" else numbers.copy()
