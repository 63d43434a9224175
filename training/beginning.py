"""A run before its first step: samples, an encoder, a model that fits them, and first weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, collect, located, refuse
from concord.spec.parameters import initialize, parameters
from concord.spec.precision import precision
from concord.spec.training.recipe import RATES, Recipe
from concord.training.checkpoint import Progress, TrainingCheckpoint
from concord.training.data import Corpus, Labels, Samples, TextEncoder, batches, encode, fitted, read
from concord.training.data.encoder import unfit
from concord.training.data.samples import by_split
from concord.training.ordinary import Numbered, Source
from concord.training.plan import PAD_TO, Files, TrainingPlan
from concord.training.prediction import TextModel

USUAL_EPOCHS = 3
"""Epochs of a run that nothing else limits."""

DROPPED = (
    "dropout_embeddings",
    "dropout_weights",
    "dropout_attention",
    "dropout_feed_forward",
    "dropout_head",
)
"""Where ``--dropout`` drops, as BERT does."""

SMALL = 0.02
"""Deviation of their entries."""

EVALUATED = 128
"""Samples in a batch of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """How an encoder comes to be.

    Attributes:
        tokenization: one of :data:`concord.training.data.TOKENIZATIONS`.
        vocabulary: tokens that it may have at most; None: as many as the configuration.
        tokens: of a sample; None: as many as the configuration has positions for.
    """

    tokenization: str = "characters"
    vocabulary: int | None = None
    tokens: int | None = None


def kept(model: TextModel, config: EncoderConfig, labels: Labels) -> dict[str, NDArray[Any]]:
    """Return the weights of a model that training takes over: all, but for a classifier of other classes."""
    known, same = parameters(config), labels == model.labels
    return {
        name: array
        for name, array in model.weights.items()
        if name in known and (same or not name.startswith("classifier."))
    }


def files(data: Path, dev: Path | None = None, **options: Any) -> Files:
    """Return where samples come from.

    Args:
        data: the training samples, or a folder with ``train`` and ``dev``.
        options: ``layout``, ``columns`` and ``on_error`` of :class:`~concord.training.plan.Files`.

    Raises:
        SpecError: if the folder has no training samples.
    """
    found = by_split(data)
    dev = dev or found.get("dev")
    train, dev_name = str(found["train"].absolute()), str(dev.absolute()) if dev else None
    return Files(train=train, dev=dev_name, **options)


def samples(where: Files) -> dict[str, Samples]:
    """Return the samples of each split that there is.

    Raises:
        SpecError: listing what cannot be read.
    """
    options: dict[str, Any] = {"layout": where.layout, "columns": where.columns, "on_error": where.on_error}
    paths = {"train": Path(where.train)} | ({"dev": Path(where.dev)} if where.dev else {})
    found = collect(*(partial(read, path, **options) for path in paths.values()))
    return dict(zip(paths, found, strict=True))


def begin(
    config: EncoderConfig,
    recipe: Recipe,
    plan: TrainingPlan,
    texts: Texts,
    seed: int = 0,
    pretrained: TextModel | None = None,
) -> tuple[TrainingCheckpoint, dict[str, Corpus]]:
    """Return a run before its first step, and its samples.

    Args:
        config: sizes of the model; vocabulary, classes and padding become those of the samples.
        recipe: a schedule that ends does so with the run.
        plan: with files.
        seed: of weights, order and dropout.
        pretrained: what the run goes on from; vocabulary and padding are its own, and only what it lacks is
            drawn.

    Raises:
        SpecError: listing what is wrong with samples, model or recipe.
    """
    assert plan.files is not None
    found = samples(plan.files)
    with located(", ".join(found["train"].files)):
        labels = Labels.of(sample.label for sample in found["train"].samples)
    encoder = _encoder(config, texts, found["train"], pretrained)
    if pretrained is None:
        config = fitted(config, encoder, labels)
    else:
        if pretrained.part == "model" and {*labels.names} <= {*pretrained.labels.names}:
            labels = pretrained.labels  # the model's own, unless samples have others
        config = config.replace(num_classes=labels.num_classes(config))
        refuse(unfit(config, encoder, labels))
    corpora = {split: encode(some, encoder, labels) for split, some in found.items()}
    if not (plan.epochs or plan.steps):
        plan = replace(plan, epochs=USUAL_EPOCHS)
    recipe = fitted_recipe(recipe, planned_steps(recipe, plan, corpora["train"]))
    plan = replace(plan, samples=digest(corpora["train"]))
    taken = kept(pretrained, config, labels) if pretrained else {}
    begun = {**first_weights(config, seed, without=taken), **taken}
    weights = {name: precision(plan.dtype).round(begun[name]) for name in parameters(config)}
    progress = Progress(seed=seed, plan=plan)
    return TrainingCheckpoint(config, weights, labels, encoder, recipe, progress=progress), corpora


def _encoder(
    config: EncoderConfig, texts: Texts, samples: Samples, pretrained: TextModel | None
) -> TextEncoder:
    """Return what makes ids of texts."""
    if pretrained is not None:
        return pretrained.encoder.limited(texts.tokens)
    return TextEncoder.learn(samples.texts(), config, texts.tokenization, texts.vocabulary, texts.tokens)


def first_weights(
    config: EncoderConfig, seed: int, without: Collection[str] = ()
) -> dict[str, NDArray[np.float64]]:
    """Return first weights: drawn as for conformance (SPEC WGT-5), but with biases of 0 and gammas of 1.

    Embeddings that a norm follows begin as small as BERT's: their scale does not matter to the norm, and
    small ones move on with few steps. So do queries and keys: every token is attended to alike at first, and
    none by chance.

    Args:
        without: parameters that somebody has already.
    """
    kinds = {name: entry.kind for name, entry in parameters(config).items() if name not in without}
    neutral = {"bias": 0.0, "beta": 0.0, "gamma": 1.0}
    drawn = {
        name: np.full_like(array, neutral[kinds[name]]) if kinds[name] in neutral else array
        for name, array in initialize(config, seed, names=kinds).items()
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
    if plan is None or plan.files is None or start.encoder is None:
        raise SpecError("the checkpoint does not say what it was trained on")
    corpora = {
        split: encode(some, start.encoder, start.labels) for split, some in samples(plan.files).items()
    }
    if (found := digest(corpora["train"])) != plan.samples:
        raise SpecError(
            f"{plan.files.train}: is not what the run began with: its samples have SHA-256 {found} "
            f"but must have {plan.samples}"
        )
    return corpora


def source(start: TrainingCheckpoint, corpora: Mapping[str, Corpus]) -> Source:
    """Return the batches of a run."""
    plan, config, seed, recipe = start.progress.plan, start.config, start.progress.seed, start.recipe
    assert plan is not None
    assert recipe is not None
    train = partial(batches, corpora["train"], config, plan.batch, seed, bucketed=True)

    def epoch(number: int) -> Iterator[Numbered]:
        for numbers, batch in train(epoch=number, multiple=PAD_TO, together=recipe.accumulation):
            yield numbers.tolist(), batch

    if "dev" not in corpora:
        return Source(epoch)
    return Source(epoch, partial(batches, corpora["dev"], config, EVALUATED, bucketed=True, multiple=PAD_TO))


def accumulations(start: TrainingCheckpoint, corpora: Mapping[str, Corpus]) -> Iterator[list[Batch]]:
    """Yield the batches of each step, epoch after epoch without end; the last step of one may have fewer."""
    assert start.recipe is not None
    of_epoch = source(start, corpora).epoch
    for epoch in count():
        rest = (batch for _, batch in of_epoch(epoch))
        while together := list(islice(rest, start.recipe.accumulation)):
            yield together


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


def changed_recipe(
    recipe: Recipe,
    learning_rate: float | None = None,
    schedule: str | None = None,
    warmup: int | None = None,
    dropout: float | None = None,
    accumulation: int | None = None,
) -> Recipe:
    """Return a recipe with what is usually chosen anew.

    Args:
        dropout: the rate at each of :data:`DROPPED`; nothing is dropped elsewhere.

    Raises:
        ConfigError: if the result describes no training.
    """
    fields: dict[str, Any] = {
        "learning_rate": learning_rate,
        "schedule": schedule,
        "warmup_steps": warmup,
        "accumulation": accumulation,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if schedule is not None:
        ends = schedule in ("linear", "cosine")
        fields["total_steps"] = (
            (recipe.total_steps or fields.get("warmup_steps", recipe.warmup_steps) + 1) if ends else None
        )
    if dropout is not None:
        fields |= {name: dropout if name in DROPPED else 0.0 for name in RATES}
    return recipe.replace(**fields)
