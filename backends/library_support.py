"""Refusals of the library implementations, and their execution without padding.

No result depends on padding: only real tokens and, for pooling, each sample's first token are kept. Indices
are computed on the host, for static shapes.

Shapes: B batch, T tokens, N kept rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from concord.backends.interface import UNPADDED, Implementation, Request
from concord.spec.arrays import Ids
from concord.spec.masks import mask_constant, real_tokens, sees_nothing

# Parts without a norm.
ATTENTION_ALONE = ("attention", "dot_product")

NOT_EXPOSED = ("*attention.scores", "*attention.masked_scores", "*attention.weights")
"""Taps inside a fused attention kernel."""

NOT_EXPOSED_BY_MODELS = ("embeddings.*", "layers.*", "final_norm", "pooling", "pooler.*", "normalized")
"""Taps inside a whole-model program, which returns only logits."""

# Adding this in float32 erases every digit of a half-precision score.
ABSORBING = 2.0**40

# Rows of a compiled program are padded to a multiple of this, so that a few programs suffice for all batches.
MULTIPLE = 64

# Beyond this mask constant, the weight of a padded key is negligible.
CERTAIN = 1e8

NOT_EXPOSED_UNPADDED = ("embeddings.*", "layers.*", "final_norm")
"""Taps whose shape differs without padding."""


def library_reasons(request: Request, attention: str, norm: str, float32_scores: bool) -> list[str]:
    """One line per option that library layers cannot compute.

    Args:
        float32_scores: whether half-precision scores are float32.
    """
    config = request.config
    refused = {
        ("mask_fill", "replace"): f"{attention} can only add to scores (MSK-3)",
        ("query_mask", "overwrite"): f"{attention} does not return its weights (MSK-8)",
    }
    if request.part not in ATTENTION_ALONE:
        refused |= {
            ("norm_epsilon_placement", "outside"): f"{norm} adds epsilon to the variance (NRM-3)",
            ("norm_variance", "unbiased"): f"{norm} divides by D (NRM-4)",
        }
    reasons = [
        f"{option}={value!r}: {why}"
        for (option, value), why in refused.items()
        if getattr(config, option) == value
    ]
    constant = mask_constant(config, request.dtype)
    # If the constant does not absorb the score, float32 scores of a row without visible keys keep digits that
    # the half precision loses (SPEC MSK-5).
    half = float32_scores and request.dtype in ("bfloat16", "float16")
    if half and sees_nothing(config, request.batch) and abs(constant) < ABSORBING:
        reasons.append(
            f"mask_value={config.mask_value!r}: {attention} adds it in float32, so a row without a "
            f"visible key keeps score digits that {request.dtype} would lose (MSK-5)"
        )
    return reasons


def parts_of(parts: Mapping[str, Callable[..., Any]], make: Any) -> dict[str, Callable[..., Any]]:
    """Builders of all parts, using these layers."""
    return {name: partial(part, make=make) for name, part in parts.items()}


@dataclass(frozen=True)
class Layers:
    """Layers of a model; ``dot_product`` by ``head_computation``, ``activations`` by name."""

    norm: Callable[..., Any]
    embeddings: Callable[..., Any]
    dot_product: Mapping[str, Callable[..., Any]]
    activations: Mapping[str, Callable[[Any], Any]]


class KeptRows(NamedTuple):
    """Row indices that replace the layers' mask."""

    # Real tokens (B, T), kept rows (N,), and the position of each token among them (B, T).
    real: Any
    rows: Any
    places: Any


def indices(request: Request) -> dict[str, Ids]:
    """Indices that remove and restore padding; empty for padded requests.

    Returns:
        ``rows`` (N,): kept rows among B T. ``places`` (B, T): each token's index among them, or an unused 0.
    """
    if not request.execution.startswith(UNPADDED):
        return {}
    mask = real_tokens(request.config, request.batch.required("input_ids"))  # (B, T)
    mask[:, 0] = True
    rows = np.flatnonzero(mask)
    places = np.where(mask, np.cumsum(mask).reshape(mask.shape) - 1, 0)
    if request.execution.endswith("compiled"):
        # Fill up with copies of the first row; no place refers to the copies.
        length = min(-(-len(rows) // MULTIPLE) * MULTIPLE, mask.size)
        rows = np.concatenate([rows, np.full(length - len(rows), rows[0])])
    return {"rows": rows.astype(np.int64), "places": places.astype(np.int64)}


def padding_reasons(request: Request) -> list[str]:
    """Return one line per reason to keep padding."""
    config, reasons = request.config, []
    if request.part != "model":
        why = (
            "only the whole model has an unpadded form"
            if request.part == "pooled"
            else "padded rows are part of its output"
        )
        return [f"part={request.part!r}: {why} (PRT-1)"]
    if config.pooling == "flatten":
        reasons.append("pooling='flatten': padded rows reach the classifier (HED-1)")
    if config.mask_assignment == "batch_major":
        reasons.append(
            "mask_assignment='batch_major': the mask of another sample leaves padded keys visible (MSK-7)"
        )
    constant = mask_constant(config, request.dtype)
    if abs(constant) < CERTAIN:
        reasons.append(
            f"mask_value={config.mask_value!r}: in {request.dtype} a padded key can still get a weight "
            "(MSK-2)"
        )
    if sees_nothing(config, request.batch):
        reasons.append("a sample has no real token, so all its attention weight falls on padded keys (MSK-5)")
    return reasons


def unpadded(
    implementations: Mapping[str, Implementation], model: Callable[..., Any], **others: Any
) -> dict[str, Implementation]:
    """Unpadded variants; ``others`` replaces further fields."""

    def reasons(entry: Implementation, request: Request) -> list[str]:
        return entry.unsupported_reasons(request) + padding_reasons(request)

    return {
        f"{name} {UNPADDED}": replace(
            entry,
            parts={"model": model},
            unsupported_reasons=partial(reasons, entry),
            not_exposed=tuple(dict.fromkeys((*NOT_EXPOSED_UNPADDED, *entry.not_exposed))),
            **others,
        )
        for name, entry in implementations.items()
    }
