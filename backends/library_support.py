"""What the library implementations of the four frameworks share.

What their layers cannot express, and execution without padding.

A padded token is a row that nothing depends on: as a key it is masked, and nobody asks for its vector. Kept
are the real tokens, and the first of each sample, since pooling may take that. The indices are computed here,
on the host, so that compiled programs see shapes that do not depend on data. No framework is called here.

Shapes: B batch, T tokens, N rows kept.
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

ATTENTION_ALONE = ("attention", "dot_product")
"""The parts that have no norm."""

NOT_EXPOSED = ("*attention.scores", "*attention.masked_scores", "*attention.weights")
"""Patterns of the taps that stay inside the kernel."""

NOT_EXPOSED_BY_MODELS = ("embeddings.*", "layers.*", "final_norm", "pooling", "pooler.*", "normalized")
"""Patterns of the taps that stay inside a program for the whole model. Its logits are exposed."""

ABSORBING = 2.0**40
"""What leaves no digit of a score of a half precision if a float32 adds it."""

MULTIPLE = 64
"""To a multiple of this the rows of a compiled program are filled up, so that few programs serve all
batches."""

CERTAIN = 1e8
"""The least mask constant by which a padded key's weight is zero beside any other's."""

NOT_EXPOSED_UNPADDED = ("embeddings.*", "layers.*", "final_norm")
"""Patterns of the taps that have another shape without padding, or none."""


def library_reasons(request: Request, attention: str, norm: str, float32_scores: bool) -> list[str]:
    """Return what keeps a request from being computed by library layers, one line for each option.

    Args:
        attention, norm: how the framework calls them.
        float32_scores: whether the scores of half precisions are float32 there.
    """
    config = request.config
    refused = {
        ("mask_fill", "replace"): f"{attention} only adds to scores (MSK-3)",
        ("query_mask", "overwrite"): f"{attention} does not give its weights away (MSK-8)",
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
    half = float32_scores and request.dtype in ("bfloat16", "float16")
    if half and sees_nothing(config, request.batch) and abs(constant) < ABSORBING:
        reasons.append(
            f"mask_value={config.mask_value!r}: {attention} adds to float32 scores, where "
            f"{constant:g} leaves digits of a row without any key that {request.dtype} drops (MSK-5)"
        )
    return reasons


def parts_of(parts: Mapping[str, Callable[..., Any]], make: Any) -> dict[str, Callable[..., Any]]:
    """Return what builds each part out of certain layers."""
    return {name: partial(part, make=make) for name, part in parts.items()}


@dataclass(frozen=True)
class Layers:
    """What a model is made of; ``dot_product`` by ``head_computation``, ``activations`` by name."""

    norm: Callable[..., Any]
    embeddings: Callable[..., Any]
    dot_product: Mapping[str, Callable[..., Any]]
    activations: Mapping[str, Callable[[Any], Any]]


class KeptRows(NamedTuple):
    """What layers get in place of the mask.

    Which tokens are real (B, T), which rows are kept (N,), where each token is (B, T).
    """

    real: Any
    rows: Any
    places: Any


def indices(request: Request) -> dict[str, Ids]:
    """Return what puts rows where they are needed; nothing for a request that keeps its padding.

    Returns:
        ``rows`` (N,): for each row that is kept, its number among the B T. ``places`` (B, T): for each token,
        its place among the rows kept; a padded one that was dropped gets place 0, where any finite row will
        do.
    """
    if not request.execution.startswith(UNPADDED):
        return {}
    kept = real_tokens(request.config, request.batch.required("input_ids"))  # (B, T)
    kept[:, 0] = True
    rows = np.flatnonzero(kept)
    places = np.where(kept, np.cumsum(kept).reshape(kept.shape) - 1, 0)
    if request.execution.endswith("compiled"):
        # The first row once more; no place names the copies, so that nothing depends on them.
        filled = min(-(-len(rows) // MULTIPLE) * MULTIPLE, kept.size)
        rows = np.concatenate([rows, np.full(filled - len(rows), rows[0])])
    return {"rows": rows.astype(np.int64), "places": places.astype(np.int64)}


def padding_reasons(request: Request) -> list[str]:
    """Return why a request cannot be computed without its padding, one line for each reason.

    Nothing if it can be.
    """
    config, reasons = request.config, []
    if request.part != "model":
        why = (
            "the whole model alone has an unpadded form"
            if request.part == "pooled"
            else "padded rows are part of its output"
        )
        return [f"part={request.part!r}: {why} (PRT-1)"]
    if config.pooling == "flatten":
        reasons.append("pooling='flatten': padded rows reach the classifier (HED-1)")
    if config.mask_assignment == "batch_major":
        reasons.append("mask_assignment='batch_major': the mask of another sample shows padded keys (MSK-7)")
    constant = mask_constant(config, request.dtype)
    if abs(constant) < CERTAIN:
        reasons.append(
            f"mask_value={config.mask_value!r}: in {request.dtype} a padded key can still get a weight "
            "(MSK-2)"
        )
    if sees_nothing(config, request.batch):
        reasons.append("a sample has no real token: its weights are those of padded keys (MSK-5)")
    return reasons


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
