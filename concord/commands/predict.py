"""``concord predict``: class probabilities or embeddings of texts."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from concord import options
from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure
from concord.spec.errors import SpecError, collect, refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.terminal import complain


def predict(
    checkpoint: Path,
    text: list[str] | None = None,
    *,
    pair: bool = False,
    texts: Path | None = None,
    dtype: str = "float32",
    workers: options.Workers,
) -> None:
    """Classify or embed texts, and print one line of JSON for each.

    Args:
        checkpoint (CHECKPOINT): A classifier or sentence encoder in any format, with its
            tokenizer.
        text ([TEXT]...): Texts; with --pair, pairs of texts.
        pair: Take the texts in pairs.

    Examples: concord predict all-MiniLM-L6-v2 "A cat sat on the mat."
    """
    from concord.porting.prediction import TextPredictor, framework_of, read_model
    from concord.porting.texts import Text, empty, read_texts

    words = text or []
    if bool(words) == bool(texts):
        raise SpecError("give either TEXT or --texts FILE")
    if pair and texts:
        raise SpecError("--pair is for TEXT arguments; in a file, a tab separates the two texts")
    if pair and len(words) % 2:
        raise SpecError(
            f"--pair is given with {len(words)} TEXT arguments but needs an even number, 2 or more"
        )

    def place() -> str:
        refuse(unknowns("dtype", [dtype], PRECISIONS))
        if not workers.backend:
            return framework_of(checkpoint)
        if (count := len(workers.backend)) > 1:
            raise SpecError(
                f"--backend is given {count} times but must be given once: one framework makes all "
                "predictions"
            )
        return workers.names()[0]

    def read() -> list[Text]:
        if texts is not None:
            return read_texts(texts)
        refuse(empty(zip(words)))
        return [Text(*row) for row in (zip(words[::2], words[1::2], strict=True) if pair else zip(words))]

    backend, settings, model, rows = collect(place, workers.settings, lambda: read_model(checkpoint), read)
    try:
        with settings.open(backend) as worker:
            for line in TextPredictor(model, worker, dtype).predict(rows):
                print(json.dumps(line, ensure_ascii=False, allow_nan=False))
    except (WorkerFailure, Unsupported) as error:
        complain(f"{backend}: {error}")
        raise typer.Exit(3) from None
