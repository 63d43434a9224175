"""Rows of padding: where a tensor has them, what depends on them, and the same case without such dependence.

A run may declare that it does not compute them (:data:`concord.spec.deviations.UNCOMPUTED_PADDING`): unpadded
kernels leave them out, and a mask that is an outer product lets them see nothing. What they hold is then not
judged, nor what follows from it.

Shapes: B samples, T tokens, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from concord.spec.batch import Batch, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import BatchError
from concord.spec.masks import real_tokens, visible_keys
from concord.spec.tensors import POOLED

Rows = NDArray[np.bool_]

UNMASKED = ("scores", "key", "value")
"""Activations whose rows of padded keys are not computed either.

Behind the mask such a key has no weight, which is judged.
"""


def padded_rows(config: EncoderConfig, batch: Batch) -> dict[str, Rows]:
    """Return which rows of the axes ``tokens`` (B, T), ``query`` (B, Q) and ``key`` (B, S) are padding.

    An axis without any is left out.
    """
    if batch.input_ids is not None:
        padded = ~real_tokens(config, batch.input_ids)
        return dict.fromkeys(("tokens", "query", "key"), padded)
    masks = {"query": batch.query_mask, "key": batch.key_mask}
    return {axis: ~mask for axis, mask in masks.items() if mask is not None and mask.ndim == 2}


def dependent_samples(config: EncoderConfig, batch: Batch, part: str) -> Rows:
    """Return (B,), True for each sample whose result or part of the loss depends on rows of padding."""
    padded = padded_rows(config, batch)
    count = len(next(iter(batch.arrays().values())))
    output = padded.get("tokens" if batch.input_ids is not None else "query")
    if output is None:
        return np.zeros(count, bool)
    if config.mask_assignment == "batch_major":  # real tokens see padding of other samples
        return np.full(count, bool(output.any()))
    if part not in POOLED:
        cotangent = batch.required("cotangent")
        return np.asarray((output & (cotangent != 0).reshape(*output.shape, -1).any(-1)).any(-1))
    if config.pooling == "mean":
        return np.zeros(count, bool)
    return np.asarray(output[:, 0] if config.pooling == "first" else output.any(-1))


def seen_keys(config: EncoderConfig, batch: Batch) -> Rows | None:
    """Return which keys each query sees, (B, 1 or H, 1 or Q, S); None if nothing says that it does not."""
    real = batch.key_mask if batch.input_ids is None else real_tokens(config, batch.input_ids)
    return None if real is None else visible_keys(config, real, config.num_heads)


def blind_samples(config: EncoderConfig, batch: Batch) -> Rows:
    """Return (B,), True for each sample with a query that sees no key at all (SPEC MSK-5)."""
    seen, count = seen_keys(config, batch), len(next(iter(batch.arrays().values())))
    if seen is None:
        return np.zeros(count, bool)
    return np.asarray((~seen.any(-1)).reshape(count, -1).any(-1))


def independent_batch(config: EncoderConfig, batch: Batch, part: str) -> Batch | None:
    """Return the batch without what makes its loss depend on rows of padding; None: nothing would be left.

    Samples whose vector depends on them are dropped, and cotangents are zero there.
    """
    padded = padded_rows(config, batch)
    depends = dependent_samples(config, batch, part)
    if not depends.any():
        return batch
    if part in POOLED or config.mask_assignment == "batch_major":
        kept = Batch(**{name: array[~depends] for name, array in batch.arrays().items()})
    else:
        output = padded["tokens" if batch.input_ids is not None else "query"]
        kept = replace(batch, cotangent=np.where(output[..., None], 0.0, batch.required("cotangent")))
    try:
        validate_batch(config, kept, part)
    except BatchError:
        return None
    return kept


def uncomputed(
    config: EncoderConfig, batch: Batch, part: str, tensor: str, axes: Sequence[str]
) -> Rows | bool:
    """Return which elements are not computed where rows of padding are not, in a shape that broadcasts.

    Args:
        tensor: its name, as a verdict gives it.
        axes: the names of its axes (:func:`concord.conformance.judging.breakdown.axes_of`).
    """
    depends = dependent_samples(config, batch, part)
    if not axes or axes[0] != "batch":  # a sum over samples: the loss, or the gradient of a parameter
        return bool(depends.any()) and (tensor == "loss" or tensor.startswith("gradients."))
    by_axis, leaf = padded_rows(config, batch), tensor.rpartition(".")[2]
    followed = tensor.startswith("gradients.") or not {"tokens", "query", "key"} & {*axes}
    found = np.asarray(depends if followed else np.zeros_like(depends)).reshape(-1, *[1] * (len(axes) - 1))
    for place, axis in enumerate(axes):
        if axis in by_axis and (axis != "key" or leaf in UNMASKED or tensor.startswith("gradients.")):
            rows = by_axis[axis]
            found = found | rows.reshape(
                len(rows), *[1] * (place - 1), rows.shape[1], *[1] * (len(axes) - place - 1)
            )
    return found
