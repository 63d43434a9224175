"""What a trained model says of texts, however many there are: labels and probabilities, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Request, Settings, Unsupported
from concord.backends.worker import Worker
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training
from concord.training.data import (
    Bad,
    Complaints,
    Corpus,
    Labels,
    Sample,
    Samples,
    TextEncoder,
    batches,
    encode,
)
from concord.training.metrics import Predict, Predictions, measure, predicted, probabilities
from concord.training.plan import PAD_TO

AT_ONCE = 1024
"""Texts that are read, sorted by length and predicted before more are read."""


WAYS = ("dtype", "implementation", "execution", "precision")
"""Settings that each run is told."""


@dataclass(frozen=True)
class TextModel:
    """A trained model that reads texts.

    Attributes:
        folder: of the checkpoint.
        weights: by canonical name, those of its part.
        labels: its classes; where nobody has named them, their numbers.
        encoder: that makes ids of texts as its tokenizer does.
        part: of the model that it has: all of it, or what takes ids and has no classifier.
    """

    folder: Path
    config: EncoderConfig
    weights: dict[str, NDArray[np.floating]]
    labels: Labels
    encoder: TextEncoder
    part: str = "model"


def predictor(worker: Worker, model: TextModel, settings: Settings) -> Predict:
    """Return a function that has a worker compute logits (B, C) of a batch.

    Where the backend trains, the model is sent to it once, and stays there; else with each batch.

    Raises:
        Unsupported, WorkerFailure: as :meth:`concord.backends.worker.Worker.run` does.
    """
    training = Training(
        Recipe(algorithm="sgd", learning_rate=0.0), []
    )  # of which no step is made: it keeps nothing beside the parameters
    ways = {name: getattr(settings, name) for name in WAYS}
    one = encode(Samples(samples=[Sample(0, ".")]), model.encoder)
    _, first = next(batches(one, model.config, 1))
    request = Request(
        model.config, model.weights, first, **vars(settings), taps=False, gradients=False, training=training
    )
    try:
        return worker.train(request).predict
    except Unsupported:
        return lambda batch: (
            worker.run(model.config, model.weights, batch, **ways, taps=False, gradients=False).output
        )


def _batches(corpus: Corpus, config: EncoderConfig, size: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
    """Yield samples, those of like length together; if one's mask is another's (SPEC MSK-7), as they come."""
    apart = config.mask_assignment != "batch_major"
    return batches(corpus, config, size, bucketed=apart, multiple=PAD_TO)


def predict(
    model: TextModel, compute: Predict, samples: Iterable[Sample | Bad], size: int, complaints: Complaints
) -> Iterator[dict[str, Any]]:
    """Yield what a model says of each text, in the order of the texts; bad lines keep their place.

    That is its number, the texts, the label of the most probable class (None where a logit is NaN), the
    probability of each class, and how many tokens were cut off; or what is wrong with a line.

    Args:
        compute: as :func:`predictor` returns it.
        size: samples in a batch.
        complaints: takes the bad lines.

    Raises:
        SpecError: listing bad lines among those that were read at once, unless they are skipped.
        WorkerFailure: if the worker gave no result.
    """
    stream = iter(samples)
    while some := list(islice(stream, AT_ONCE)):
        good = [one for one in some if isinstance(one, Sample)]
        for bad in (one for one in some if isinstance(one, Bad)):
            complaints.problems.append(str(bad))
        complaints.settle()
        found = iter(_predicted(model, compute, good, size) if good else ())
        yield from (next(found) if isinstance(one, Sample) else {"problem": str(one)} for one in some)


def _predicted(model: TextModel, compute: Predict, samples: list[Sample], size: int) -> list[dict[str, Any]]:
    numbered = [Sample(place, sample.text_a, sample.text_b) for place, sample in enumerate(samples)]
    corpus = encode(Samples(samples=numbered), model.encoder)
    names, found = model.labels.names, dict[int, dict[str, Any]]()
    for places, batch in _batches(corpus, model.config, size):
        logits = compute(batch)
        for place, best, row in zip(
            places.tolist(), predicted(logits).tolist(), probabilities(logits).tolist(), strict=True
        ):
            sample = samples[place]
            found[place] = {
                "line": sample.number,
                "text_a": sample.text_a,
                **({} if sample.text_b is None else {"text_b": sample.text_b}),
                "label": None if best < 0 else names[best],
                "probabilities": {
                    name: None if math.isnan(value) else value for name, value in zip(names, row, strict=True)
                },
                "truncated": int(corpus.truncated[place]),
            }
    return [found[place] for place in range(len(samples))]


def evaluate(
    model: TextModel,
    compute: Predict,
    corpus: Corpus,
    size: int,
    done: Callable[[int], Any] = lambda count: None,
) -> Predictions:
    """Return what a model predicts of labelled samples (:func:`concord.training.metrics.measure`)."""
    return measure(compute, model.config, _batches(corpus, model.config, size), done)
