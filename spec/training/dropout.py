"""Dropout masks shared by all frameworks (SPEC DRP-3).

They come from Philox 4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: *Parallel random numbers: as easy as
1, 2, 3*, 2011).
"""

from __future__ import annotations

import functools
import math
import zlib

import numpy as np
from numpy.typing import NDArray

from concord.spec.arrays import Mask
from concord.spec.config import EncoderConfig
from concord.spec.tensors import OF_IDS, source_of
from concord.spec.training.recipe import Recipe

Words = NDArray[np.uint32]

# Masks up to this size are cached, since several arithmetics compute the same step.
SMALL = 1 << 16

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Four random words per counter."""
    a, b, c, d = counter
    for number in range(ROUNDS):
        first, second = (
            np.uint64(factor) * word.astype(np.uint64)
            for factor, word in zip(MULTIPLIERS, (a, c), strict=True)
        )
        left, right = (np.uint32((key[i] + number * INCREMENTS[i]) & 0xFFFFFFFF) for i in (0, 1))
        a, c = _high(second) ^ b ^ left, _high(first) ^ d ^ right
        b, d = _low(second), _low(first)
    return a, b, c, d


def kept(seed: int, step: int, micro_batch: int, site: str, shape: tuple[int, ...], rate: float) -> Mask:
    """Kept elements of a tensor (SPEC DRP-3).

    Args:
        seed: seed of the training run, below 2^64.
        micro_batch: index of the batch within the step.
    """
    draw = _drawn if math.prod(shape) > SMALL else _drawn_once
    return draw(seed, step, micro_batch, site, shape, rate)


def _drawn(seed: int, step: int, micro_batch: int, site: str, shape: tuple[int, ...], rate: float) -> Mask:
    # Element i takes word i mod 4 of counter (i div 4, step, micro-batch, CRC32 of the site). Every element
    # has its own random number, in whatever order a framework draws.
    size = math.prod(shape)
    blocks = np.arange(-(-size // 4), dtype=np.uint32)
    fixed = (np.full_like(blocks, word) for word in (step, micro_batch, zlib.crc32(site.encode())))
    key = seed & 0xFFFFFFFF, seed >> 32
    words = np.stack(philox((blocks, *fixed), key), axis=-1).reshape(-1)[:size]  # type: ignore[arg-type]
    keep: Mask = (words >= math.ceil(rate * 2**32)).reshape(shape)
    # The cached array is shared.
    keep.flags.writeable = False
    return keep


_drawn_once = functools.lru_cache(maxsize=64)(_drawn)


def sites(config: EncoderConfig, part: str = "model") -> dict[str, str]:
    """Map each tap with dropout in a part to its site (SPEC DRP-2)."""
    site_by_tap = {}
    if part in OF_IDS:
        site_by_tap["embeddings.norm" if config.embedding_norm else "embeddings.sum"] = "embeddings"
    for i in range(config.num_layers if part in (*OF_IDS, "stack") else 0):
        layer = f"layers.{i}"
        site_by_tap[
            f"{layer}.attention.{'masked_weights' if config.query_mask == 'overwrite' else 'weights'}"
        ] = f"{layer}.attention.weights"
        site_by_tap[f"{layer}.attention.{'output' if config.output_projection else 'context'}"] = (
            f"{layer}.attention"
        )
        site_by_tap[f"{layer}.feed_forward.activation"] = f"{layer}.feed_forward.activation"
        site_by_tap[f"{layer}.feed_forward.outer"] = f"{layer}.feed_forward"
        site_by_tap[f"{layer}.{'norm2' if config.norm_placement == 'post' else 'residual2'}"] = (
            f"{layer}.output"
        )
    if part == "model":
        site_by_tap[source_of(config, "logits")] = "head"
    return site_by_tap


def rate_of(recipe: Recipe, site: str) -> float:
    """Dropout rate at a site (SPEC DRP-2)."""
    return float(getattr(recipe, f"dropout_{site.rpartition('.')[2]}"))


def _high(product: NDArray[np.uint64]) -> Words:
    return (product >> np.uint64(32)).astype(np.uint32)


def _low(product: NDArray[np.uint64]) -> Words:
    return (product & LOW).astype(np.uint32)
