"""``concord predict``: what a trained model says of texts, and how often it is right."""

from __future__ import annotations

import json as json_text
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from concord import options, writing
from concord.backends.interface import Settings
from concord.conformance.campaign import Setup
from concord.model import reader
from concord.options import argument, option, reads, writes
from concord.progress import bars
from concord.running import opened as opened_worker
from concord.spec.errors import SpecError, collect, optional, refuse, unknowns
from concord.spec.files import opened
from concord.spec.files import writing as written
from concord.spec.precision import PRECISIONS
from concord.terminal import Terminal, figures

if TYPE_CHECKING:
    from concord.training.data import Bad, Sample
    from concord.training.metrics import Predict, Predictions
    from concord.training.prediction import TextModel, TextPrediction


def predict(
    checkpoint: Annotated[
        Path,
        argument(
            metavar="CHECKPOINT",
            help="A checkpoint of any format, with a tokenizer, or a run, of which the best.",
        ),
    ],
    workers: options.Runs,
    lines: options.Lines,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="A text.")] = None,
    text_b: Annotated[str | None, typer.Argument(metavar="[TEXT_B]", help="The second of a pair.")] = None,
    texts: Annotated[
        Path | None,
        reads("Instead: texts or pairs, one on each line or as --layout says; '-' reads standard input."),
    ] = None,
    out: Annotated[
        Path | None,
        writes("Where to write, as JSON Lines. Default: standard output.", "FILE", "-o", "--out"),
    ] = None,
    evaluate: Annotated[
        list[Path] | None,
        reads("Instead: labelled texts, to count how often the model is right; may be repeated."),
    ] = None,
    json: Annotated[Path | None, writes("With --evaluate: write the figures as JSON.")] = None,
    batch: Annotated[int, option("Samples in a batch.")] = 32,
    dtype: options.Dtype = "float32",
) -> None:
    """Say what a trained model takes texts for, or how often it is right."""
    with optional("concord predict", "training"):
        from concord.training import prediction
        from concord.training.data import Complaints, encode

    if sum(given is not None for given in (text, texts, evaluate)) != 1:
        raise SpecError("give one of TEXT, --texts FILE and --evaluate FILE")
    if (json is not None and evaluate is None) or (out is not None and evaluate is not None):
        raise SpecError("--json is for --evaluate, and --out for texts without labels")
    writing.check(out, json)

    def place() -> tuple[str, Setup]:
        problems = unknowns("dtype", [dtype], PRECISIONS) + options.too_small(("batch", batch, 1))
        refuse(problems)
        return workers.one("one framework computes"), workers.settings()

    (backend, where), model, given = collect(
        place,
        lambda: _model_of(checkpoint),
        lambda: Complaints(lines.on_error) if evaluate is None else lines.read(evaluate),
    )
    if batch > 1 and model.config.mask_assignment == "batch_major":
        Terminal(stderr=True).tell(
            "this model gives samples each other's masks (SPEC MSK-7): "
            "what it says of a text depends on those beside it",
            style="yellow",
        )
    names = ("implementation", "execution", "device", "precision")
    how = Settings(dtype, **{name: getattr(where, name) for name in names})

    @contextmanager
    def computing(total: int | None = None) -> Iterator[tuple[Predict, Callable[[int], None]]]:
        """Have the backend compute, and show how far it has come."""
        with opened_worker(backend, where) as worker, bars([backend], total, "samples") as reached:
            yield prediction.predictor(worker, model, how), lambda done: reached(backend, done, "")

    if evaluate is None:
        samples: Any = _single(model, text, text_b) if texts is None else _read(texts, lines)
        to_file = written(out) if out is not None else nullcontext(lambda line: print(line.decode(), end=""))
        with to_file as write, computing() as (compute, progress):
            for number, one in enumerate(prediction.predict(model, compute, samples, batch, given), start=1):
                line = json_text.dumps(_line(one, model), ensure_ascii=False, allow_nan=False)
                write(f"{line}\n".encode())
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
    writing.write(console, (json, lambda: json_text.dumps(found, ensure_ascii=False, indent=1) + "\n"))


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


def _single(model: TextModel, text: str | None, text_b: str | None) -> list[Sample]:
    from concord.training.data.samples import sample_of

    sample = sample_of(0, 1, {"text_a": text, "text_b": text_b})
    model.encoder.encode(sample.text_a, sample.text_b)  # refuses what is no text before a worker is started
    return [sample]


def _read(path: Path, lines: options.Lines) -> Iterator[Sample | Bad]:
    """Return the texts of a file, or of standard input, as they come."""
    from concord.training.data.lines import numbered
    from concord.training.data.samples import from_lines, from_path, known_layout, layout_of

    if str(path) == "-":
        kind, name = known_layout(lines.layout or "plain"), "standard input"
        return from_lines(numbered(sys.stdin.buffer, name), name, 0, kind, lines.names)
    kind = layout_of(path, lines.layout)
    if not path.is_dir():
        with opened(path):  # what cannot be read is refused before a worker is started
            pass
    return from_path(path, 0, kind, lines.names)


def _line(found: TextPrediction | Bad, model: TextModel) -> dict[str, Any]:
    """Return a line of the output: the number of the input's line, and what is said of it."""
    from concord.training.data import Bad

    if isinstance(found, Bad):
        return {"problem": str(found)}
    sample = found.sample
    sure = zip(model.labels.names, found.probabilities, strict=True)
    return {
        "line": sample.number,
        "text_a": sample.text_a,
        **({} if sample.text_b is None else {"text_b": sample.text_b}),
        "label": found.label,
        "probabilities": {name: value if value == value else None for name, value in sure},
        "truncated": found.truncated,
    }


def _model_of(path: Path) -> TextModel:
    """Return what a checkpoint predicts with.

    Raises:
        SpecError: if it cannot be read, or lacks a classifier or a tokenizer.
    """
    found = reader(path, spelled=False)
    if found.part != "model":
        raise SpecError(
            f"{path}: has no classifier: 'concord case run --texts' says what the part {found.part!r} "
            "computes"
        )
    return found
