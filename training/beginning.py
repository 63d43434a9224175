"""A run before its first step: samples, an encoder, a model that fits them, and first weights."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, collect, located, refuse
from concord.spec.parameters import initialize, parameters
from concord.spec.precision import precision
from concord.spec.training.recipe import Recipe
from concord.training.checkpoint import Progress, TrainingCheckpoint
from concord.training.data import Corpus, Labels, Samples, TextEncoder, encode, fitted, read
from concord.training.data.encoder import unfit
from concord.training.data.samples import by_split
from concord.training.plan import TrainingPlan
from concord.training.prediction import TextModel

USUAL_EPOCHS = 3
"""Epochs of a run that nothing else limits."""

SMALL = 0.02
"""Deviation of their entries."""


def kept(model: TextModel, config: EncoderConfig, labels: Labels) -> dict[str, NDArray[Any]]:
    """Return the weights of a model that training takes over: all, but for a classifier of other classes."""
    known, same = parameters(config), labels == model.labels
    return {
        name: array
        for name, array in model.weights.items()
        if name in known and (same or not name.startswith("classifier."))
    }


def samples(plan: TrainingPlan) -> dict[str, Samples]:
    """Return the samples of each split that there is.

    Raises:
        SpecError: listing what cannot be read.
    """
    assert plan.data is not None
    paths = by_split(Path(plan.data)) | ({"dev": Path(plan.dev)} if plan.dev else {})
    how: dict[str, Any] = {"columns": plan.columns, "on_error": plan.on_error}
    splits = [split for split in ("train", "dev") if split in paths]
    return dict(zip(splits, collect(*(partial(read, paths[split], **how) for split in splits)), strict=True))


def begin(
    config: EncoderConfig, recipe: Recipe, plan: TrainingPlan, pretrained: TextModel | None = None
) -> tuple[TrainingCheckpoint, dict[str, Corpus]]:
    """Return a run before its first step, and its samples.

    Args:
        config: sizes of the model; vocabulary, classes and padding become those of the samples.
        recipe: a schedule that ends does so with the run.
        pretrained: what the run goes on from; vocabulary and padding are its own, and only what it lacks is
            drawn.

    Raises:
        SpecError: listing what is wrong with samples, model or recipe.
    """
    found = samples(plan)
    train = found["train"]
    with located(", ".join(train.files)):
        labels = Labels.of(sample.label for sample in train.samples)
    if pretrained is None:
        encoder = TextEncoder.learn(train.texts(), config, plan.tokenization, plan.vocabulary, plan.tokens)
        config = fitted(config, encoder, labels)
    else:
        encoder = pretrained.encoder.limited(plan.tokens)
        if pretrained.part == "model" and {*labels.names} <= {*pretrained.labels.names}:
            labels = pretrained.labels  # the model's own, unless samples have others
        config = config.replace(num_classes=labels.num_classes(config))
        refuse(unfit(config, encoder, labels))
    corpora = {split: encode(some, encoder, labels) for split, some in found.items()}
    if not (plan.epochs or plan.steps):
        plan = replace(plan, epochs=USUAL_EPOCHS)
    plan = replace(plan, samples=digest(corpora["train"]))
    recipe = fitted_recipe(recipe, planned_steps(recipe, plan, corpora["train"]))
    taken = kept(pretrained, config, labels) if pretrained else {}
    begun = first_weights(config, plan.seed) | taken
    weights = {name: precision(plan.dtype).round(begun[name]) for name in parameters(config)}
    return TrainingCheckpoint(config, weights, labels, encoder, recipe, progress=Progress(plan=plan)), corpora


def first_weights(config: EncoderConfig, seed: int) -> dict[str, NDArray[Any]]:
    """Return first weights: drawn as for conformance (SPEC WGT-5), but with biases of 0 and gammas of 1.

    Embeddings that a norm follows begin as small as BERT's: their scale does not matter to the norm, and
    small ones move on with few steps. So do queries and keys: every token is attended to alike at first, and
    none by chance.
    """
    kinds = {name: entry.kind for name, entry in parameters(config).items()}
    neutral = {"bias": 0.0, "beta": 0.0, "gamma": 1.0}
    drawn = {
        name: np.full_like(array, neutral[kinds[name]]) if kinds[name] in neutral else array
        for name, array in initialize(config, seed).items()
    }
    small = [
        name
        for name, kind in kinds.items()
        if kind == "embedding" or (kind == "positions" and config.positions == "learned")
    ]
    small = [
        *(small if config.embedding_norm else []),
        *(name for name in kinds if name.endswith(("query.weight", "key.weight"))),
    ]
    return drawn | {name: drawn[name] * (SMALL / drawn[name].std()) for name in small}


def again(start: TrainingCheckpoint) -> dict[str, Corpus]:
    """Return the samples of a run that goes on.

    Raises:
        SpecError: if they cannot be read, or are no longer the same.
    """
    plan = start.progress.plan
    corpora = {split: encode(some, start.encoder, start.labels) for split, some in samples(plan).items()}
    if (found := digest(corpora["train"])) != plan.samples:
        raise SpecError(
            f"{plan.data}: is not what the run began with: its samples have SHA-256 {found} "
            f"but must have {plan.samples}"
        )
    return corpora


def digest(corpus: Corpus) -> str:
    """Return the SHA-256 of samples as a model sees them."""
    arrays = (corpus.ids, corpus.starts, corpus.segment_ids, corpus.labels, corpus.numbers)
    return hashlib.sha256(b"".join(hashlib.sha256(array.tobytes()).digest() for array in arrays)).hexdigest()


def planned_steps(recipe: Recipe, plan: TrainingPlan, corpus: Corpus) -> int | None:
    """Return how many steps a run on samples is to make; None where that is not known."""
    batches = math.ceil(len(corpus) / plan.batch)
    limits = [plan.steps] if plan.steps else []
    limits += [plan.epochs * math.ceil(batches / recipe.accumulation)] if plan.epochs else []
    return min(limits, default=None)


def fitted_recipe(recipe: Recipe, steps: int | None) -> Recipe:
    """Return a recipe whose schedule ends with the run, if it ends and it is known when that is.

    Raises:
        SpecError: if the run ends while its learning rate still rises.
    """
    if steps is None or recipe.total_steps is None:
        return recipe
    if steps <= recipe.warmup_steps:
        raise SpecError(
            f"the run has {steps} steps but must have more than the {recipe.warmup_steps} in which its "
            "learning rate rises: --warmup takes fewer [clause=OPT-9]"
        )
    return recipe.replace(total_steps=steps)
