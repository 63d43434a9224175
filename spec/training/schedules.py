"""Learning rate schedules (SPEC OPT-9), in float64, rounded once on use."""

from __future__ import annotations

import math

from concord.spec.training.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Learning rate of a step, counted from 0."""
    return recipe.learning_rate * _share(recipe, step + recipe.first_step)


def _share(recipe: Recipe, step: int) -> float:
    warmup = recipe.warmup_steps
    if recipe.schedule == "inverse_square_root":
        return min(step / warmup, math.sqrt(warmup / step)) if step else 0.0
    if step < warmup:
        return step / warmup
    if recipe.total_steps is None:
        return 1.0
    start = warmup if recipe.decay_start == "warmup_end" else 0
    passed = min((step - start) / (recipe.total_steps - start), 1.0)
    height = 1.0 - passed if recipe.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return recipe.final_share + (1 - recipe.final_share) * height
