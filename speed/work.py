"""Operation counts of a workload's matrix products; the rest is negligible."""

from __future__ import annotations

from concord.speed.presets import Workload

BACKWARD = 2  # a product's gradients are two products of its size


def flops(workload: Workload, real_only: bool = False) -> float:
    """Floating-point operations of one step; ``real_only`` excludes padding."""
    preset = workload.preset
    config, tokens = preset.config, preset.tokens
    width, rows = config.d_model, sum(workload.lengths) if real_only else preset.batch * tokens
    projections = 3 + bool(config.output_projection)
    per_token = 2 * width * (projections * width + 2 * config.d_ff)
    attention = 4 * preset.batch * tokens * tokens * width  # even unpadded execution has padding here
    features = width * (config.max_positions if config.pooling == "flatten" else 1)
    head = (
        2 * preset.batch * (features * config.num_classes + (width * width if config.pooler != "none" else 0))
    )
    forward = config.num_layers * (rows * per_token + attention) + head
    return float(forward * (1 + BACKWARD if workload.kind == "training" else 1))


def product_sizes(workload: Workload) -> tuple[int, int, int]:
    """Sizes of the model's largest product, the first of the feed-forward."""
    preset = workload.preset
    return preset.batch * preset.tokens, preset.config.d_model, preset.config.d_ff
