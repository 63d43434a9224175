"""Example batches and the standard case."""

from __future__ import annotations

from dataclasses import replace

from concord.conformance.judging.expectation import JudgedTraining
from concord.spec.batch import Batch, example_batch
from concord.spec.config import EncoderConfig, variant
from concord.spec.parameters import Weights, initialize
from concord.spec.training.recipe import RATES, Recipe
from concord.spec.training.trajectory import Training

# Period of steps with a short accumulation, as at the end of an epoch.
EPOCH = 17

# Number of steps of the standard case.
STEPS = 200


def example(
    config: EncoderConfig,
    recipe: Recipe,
    steps: int,
    batch: int,
    tokens: int,
    seed: int = 0,
    dtype: str = "float32",
    words: int | None = None,
    weights: Weights | None = None,
    part: str = "model",
) -> JudgedTraining:
    """Training on random, padded batches.

    Args:
        batch: samples in a step's first batch.
        words: exclusive upper bound of drawn ids; None for any.
    """
    # A batch of one sample may have only the ignored label, until it is relabelled.
    drawn = config.replace(ignore_label=None, vocab_size=words or config.vocab_size)
    drawn_steps: list[list[Batch]] = []
    # Seeds are spaced so that no two share a batch.
    number = seed * 1_000_003
    for step in range(steps):
        # Every second batch of a step has half as many samples, so that a mean of means is detectable. Each
        # epoch and the last step end with a single batch.
        last = (step + 1) % EPOCH == 0 or step == steps - 1
        sizes = (
            [max(1, batch // 2)]
            if last
            else [(batch + 1) // 2 if place % 2 else batch for place in range(recipe.accumulation)]
        )
        drawn_steps.append(
            [
                relabelled(
                    config,
                    example_batch(drawn, size, tokens, number + place, "ragged", part),
                    step + place // 2,
                )
                for place, size in enumerate(sizes)
            ]
        )
        number += len(sizes)
    start = initialize(config, seed, part=part) if weights is None else weights
    return JudgedTraining(config, start, Training(recipe, drawn_steps, seed), part, dtype)


def relabelled(config: EncoderConfig, batch: Batch, by: int) -> Batch:
    """Shift the labels of a batch to later classes."""
    # Examples of one size share their labels: a loop that keeps those of an earlier batch would agree.
    if batch.labels is None:
        return batch
    classes = max(config.num_classes, 2)
    labels = (batch.labels + by) % classes
    # A batch in which no label counts would have no loss (SPEC LOS-3).
    return replace(batch, labels=(labels + (labels == config.ignore_label).all()) % classes)


def standard(steps: int = STEPS, seed: int = 0, dtype: str = "float32") -> JudgedTraining:
    """Two layers of ``nndl-paddle`` trained by AdamW."""
    # It is designed to reveal bugs, with warm-up and linear decay, a norm that is clipped only in some steps,
    # and dropout at every site. A step has two batches, with different numbers of samples and counted labels.
    # Some rows of the token table are never looked up, and no text reaches some rows of the position table. A
    # key bias's gradient is only rounding, so second moments are as tiny as its square.
    config = variant(
        "nndl-paddle",
        d_model=64,
        num_heads=4,
        d_ff=128,
        num_layers=2,
        vocab_size=211,
        max_positions=13,
        num_classes=3,
        ignore_label=0,
        positions="learned",
        position_layout=None,
        position_exponent=None,
        position_base=None,
    )
    recipe = Recipe(
        algorithm="adam",
        learning_rate=1e-3,
        weight_decay=0.01,
        decay_form="times_rate",
        undecayed=("bias", "gamma", "beta"),
        clipping="global_norm",
        clip_at=CLIP_AT,
        schedule="linear",
        warmup_steps=max(1, steps // 10),
        total_steps=max(steps, 2),
        accumulation=2,
        accumulation_mean="labels",
    ).replace(**dict.fromkeys(RATES, 0.1))
    return example(config, recipe, steps, batch=5, tokens=11, seed=seed, dtype=dtype, words=199)


# About a quarter of the standard case's steps exceed this norm.
CLIP_AT = 4.0
