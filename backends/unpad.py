"""Execution without padding: which rows of a batch are kept, and what keeps a request from being computed without the others.

A padded token is a row that nothing depends on: as a key it is masked, and nobody asks for its vector. Kept are the
real tokens, and the first of each sample, since pooling may take that. The indices are computed here, on the host,
so that compiled programs see shapes that do not depend on data.

Shapes: B batch, T tokens, N rows kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import UNPADDED, Implementation, Request
from concord.spec.masks import mask_constant, real_tokens, sees_nothing

MULTIPLE = 64
"""To a multiple of this the rows of a compiled program are filled up, so that few programs serve all batches."""

CERTAIN = 1e8
"""The least mask constant by which a padded key's weight is zero beside any other's."""

UNDELIVERED = ("embeddings.*", "layers.*", "final_norm")
"""Patterns of the taps that have another shape here, or none."""


class Kept(NamedTuple):
    """What layers get in place of the mask: which tokens are real (B, T), which rows are kept (N,), where each token is (B, T)."""

    real: Any
    rows: Any
    slots: Any


def indices(request: Request) -> dict[str, NDArray[np.int64]]:
    """Return what puts rows where they are needed; nothing for a request that keeps its padding.

    Returns:
        ``rows`` (N,): for each row that is kept, its number among the B T. ``slots`` (B, T): for each token, its place
        among the rows kept; a padded one that was dropped gets place 0, where any finite row will do.
    """
    if not request.execution.startswith(UNPADDED):
        return {}
    kept = real_tokens(request.config, request.batch.required("input_ids"))  # (B, T)
    kept[:, 0] = True
    rows = np.flatnonzero(kept)
    slots = np.where(kept, np.cumsum(kept).reshape(kept.shape) - 1, 0)
    if request.execution.endswith("compiled"):
        # The first row once more; no slot names the copies, so that nothing depends on them.
        filled = min(-(-len(rows) // MULTIPLE) * MULTIPLE, kept.size)
        rows = np.concatenate([rows, np.full(filled - len(rows), rows[0])])
    return {"rows": rows.astype(np.int64), "slots": slots.astype(np.int64)}


def unsupported_reasons(request: Request) -> list[str]:
    """Return why a request cannot be computed without its padding, one line for each reason; nothing if it can be."""
    config, found = request.config, []
    if request.part != "model":
        why = (
            "the whole model alone has an unpadded form"
            if request.part == "pooled"
            else "padded rows are part of its output"
        )
        return [f"part={request.part!r}: {why} (PRT-1)"]
    if config.pooling == "flatten":
        found.append("pooling='flatten': padded rows reach the classifier (HED-1)")
    if config.mask_assignment == "batch_major":
        found.append("mask_assignment='batch_major': the mask of another sample shows padded keys (MSK-7)")
    constant = mask_constant(config, request.dtype)
    if abs(constant) < CERTAIN:
        found.append(
            f"mask_value={config.mask_value!r}: in {request.dtype} a padded key can still get a weight (MSK-2)"
        )
    if sees_nothing(config, request.batch):
        found.append("a sample has no real token: its weights are those of padded keys (MSK-5)")
    return found


def unpadded(
    implementations: Mapping[str, Implementation], model: Callable[..., Any], **others: Any
) -> dict[str, Implementation]:
    """Return the implementations that run without padding, beside those with it.

    Args:
        implementations: by name, those with padding.
        model: what builds the whole model.
        others: what else is another in them.
    """

    def reasons(entry: Implementation, request: Request) -> list[str]:
        return entry.unsupported_reasons(request) + unsupported_reasons(request)

    return {
        f"{name} {UNPADDED}": replace(
            entry,
            parts={"model": model},
            unsupported_reasons=partial(reasons, entry),
            undelivered=UNDELIVERED,
            **others,
        )
        for name, entry in implementations.items()
    }
