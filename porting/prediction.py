"""Class probabilities or embeddings of texts, computed by a checkpoint's backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy.special import softmax

from concord.backends.worker import Worker
from concord.conformance.run.campaign import Setup
from concord.porting import reading
from concord.porting.folder import name_of
from concord.porting.recognition import recognise
from concord.porting.registry import find_format
from concord.porting.texts import Text, TextEncoder, batch_of, empty
from concord.spec.arrays import Array
from concord.spec.batch import completed
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located, refuse
from concord.spec.parameters import Weights

BATCH = 32  # texts per batch

# Widths are multiples of this, because JAX recompiles every operation for each width.
PAD_TO = 16


@dataclass(frozen=True)
class TextModel:
    """A checkpoint for texts; unnamed classes are named by their numbers."""

    name: str
    config: EncoderConfig
    weights: Weights
    labels: tuple[str, ...]
    part: str
    encoder: TextEncoder

    @classmethod
    def read(cls, path: Path, parts: Sequence[str]) -> TextModel:
        """Read a checkpoint with one of ``parts`` and a tokenizer."""
        checkpoint = reading.read(path)
        config, part = checkpoint.config, checkpoint.part
        if part not in parts:
            raise SpecError(f"{path} holds the part {part!r} but must hold one of {', '.join(parts)}")
        with located(str(path)):
            encoder = TextEncoder(checkpoint)
            labels = checkpoint.classes if part == "model" else ()
        return cls(name_of(path), config, checkpoint.weights(), labels, part, encoder)


class TextPredictor:
    """A checkpoint and its backend, as returned by :func:`load`."""

    def __init__(self, model: TextModel, worker: Worker, dtype: str = "float32", **how: Any) -> None:
        self.model, self.worker, self.how = model, worker, {"dtype": dtype, **how}

    def __call__(self, texts: str | Iterable[str | Sequence[str]]) -> Any:
        """Class probabilities or embedding of each text or pair: a dictionary for one text, else a list.

        Raises:
            SpecError: listing arguments that are not texts.
            WorkerFailure: without a result.
        """
        if isinstance(texts, str):
            return next(self.predict([Text(texts)]))
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        refuse(
            [
                f"text {number} has {len(row)} parts but must be a text, or two texts"
                for number, row in enumerate(rows, start=1)
                if len(row) not in (1, 2)
            ]
        )
        refuse(empty(rows))
        return list(self.predict([Text(*row) for row in rows]))

    def predict(self, texts: Sequence[Text], size: int = BATCH) -> Iterator[dict[str, Any]]:
        """Yield each text's prediction in order, in batches of ``size``."""
        model = self.model
        for start in range(0, len(texts), size):
            chunk = texts[start : start + size]
            encoded = model.encoder.encode(chunk)
            batch = completed(model.config, batch_of(model.config, encoded, multiple=PAD_TO), model.part)
            run = self.worker.run(
                model.config, model.weights, batch, model.part, **self.how, taps=False, gradients=False
            )
            for text, ids, output in zip(chunk, encoded, run.output, strict=True):
                pair = {} if text.text_b is None else {"text_b": text.text_b}
                yield {"text_a": text.text_a, **pair, **self._prediction(output), "truncated": ids.truncated}

    def _prediction(self, output: Array) -> dict[str, Any]:
        # None replaces NaN, which JSON lacks.
        finite = bool(np.isfinite(output).all())
        if self.model.part == "pooled":
            return {"embedding": _numbers(output) if finite else None}
        if not finite:
            return {"label": None, "probabilities": None}
        # A single logit is that of class 1 against class 0 (SPEC LOS-1).
        probabilities = softmax(np.array([0.0, *output] if len(output) == 1 else output, np.float64))
        labels = self.model.labels
        return {
            "label": labels[int(probabilities.argmax())],
            "probabilities": dict(zip(labels, _numbers(probabilities.astype(output.dtype)), strict=True)),
        }

    def close(self) -> None:
        """End the worker, which otherwise ends with the program."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbers(array: Array) -> list[float]:
    # Only the digits that identify a number in its own dtype; tolist() would give those of a float64.
    return [float(str(number)) for number in array]


def read_model(path: Path) -> TextModel:
    """Read a classifier or a sentence encoder."""
    return TextModel.read(path, ("model", "pooled"))


def load(path: str | Path, backend: str | None = None, dtype: str = "float32", **setup: Any) -> TextPredictor:
    """Load a classifier or sentence encoder in any format, ready for texts.

    Args:
        backend: name, by default that of the format's backend.
        setup: fields of :class:`concord.conformance.run.campaign.Setup`, such as ``device``.

    Raises:
        SpecError: if the checkpoint cannot be read, is neither, or has no tokenizer.
        WorkerFailure: if the framework is not installed.
    """
    model, where = read_model(Path(path)), Setup(**setup)
    how = {name: getattr(where, name) for name in ("implementation", "execution", "precision")}
    return TextPredictor(model, where.open(backend or framework_of(Path(path))), dtype, **how)


def framework_of(path: Path) -> str:
    """Backend of a checkpoint's format."""
    return find_format(recognise(path).format).home
