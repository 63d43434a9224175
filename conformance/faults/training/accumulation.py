"""Bugs in how the gradients of a step's batches become one (SPEC OPT-10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from concord.conformance.faults.training.fault import (
    HUB,
    Change,
    Place,
    Tensor,
    Tensors,
    TrainingFault,
    recipe,
)

Counts = list[tuple[int, int]]


def fault(
    name: str, what: str, change: Change, source: str, run: str = "adamw", **fields: Any
) -> TrainingFault:
    return TrainingFault(
        name=name,
        group="accumulation",
        what=what,
        clause=fields.pop("clause", "OPT-10"),
        change=change,
        run=run,
        source=source and HUB + source,
        **fields,
    )


def shares(function: Callable[[Place, Counts, list[float]], list[float]]) -> Change:
    return Change(shares=function)


def not_reset(m: Place, total: Tensors) -> dict[str, Tensor]:
    """Gradients of all steps so far, where those of this one alone should be."""
    before = m.memory.get("gradients", {})
    m.memory["gradients"] = {
        name: gradient + before[name] if name in before else gradient for name, gradient in total.items()
    }
    return dict(m.memory["gradients"])


def of_step_before(m: Place, total: Tensors) -> dict[str, Tensor]:
    before = m.memory.get("gradients", total)
    m.memory["gradients"] = dict(total)
    return dict(before)


def in_bfloat16(m: Place, total: Tensors, piece: Tensors, share: float) -> dict[str, Tensor]:
    added = {name: total[name] + gradient if name in total else gradient for name, gradient in piece.items()}
    return {name: m.shortened(gradient, "bfloat16") for name, gradient in added.items()}


def scale_left(m: Place, total: Tensors) -> dict[str, Tensor]:
    return {name: gradient * 1024.0 for name, gradient in total.items()}


SHORT = {"accumulation_mean": "batches"}

FAULTS = (
    fault(
        "mean_of_means",
        "Every batch counts alike, however many labels it has.",
        recipe(accumulation_mean="batches"),
        "huggingface/transformers/issues/37766",
    ),
    fault(
        "mean_by_samples",
        "A batch counts by its samples, those whose labels do not count among them.",
        recipe(accumulation_mean="samples"),
        "unslothai/unsloth-zoo/issues/6",
    ),
    fault(
        "mean_by_labels",
        "A batch counts by its labels, where it should count by its samples.",
        recipe(accumulation_mean="labels"),
        "OpenNMT/OpenNMT-py/issues/2209",
        options={"accumulation_mean": "samples"},
    ),
    fault(
        "short_window_divided_by_all",
        "A short last window is divided by as many batches as a full one has.",
        recipe(accumulation_mean="configured"),
        "Lightning-AI/pytorch-lightning/issues/19987",
        options=SHORT,
    ),
    fault(
        "short_window_divided_by_its_own",
        "A short last window is divided by its own batches, where the recipe divides by those of a full one.",
        recipe(accumulation_mean="batches"),
        "",
        options={"accumulation_mean": "configured"},
    ),
    fault(
        "short_window_dropped",
        "A short last window updates nothing.",
        Change(skips=lambda m, batches: batches < m.recipe.accumulation),
        "NVIDIA-NeMo/Automodel/pull/2257",
    ),
    fault(
        "sum_of_batches",
        "Gradients are added, and not divided at all.",
        shares(lambda m, counts, right: [1.0] * len(counts)),
        "karpathy/nanoGPT/issues/206",
    ),
    fault(
        "sum_of_samples",
        "Gradients are added, each times its batch's samples.",
        shares(lambda m, counts, right: [float(samples) for samples, _ in counts]),
        "huggingface/blog/pull/2414",
    ),
    fault(
        "divided_twice",
        "The mean is divided by the number of batches once more.",
        shares(lambda m, counts, right: [share / len(counts) for share in right]),
        "OpenNMT/OpenNMT-py/issues/2209",
    ),
    fault(
        "divided_by_configured_too",
        "The mean is divided by the configured number of batches once more.",
        shares(lambda m, counts, right: [share / m.recipe.accumulation for share in right]),
        "",
    ),
    fault(
        "last_batch_alone",
        "Each batch overwrites the gradient of the one before.",
        shares(lambda m, counts, right: [0.0] * (len(counts) - 1) + [1.0]),
        "allenai/open-instruct/pull/1498",
    ),
    fault(
        "last_batch_alone_by_its_share",
        "Each batch overwrites the gradient of the one before; the last still counts by its share.",
        shares(lambda m, counts, right: [0.0] * (len(counts) - 1) + right[-1:]),
        "tatsu-lab/alpaca_farm/issues/57",
    ),
    fault(
        "last_batch_left_out",
        "The step is made before the last batch's gradient is added.",
        shares(lambda m, counts, right: [*right[:-1], 0.0] if len(right) > 1 else right),
        "cofe-ai/MSG/issues/3",
    ),
    fault(
        "first_batch_counted_twice",
        "The first batch's gradient is added twice.",
        shares(lambda m, counts, right: [2 * right[0], *right[1:]]),
        "karpathy/llm.c/pull/548",
    ),
    fault(
        "shares_by_first_batch",
        "All batches count as if they had as many labels as the first.",
        shares(lambda m, counts, right: [counted / (counts[0][1] * len(counts)) for _, counted in counts]),
        "",
    ),
    fault(
        "gradients_not_reset",
        "Gradients are not reset between steps.",
        Change(gradients=not_reset),
        "tenstorrent/tt-blacksmith/pull/711",
    ),
    fault(
        "gradients_of_step_before",
        "A step takes the gradients of the step before.",
        Change(gradients=of_step_before),
        "",
    ),
    fault(
        "loss_scale_left",
        "Gradients are still multiplied by the loss scale.",
        Change(gradients=scale_left),
        "deepspeedai/DeepSpeed/pull/8588",
        clause="GRD-1",
    ),
    fault("accumulated_in_bfloat16", "Gradients are added up in bfloat16.", Change(added=in_bfloat16), ""),
)
