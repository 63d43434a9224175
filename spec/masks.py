"""Attention masks (SPEC MSK-1 to MSK-8). True means a visible key or a real query."""

from __future__ import annotations

import numpy as np

from concord.spec.arrays import Ids, Mask
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.precision import precision


def real_tokens(config: EncoderConfig, input_ids: Ids) -> Mask:
    """Return (B, T), True where a token's id is not padding (SPEC MSK-1)."""
    real: Mask = input_ids != config.pad_id
    return real


def visible_keys(config: EncoderConfig, key_mask: Mask, num_heads: int) -> Mask:
    """Keys visible to each query of each head (SPEC MSK-4, MSK-7).

    Args:
        key_mask: (B, S) or (B, Q, S).

    Returns:
        (B, 1, 1 or Q, S) for ``per_sample``; (B, H, 1 or Q, S) for ``batch_major``.
    """
    per_query: Mask = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask
    if config.mask_assignment == "per_sample":
        return per_query[:, None]
    batch = len(key_mask)
    # Keras' published bug: heads are stacked before samples, but masks are repeated sample by sample (MSK-7).
    place = np.arange(num_heads)[None, :] * batch + np.arange(batch)[:, None]  # (B, H)
    assigned: Mask = per_query[place // num_heads]
    return assigned


def sees_nothing(config: EncoderConfig, batch: Batch) -> bool:
    """Whether some query of a batch sees no key (SPEC MSK-5)."""
    visible = batch.key_mask if batch.input_ids is None else real_tokens(config, batch.input_ids)
    return visible is not None and not bool(visible.any(axis=-1).all())


def mask_constant(config: EncoderConfig, dtype: str) -> float:
    """Return ``mask_value``, clamped to the precision's lowest finite value (SPEC MSK-6)."""
    # Converted naively, -1e9 is minus infinity in float16, and a row without a visible key becomes NaN
    # (decision 0005).
    target = precision(dtype)
    return float(target.round(max(config.mask_value, -target.largest)))
