"""``concord predict``: what a trained model says of texts, and how often it is right."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord import options, writing
from concord.conformance.campaign import Setup
from concord.options import Written
from concord.progress import bars
from concord.running import opened
from concord.spec.errors import SpecError, collect, optional, refuse, unknowns
from concord.spec.files import writing as written
from concord.spec.precision import PRECISIONS
from concord.spec.text import shown
from concord.terminal import Terminal, figures
from concord.using import Classifier, framework_of, knows_pairs, model_of, samples_of

if TYPE_CHECKING:
    from concord.training.metrics import Predictions
    from concord.training.prediction import TextModel


WIDEST = 60
"""Characters of a text in a table."""


def predict(
    checkpoint: Path,
    text: list[str] | None = None,
    *,
    workers: options.Runs,
    lines: options.Lines,
    pair: bool = False,
    texts: Path | None = None,
    out: Written | None = None,
    evaluate: list[Path] | None = None,
    json: Written | None = None,
    html: Written | None = None,
    batch: int = 32,
    max_tokens: int | None = None,
    dtype: str = "float32",
) -> None:
    """Say what a trained model takes texts for, or how often it is right.

    Args:
        checkpoint (CHECKPOINT): A checkpoint of any format, with a tokenizer, or a run, of which
            the best.
        text ([TEXT]...): Texts, each for itself; see --pair.
        pair: Take the texts two by two: each two are a pair.
        texts: Instead: texts or pairs, one on each line, or as the file's name says.
        out (-o, --out): Where to write, as JSON Lines. Default: standard output, as a table on a
            terminal.
        evaluate: Instead: labelled texts, to count how often the model is right; may be repeated.
        json: With --evaluate: write the figures as JSON.
        html: With --evaluate: write a page with confusions and wrong predictions.
        batch: Samples in a batch.
        max_tokens: Tokens that a text may have; longer ones are cut. Default: as many as fit.
    """
    with optional("concord predict", "training"):
        from concord.training import evaluation, prediction
        from concord.training.data import Complaints, encode
        from concord.training.data.samples import from_path

    if sum(map(bool, (text, texts, evaluate))) != 1:
        raise SpecError("give one of TEXT, --texts FILE and --evaluate FILE")
    if pair and len(text or ()) % 2 + (not text):
        raise SpecError(f"--pair is given with {len(text or ())} texts but takes them two by two")
    if ((json or html) and not evaluate) or (out and evaluate):
        raise SpecError("--json and --html are for --evaluate, and --out for texts without labels")
    writing.check(out, json, html)

    def place() -> tuple[str, Setup]:
        refuse(unknowns("dtype", [dtype], PRECISIONS) + options.outside(("batch", batch, 1, math.inf)))
        name = workers.one("one framework computes") if workers.backend else framework_of(checkpoint)
        return name, workers.settings()

    (backend, where), model, given = collect(
        place,
        lambda: model_of(checkpoint, max_tokens),
        lambda: lines.read(evaluate) if evaluate else None,
    )
    aside, console = Terminal(stderr=True), Terminal()
    if batch > 1 and model.config.mask_assignment == "batch_major":
        aside.tell(
            "this model gives samples each other's masks (SPEC MSK-7): "
            "what it says of a text depends on those beside it",
            style="yellow",
        )
    if pair and not knows_pairs(checkpoint):
        aside.tell("this model was trained on single texts, and has seen no pair", style="yellow")
    corpus = encode(given, model.encoder, model.labels) if given else None
    with (
        opened(backend, where) as worker,
        bars([backend], None if corpus is None else len(corpus), "samples") as advance,
    ):
        classify = Classifier(model, worker, where.how(dtype))
        if corpus is None:
            bad, title = Complaints(lines.on_error), f"{checkpoint} on {backend}"
            samples = from_path(texts, 0, lines.names) if texts else samples_of(_pairs(text or [], pair))
            said = prediction.predict(model, classify.compute, samples, batch, bad)
            with _said(out, title) as say:
                for number, line in enumerate(said, start=1):
                    say(line)
                    advance(backend, number, "")
            if bad.count:
                aside.tell(f"{bad.count} bad lines; each says so in its place")
            return
        predictions = prediction.evaluate(
            model, classify.compute, corpus, batch, lambda done: advance(backend, done, "")
        )
    complaints = given.complaints
    about = {"backend": backend, "dtype": dtype, "samples": len(corpus), "bad_lines": complaints.count}
    found = _figures(model, about, predictions)
    writing.write(
        (json, lambda: json_text.dumps(found, ensure_ascii=False, indent=1) + "\n"),
        (html, lambda: evaluation.page(found, predictions, given.samples)),
        show=lambda: _show(found, console),
    )
    for line in complaints.listed():
        console.tell(f"left out: {line}", style="yellow")


def _figures(model: TextModel, about: dict[str, Any], found: Predictions) -> dict[str, Any]:
    """Return what an evaluation came to."""
    scores, names = found.scores(), model.labels.names
    return {
        "format": "concord.evaluation/1",
        "checkpoint": str(model.folder),
        **about,
        "counted": len(found.truth),
        "accuracy": found.accuracy,
        "loss": found.loss if found.loss is not None and math.isfinite(found.loss) else None,
        "labels": list(names),
        **scores,
        "classes": dict(zip(names, scores["classes"], strict=True)),
    }


def _show(found: dict[str, Any], console: Terminal) -> None:
    """Print the scores of each class, what was taken for what, and the totals."""
    names, undecided = found["labels"], any(found["undecided"])
    rows = []
    for name in names:
        one = found["classes"][name]
        scores = (one[score] for score in ("precision", "recall", "f1"))
        cells = ("absent" if score is None else f"{score:.4f}" for score in scores)
        rows.append([name, *cells, str(one["support"])])
    title = f"{found['checkpoint']} on {found['backend']}, {found['counted']} samples"
    figures(console, ("class", "precision", "recall", "F1", "samples"), rows, (), ("class",), title)
    taken = [
        [name, *map(str, row), *[str(none)] * undecided]
        for name, row, none in zip(names, found["confusion"], found["undecided"], strict=True)
    ]
    title = "of the class of the row, taken for that of the column"
    figures(console, ("", *names, *["none: NaN"] * undecided), taken, (), ("",), title)
    totals = {"accuracy": found["accuracy"], "macro F1": found["macro_f1"], "loss": found["loss"]}
    said = (f"{name} {'none' if value is None else format(value, '.4f')}" for name, value in totals.items())
    console.tell(", ".join(said))


@contextmanager
def _said(out: Path | None, title: str) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Take what is said of each text: as lines of JSON, or on a terminal as a table in the end."""
    console, rows = Terminal(), list[list[str]]()
    if out is None and console.is_terminal:
        yield lambda row: rows.append(_cells(row))
        figures(console, ("text", "label", "probability"), rows, (), ("text", "label"), title)
        return
    to_file = written(out) if out is not None else nullcontext(lambda line: print(line.decode(), end=""))
    with to_file as write:
        yield lambda row: write(f"{json_text.dumps(row, ensure_ascii=False, allow_nan=False)}\n".encode())


def _cells(row: dict[str, Any]) -> list[str]:
    """Return what a table says of a text."""
    text = " | ".join(row[key] for key in ("text_a", "text_b") if key in row)
    label = row.get("label") or "none"
    sure = row.get("probabilities", {}).get(label)
    return [row.get("problem") or shown(text, WIDEST), label, "–" if sure is None else f"{sure:.3f}"]


def _pairs(texts: list[str], pair: bool) -> Sequence[str | tuple[str, str]]:
    return [*zip(texts[::2], texts[1::2], strict=True)] if pair else texts
