"""Padding rows, and results that depend on them.

A run that declares :data:`concord.spec.deviations.UNCOMPUTED_PADDING` is judged on neither.

Shapes: B samples, T tokens, Q queries, S keys, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from concord.spec.arrays import Mask
from concord.spec.batch import Batch, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import BatchError
from concord.spec.masks import real_tokens, visible_keys
from concord.spec.tensors import POOLED

# Taps before the mask, where padded keys are not computed. After the mask their weight is zero, which is
# judged.
UNMASKED = ("scores", "key", "value")


def padded_rows(config: EncoderConfig, batch: Batch) -> dict[str, Mask]:
    """Padding along existing axes: ``tokens`` (B, T), ``query`` (B, Q), ``key`` (B, S)."""
    if batch.input_ids is not None:
        padded = ~real_tokens(config, batch.input_ids)
        return dict.fromkeys(("tokens", "query", "key"), padded)
    masks = {"query": batch.query_mask, "key": batch.key_mask}
    return {axis: ~mask for axis, mask in masks.items() if mask is not None and mask.ndim == 2}


def dependent_samples(config: EncoderConfig, batch: Batch, part: str) -> Mask:
    """Samples whose result or loss depends on padding, (B,)."""
    padded = padded_rows(config, batch)
    count = len(next(iter(batch.arrays().values())))
    output = padded.get("tokens" if batch.input_ids is not None else "query")
    if output is None:
        return np.zeros(count, bool)
    if config.mask_assignment == "batch_major":  # its real tokens see other samples' padding
        return np.full(count, bool(output.any()))
    if part not in POOLED:
        cotangent = batch.required("cotangent")
        return np.asarray((output & (cotangent != 0).reshape(*output.shape, -1).any(-1)).any(-1))
    # The mean covers only real tokens.
    if config.pooling == "mean":
        return np.zeros(count, bool)
    return np.asarray(output[:, 0] if config.pooling == "first" else output.any(-1))


def seen_keys(config: EncoderConfig, batch: Batch) -> Mask | None:
    """Visible keys, (B, 1 or H, 1 or Q, S), or None without a mask."""
    real = batch.key_mask if batch.input_ids is None else real_tokens(config, batch.input_ids)
    return None if real is None else visible_keys(config, real, config.num_heads)


def blind_samples(config: EncoderConfig, batch: Batch) -> Mask:
    """Samples with a query that sees no key, (B,) (SPEC MSK-5)."""
    visible, count = seen_keys(config, batch), len(next(iter(batch.arrays().values())))
    if visible is None:
        return np.zeros(count, bool)
    return np.asarray((~visible.any(-1)).reshape(count, -1).any(-1))


def independent_batch(config: EncoderConfig, batch: Batch, part: str) -> Batch | None:
    """Return a batch whose loss does not depend on padding, if any."""
    padded = padded_rows(config, batch)
    depends = dependent_samples(config, batch, part)
    if not depends.any():
        return batch
    # A pooled vector depends on padding as a whole, so its sample is dropped. Otherwise a zero cotangent
    # suffices, and all samples are judged.
    if part in POOLED or config.mask_assignment == "batch_major":
        remainder = Batch(**{name: array[~depends] for name, array in batch.arrays().items()})
    else:
        output = padded["tokens" if batch.input_ids is not None else "query"]
        remainder = replace(batch, cotangent=np.where(output[..., None], 0.0, batch.required("cotangent")))
    try:
        validate_batch(config, remainder, part)
    except BatchError:
        return None
    return remainder


def uncomputed(
    config: EncoderConfig, batch: Batch, part: str, tensor: str, axes: Sequence[str]
) -> Mask | bool:
    """Elements that a run without padding does not compute, in a broadcastable shape."""
    depends = dependent_samples(config, batch, part)
    if not axes or axes[0] != "batch":  # a sum over samples: the loss, or a parameter's gradient
        return bool(depends.any()) and (tensor == "loss" or tensor.startswith("gradients."))
    by_axis, leaf = padded_rows(config, batch), tensor.rpartition(".")[2]
    followed = tensor.startswith("gradients.") or not {"tokens", "query", "key"} & {*axes}
    skipped = np.asarray(depends if followed else np.zeros_like(depends)).reshape(-1, *[1] * (len(axes) - 1))
    for place, axis in enumerate(axes):
        if axis in by_axis and (axis != "key" or leaf in UNMASKED or tensor.startswith("gradients.")):
            rows = by_axis[axis]
            skipped = skipped | rows.reshape(
                len(rows), *[1] * (place - 1), rows.shape[1], *[1] * (len(axes) - place - 1)
            )
    return skipped
