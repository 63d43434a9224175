"""Bugs in the learning rate of a step (SPEC OPT-9)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from concord.conformance.faults.training.fault import HUB, Change, Place, TrainingFault, recipe
from concord.spec.training.schedules import learning_rate


def fault(
    name: str, what: str, change: Change, source: str, run: str = "adamw", **fields: Any
) -> TrainingFault:
    return TrainingFault(
        name=name,
        group="schedule",
        what=what,
        clause="OPT-9",
        change=change,
        run=run,
        source=source and HUB + source,
        **fields,
    )


def rate(function: Callable[[Place], float]) -> Change:
    return Change(rate=function)


def full_wave(m: Place) -> float:
    recipe, step = m.recipe, m.step + m.recipe.first_step
    if recipe.total_steps is None or step < recipe.warmup_steps:
        return learning_rate(recipe, m.step)
    passed = min((step - recipe.warmup_steps) / (recipe.total_steps - recipe.warmup_steps), 1.0)
    return recipe.learning_rate * (
        recipe.final_share + (1 - recipe.final_share) * (1 + math.cos(2 * math.pi * passed)) / 2
    )


def warmed_and_decayed(m: Place) -> float:
    """Warm-up lies over a decay that is counted from the first step."""
    recipe = m.recipe
    height = (
        learning_rate(recipe.replace(warmup_steps=0, decay_start="first_step"), m.step)
        if recipe.total_steps
        else learning_rate(recipe, m.step)
    )
    return height * min(1.0, (m.step + recipe.first_step) / max(recipe.warmup_steps, 1))


def added_share(m: Place) -> float:
    """The schedule ends at the share of the rate above zero, which is added, not at what it is mixed with."""
    recipe = m.recipe
    return learning_rate(recipe.replace(final_share=0.0), m.step) + recipe.final_share * recipe.learning_rate


def inverse_root(m: Place) -> float:
    right = learning_rate(m.recipe, m.step)
    return right / math.sqrt(m.recipe.warmup_steps) if m.recipe.schedule == "inverse_square_root" else right


FAULTS = (
    fault(
        "warmup_from_zero",
        "The first step is counted as step 0, and its rate is zero.",
        recipe(first_step=0),
        "meta-pytorch/torchtune/issues/2010",
    ),
    fault(
        "schedule_step_ahead",
        "The schedule moves on before the optimizer's step, and its first value is skipped.",
        rate(lambda m: learning_rate(m.recipe, m.step + 1)),
        "facebookresearch/ParlAI/issues/2042",
    ),
    fault(
        "schedule_counts_batches",
        "The schedule moves on with each batch, not with each step.",
        rate(lambda m: learning_rate(m.recipe, m.step * m.recipe.accumulation)),
        "huggingface/accelerate/issues/963",
    ),
    fault(
        "schedule_counts_processes",
        "The schedule moves on once for each of four processes.",
        rate(lambda m: learning_rate(m.recipe, m.step * 4)),
        "huggingface/transformers/pull/24088",
        options={"total_steps": 23},
    ),
    fault(
        "schedule_never_moves",
        "The schedule is never moved on: every step has the rate of the first.",
        rate(lambda m: learning_rate(m.recipe, 0)),
        "",
    ),
    fault(
        "schedule_ignored",
        "The rate is constant, as if there were no schedule.",
        recipe(schedule="constant", total_steps=None, warmup_steps=0),
        "",
    ),
    fault("warmup_missing", "There is no warm-up.", recipe(warmup_steps=0, decay_start="warmup_end"), ""),
    fault(
        "decay_counted_from_first_step",
        "The schedule's decay is counted from the first step, not from the end of warm-up.",
        recipe(decay_start="first_step"),
        "huggingface/pytorch-image-models/issues/1242",
    ),
    fault(
        "warmup_times_decay",
        "Warm-up is multiplied by a decay that has begun already.",
        rate(warmed_and_decayed),
        "",
    ),
    fault(
        "schedule_ends_early",
        "The schedule ends one step early.",
        Change(recipe=lambda r: r.replace(total_steps=(r.total_steps or 0) - 1)),
        "goodfire-ai/spd/pull/821",
    ),
    fault(
        "schedule_ends_late",
        "The schedule ends one step late.",
        Change(recipe=lambda r: r.replace(total_steps=(r.total_steps or 0) + 1)),
        "",
    ),
    fault(
        "schedule_down_to_zero",
        "The schedule goes down to zero, not to the final share.",
        recipe(final_share=0.0),
        "",
    ),
    fault(
        "schedule_share_added",
        "The final share is added to a schedule that goes down to zero.",
        rate(added_share),
        "",
    ),
    fault(
        "cosine_full_wave",
        "The cosine runs through its whole period, and comes up again.",
        rate(full_wave),
        "lightly-ai/lightly/pull/1842",
        "nesterov",
    ),
    fault(
        "cosine_as_linear",
        "The rate goes down in a line, not as a cosine.",
        recipe(schedule="linear"),
        "",
        "nesterov",
    ),
    fault(
        "linear_as_cosine", "The rate goes down as a cosine, not in a line.", recipe(schedule="cosine"), ""
    ),
    fault(
        "inverse_root_unscaled",
        "The inverse root is that of the step's number, not of its share of warm-up.",
        rate(inverse_root),
        "",
        "noam",
    ),
    fault(
        "rate_times_batches",
        "The rate is scaled by the number of batches that a step accumulates.",
        rate(lambda m: learning_rate(m.recipe, m.step) * m.recipe.accumulation),
        "",
    ),
)
