"""``concord predict``: what a trained model says of texts, and how often it is right."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord import options, writing
from concord.conformance.campaign import Setup
from concord.options import Written
from concord.progress import bars
from concord.running import opened as opened_worker
from concord.spec.errors import SpecError, collect, optional, refuse, unknowns
from concord.spec.files import opened
from concord.spec.files import writing as written
from concord.spec.precision import PRECISIONS
from concord.spec.text import shown
from concord.terminal import Terminal, figures
from concord.using import framework_of, knows_pairs, line_of, model_of, samples_of

if TYPE_CHECKING:
    from concord.training.data import Bad, Sample
    from concord.training.metrics import Predict, Predictions
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

    if sum(map(bool, (text, texts, evaluate))) != 1:
        raise SpecError("give one of TEXT, --texts FILE and --evaluate FILE")
    if pair and len(text or ()) % 2 + (not text):
        raise SpecError(f"--pair is given with {len(text or ())} texts but takes them two by two")
    if ((json or html) and not evaluate) or (out and evaluate):
        raise SpecError("--json and --html are for --evaluate, and --out for texts without labels")
    writing.check(out, json, html)

    def place() -> tuple[str, Setup]:
        problems = unknowns("dtype", [dtype], PRECISIONS) + options.too_small(("batch", batch, 1))
        refuse(problems)
        name = workers.one("one framework computes") if workers.backend else framework_of(checkpoint)
        return name, workers.settings()

    (backend, where), model, given = collect(
        place,
        lambda: model_of(checkpoint, max_tokens),
        lambda: Complaints(lines.on_error) if evaluate is None else lines.read(evaluate),
    )
    if batch > 1 and model.config.mask_assignment == "batch_major":
        Terminal(stderr=True).tell(
            "this model gives samples each other's masks (SPEC MSK-7): "
            "what it says of a text depends on those beside it",
            style="yellow",
        )
    if pair and not knows_pairs(checkpoint):
        Terminal(stderr=True).tell(
            "this model was trained on single texts, and has seen no pair", style="yellow"
        )
    how = where.how(dtype)

    @contextmanager
    def computing(total: int | None = None) -> Iterator[tuple[Predict, Callable[[int], None]]]:
        """Have the backend compute, and show how far it has come."""
        with opened_worker(backend, where) as worker, bars([backend], total, "samples") as advance:
            yield prediction.predictor(worker, model, how), lambda done: advance(backend, done, "")

    if evaluate is None:
        samples: Any = _typed(model, text or [], pair) if texts is None else _read(texts, lines)
        title = f"{checkpoint} on {backend}"
        with _said(out, model, title) as say, computing() as (compute, progress):
            for number, one in enumerate(prediction.predict(model, compute, samples, batch, given), start=1):
                say(line_of(one, model))
                progress(number)
        if given.count:
            Terminal(stderr=True).tell(f"{given.count} bad lines; each says so in its place")
        return
    corpus = encode(given, model.encoder, model.labels)
    with computing(len(corpus)) as (compute, progress):
        predictions = prediction.evaluate(model, compute, corpus, batch, progress)
    about = {"backend": backend, "dtype": dtype, "samples": len(corpus), "bad_lines": given.complaints.count}
    found, console = _figures(model, about, predictions), Terminal()
    _show(found, console)
    for line in given.complaints.listed():
        console.tell(f"left out: {line}", style="yellow")
    writing.write(
        (json, lambda: json_text.dumps(found, ensure_ascii=False, indent=1) + "\n"),
        (html, lambda: evaluation.page(found, predictions, given.samples)),
    )


def _figures(model: TextModel, about: dict[str, Any], found: Predictions) -> dict[str, Any]:
    """Return what an evaluation came to."""
    scores, names = found.scores(), model.labels.names
    return {
        "format": "concord.evaluation/1",
        "checkpoint": str(model.folder),
        "step": model.step,
        **about,
        "counted": len(found.truth),
        "accuracy": found.accuracy,
        "loss": found.loss if found.loss is not None and math.isfinite(found.loss) else None,
        "labels": list(names),
        **scores,
        "classes": dict(zip(names, scores["classes"], strict=True)),
    }


def _show(found: dict[str, Any], console: Terminal) -> None:
    names, undecided = found["labels"], any(found["undecided"])
    rows, taken = [], []
    for name, row, none in zip(names, found["confusion"], found["undecided"], strict=True):
        one = found["classes"][name]
        scores = (one["precision"], one["recall"], one["f1"])
        cells = ("absent" if score is None else f"{score:.4f}" for score in scores)
        rows.append([name, *cells, str(one["support"])])
        taken.append([name, *map(str, row), *[str(none)] * undecided])
    title = f"{found['checkpoint']} on {found['backend']}, {found['counted']} samples"
    figures(console, ("class", "precision", "recall", "F1", "samples"), rows, (), ("class",), title)
    others = [*names, *["none: NaN"] * undecided]
    title = "of the class of the row, taken for that of the column"
    figures(console, ("", *others), taken, (), ("",), title)
    totals = {"accuracy": found["accuracy"], "macro F1": found["macro_f1"], "loss": found["loss"]}
    said = (f"{name} {'none' if value is None else format(value, '.4f')}" for name, value in totals.items())
    console.tell(", ".join(said))


MOST_CLASSES = 6
"""Classes whose probabilities all stand in a table; of more, that of the label alone."""


@contextmanager
def _said(out: Path | None, model: TextModel, title: str) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Take what is said of each text: as lines of JSON, or on a terminal as a table in the end."""
    console, rows = Terminal(), list[dict[str, Any]]()
    if out is None and console.is_terminal:
        yield rows.append
        _tabulate(rows, model, title, console)
        return
    to_file = written(out) if out is not None else nullcontext(lambda line: print(line.decode(), end=""))
    with to_file as write:
        yield lambda row: write(f"{json_text.dumps(row, ensure_ascii=False, allow_nan=False)}\n".encode())


def _tabulate(rows: list[dict[str, Any]], model: TextModel, title: str, console: Terminal) -> None:
    """Print what is said of each text, as a table."""
    names = model.labels.names if len(model.labels.names) <= MOST_CLASSES else ()
    cells = []
    for row in rows:
        text = " | ".join(row[key] for key in ("text_a", "text_b") if key in row)
        sure = row.get("probabilities", {})
        asked = names or [row.get("label")]
        shares = ("–" if sure.get(name) is None else f"{sure[name]:.3f}" for name in asked)
        cells.append([row.get("problem") or shown(text, WIDEST), row.get("label") or "none", *shares])
    headings = ("text", "label", *(names or ["probability"]))
    figures(console, headings, cells, (), ("text", "label"), title)


def _typed(model: TextModel, texts: list[str], pair: bool) -> list[Sample]:
    rows = [*zip(texts[::2], texts[1::2], strict=True)] if pair else texts
    samples = samples_of(rows)
    for sample in samples:  # refuses what is no text before a worker is started
        model.encoder.encode(sample.text_a, sample.text_b)
    return samples


def _read(path: Path, lines: options.Lines) -> Iterator[Sample | Bad]:
    """Return the texts of a file as they come."""
    from concord.training.data.samples import from_path

    if not path.is_dir():
        with opened(path):  # what cannot be read is refused before a worker is started
            pass
    return from_path(path, 0, lines.names)
