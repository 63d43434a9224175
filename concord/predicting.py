"""``concord evaluate`` and ``concord predict``: how well a trained model does, and what it says of texts."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from concord import backends, options, writing
from concord.backends.interface import Settings, Unsupported
from concord.backends.worker import WorkerFailure
from concord.conformance.campaign import Settings as Places  # where and how long a worker runs
from concord.progress import Reached, bars
from concord.spec.errors import SpecError, optional, unknowns
from concord.spec.files import opened
from concord.spec.files import writing as written
from concord.spec.precision import PRECISIONS
from concord.terminal import Terminal, complain

if TYPE_CHECKING:
    from concord.training.data import Sample
    from concord.training.metrics import Predict, Predictions
    from concord.training.prediction import Bad, InOrder, Model, Prediction

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        parser=writing.path,
        help="A checkpoint of any format, with a tokenizer, or a run, of which the best.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="B",
        autocompletion=options.among(backends.names),
        help="torch, tf, paddle, jax, an installed plugin, or package.module:Class.",
    ),
]
Size = Annotated[int, typer.Option("--batch", metavar="N", help="Samples in a batch.")]


def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        list[Path],
        typer.Option("--data", metavar="FILE", parser=writing.path, help="Labelled texts; may be repeated."),
    ],
    backend: Backend = None,
    layout: options.Layout = None,
    columns: options.Columns = None,
    on_error: options.OnError = "fail",
    batch: Size = 32,
    json: options.Json = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Count how often a trained model is right, and what it takes for what."""
    with optional("concord evaluate", "training"):
        from concord.training import prediction
        from concord.training.data import encode, read

    console = Terminal()
    writing.check(json)
    at, model, samples = options.collect(
        lambda: place(
            backend,
            device,
            implementation,
            execution,
            python,
            ssh,
            time_limit,
            memory_limit,
            threads,
            precision,
            dtype,
            batch,
        ),
        lambda: _model_of(checkpoint),
        lambda: read(*data, layout=layout, columns=options.columns_of(columns), on_error=on_error),
    )
    corpus = encode(samples, model.encoder, model.labels)
    _remark(model, batch)
    with _computing(model, *at) as (compute, reached, name), reached(name, len(corpus)) as progress:
        predictions = prediction.evaluate(model, compute, corpus, batch, progress)
    found = _evaluation(model, predictions, name, dtype, samples.complaints.count, len(corpus))
    _show(found, console)
    for line in samples.complaints.listed():
        console.print(f"left out: {line}", style="yellow", highlight=False, soft_wrap=True)
    writing.write(console, (json, lambda: json_text.dumps(found, ensure_ascii=False, indent=1) + "\n"))


def predict(
    checkpoint: Checkpoint,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="A text.")] = None,
    text_b: Annotated[str | None, typer.Argument(metavar="[TEXT_B]", help="The second of a pair.")] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            parser=writing.path,
            help="Instead: a file of texts or pairs, a text on each line or as --layout says; '-' reads standard input.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            parser=writing.output,
            help="Where to write, as JSON Lines. Default: standard output.",
        ),
    ] = None,
    backend: Backend = None,
    layout: options.Layout = None,
    columns: options.Columns = None,
    on_error: options.OnError = "fail",
    batch: Size = 32,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Say what a trained model takes texts for, and how sure it is."""
    with optional("concord predict", "training"):
        from concord.training import prediction

    if (text is None) == (texts is None):
        raise SpecError("give either TEXT or --texts FILE")
    writing.check(out)
    at, model, complaints = options.collect(
        lambda: place(
            backend,
            device,
            implementation,
            execution,
            python,
            ssh,
            time_limit,
            memory_limit,
            threads,
            precision,
            dtype,
            batch,
        ),
        lambda: _model_of(checkpoint),
        lambda: prediction.InOrder(on_error),
    )
    samples = _single(model, text, text_b) if texts is None else _read(texts, layout, columns, complaints)
    _remark(model, batch)
    to_file = written(out) if out is not None else nullcontext(lambda line: print(line.decode(), end=""))
    with (
        to_file as write,
        _computing(model, *at) as (compute, reached, name),
        reached(name, None) as progress,
    ):
        for number, found in enumerate(
            prediction.predict(model, compute, samples, batch, complaints), start=1
        ):
            write((json_text.dumps(_line(found, model), ensure_ascii=False, allow_nan=False) + "\n").encode())
            progress(number)
    if complaints.count:
        Terminal(stderr=True).print(
            f"{complaints.count} bad lines; each says so in its place", soft_wrap=True
        )


def _single(model: Model, text: str | None, text_b: str | None) -> list[Sample]:
    from concord.training.data.samples import sample_of

    sample = sample_of(0, 1, {"text_a": text, "text_b": text_b})
    model.encoder.encode(
        sample.text_a, sample.text_b
    )  # what is no text is refused before a worker is started
    return [sample]


def _read(path: Path, layout: str | None, columns: str | None, complaints: InOrder) -> Iterator[Sample]:
    """Return the texts of a file, or of standard input, as they come."""
    from concord.training.data.lines import numbered
    from concord.training.data.samples import from_lines, from_path, known_layout, layout_of

    if str(path) == "-":
        kind = known_layout(layout or "plain")
        return from_lines(
            numbered(sys.stdin.buffer, "standard input", complaints),
            "standard input",
            0,
            kind,
            options.columns_of(columns),
            complaints,
        )
    kind = layout_of(path, layout)
    if not path.is_dir():
        with opened(path):  # what cannot be read is refused before a worker is started
            pass
    return from_path(path, 0, kind, options.columns_of(columns), complaints)


def _line(found: Prediction | Bad, model: Model) -> dict[str, Any]:
    """Return a line of the output: the number of the input's line, and what is said of it."""
    from concord.training.prediction import Bad

    if isinstance(found, Bad):
        return {"problem": found.problem}
    sample = found.sample
    pair = {} if sample.text_b is None else {"text_b": sample.text_b}
    sure = {
        name: value if value == value else None
        for name, value in zip(model.labels.names, found.probabilities, strict=True)
    }
    return {
        "line": sample.number,
        "text_a": sample.text_a,
        **pair,
        "label": found.label,
        "probabilities": sure,
        "truncated": found.truncated,
    }


def place(
    backend: str | None, device: str, implementation: str, execution: str, python: list[str] | None, ssh: list[str] | None,
    time_limit: float, memory_limit: float | None, threads: int | None, precision: str, dtype: str, size: int,
) -> tuple[str, Places, Settings]:  # fmt: skip
    """Return the backend, where it runs, and how it computes."""
    problems = [] if backend is not None else ["--backend is not given: which framework is to compute?"]
    problems += unknowns("dtype", [dtype], PRECISIONS)
    problems += [f"--batch is {size} but must be at least 1"] if size < 1 else []
    if problems or backend is None:
        raise SpecError(problems)
    options.names([backend], python, ssh)
    found = options.settings(
        [backend],
        device,
        implementation,
        execution,
        python,
        ssh,
        time_limit,
        memory_limit,
        threads,
        precision,
    )
    return backend, found, Settings(dtype, implementation, execution, device, precision)


@contextmanager
def _computing(
    model: Model, backend: str, where: Places, settings: Settings
) -> Iterator[tuple[Predict, Any, str]]:
    """Have a backend compute; that it cannot, or is not there, ends the command with exit code 3."""
    from concord.training.prediction import predictor

    @contextmanager
    def reached(name: str, total: int | None) -> Iterator[Any]:
        with bars([name], total, "samples") as tell:
            yield lambda done: _tell(tell, name, done)

    try:
        with where.open(backend) as worker:
            yield predictor(worker, model, settings), reached, backend
    except (WorkerFailure, Unsupported) as error:
        complain(f"{backend}: {error}")
        raise typer.Exit(3) from None


def _tell(tell: Reached, name: str, done: int) -> None:
    tell(name, done, "")


def _model_of(folder: Path) -> Model:
    """Return what a checkpoint predicts with: one that was trained here, or one of any format with a classifier and a tokenizer.

    Raises:
        SpecError: if it cannot be read, or lacks one of these.
    """
    from concord.spec import runs
    from concord.training import prediction
    from concord.training.data.encoder import TEXT_FILE
    from concord.training.data.ready import VOCABULARIES

    if runs.steps(folder):
        return prediction.model_of(folder)
    if folder.is_dir() and (
        (folder / TEXT_FILE).exists() or not any((folder / name).exists() for name in VOCABULARIES)
    ):
        return prediction.model_of(folder)
    return _ported(folder)


def _ported(path: Path) -> Model:
    """Return the classifier of a checkpoint that came from elsewhere."""
    from concord.porting.folder import folder_of
    from concord.pretrained import published
    from concord.training import prediction
    from concord.training.data import Labels

    found, encoder = published(path)
    if found.part != "model":
        raise SpecError(
            f"{path}: has no classifier: 'concord case run --texts' says what the part {found.part!r} computes"
        )
    labels = Labels(found.labels or tuple(str(number) for number in range(max(found.config.num_classes, 2))))
    return prediction.Model(folder_of(path), found.config, dict(found.weights()), labels, encoder, step=0)


def _remark(model: Model, size: int) -> None:
    if size > 1 and model.config.mask_assignment == "batch_major":
        Terminal(stderr=True).print(
            "this model gives samples each other's masks (SPEC MSK-7): what it says of a text depends on those beside it",
            style="yellow",
            soft_wrap=True,
        )


def _evaluation(
    model: Model, found: Predictions, backend: str, dtype: str, bad: int, samples: int
) -> dict[str, Any]:
    """Return what is written as JSON."""
    names, scores = model.labels.names, found.scores()
    return {
        "format": "concord.evaluation/1",
        "checkpoint": str(model.folder),
        "step": model.step,
        "backend": backend,
        "dtype": dtype,
        "samples": samples,
        "bad_lines": bad,
        "counted": len(found.truth),
        "accuracy": found.accuracy,
        "loss": found.loss if found.loss is not None and abs(found.loss) < float("inf") else None,
        "labels": list(names),
        **scores,
        "classes": dict(zip(names, scores["classes"], strict=True)),
    }


def _show(found: dict[str, Any], console: Terminal) -> None:
    names, undecided = found["labels"], any(found["undecided"])
    table = Table(
        title=f"{found['checkpoint']} on {found['backend']}, {found['counted']} samples", title_justify="left"
    )
    for number, column in enumerate(("class", "precision", "recall", "F1", "samples")):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for name, one in found["classes"].items():
        table.add_row(
            name,
            f"{one['precision']:.4f}",
            f"{one['recall']:.4f}",
            "absent" if one["f1"] is None else f"{one['f1']:.4f}",
            str(one["support"]),
        )
    console.print(table)
    taken = Table(title="of the class of the row, taken for that of the column", title_justify="left")
    taken.add_column("")
    for name in [*names, *(["none: NaN"] if undecided else [])]:
        taken.add_column(name, justify="right", overflow="fold")
    for name, row, none in zip(names, found["confusion"], found["undecided"], strict=True):
        taken.add_row(name, *map(str, row), *([str(none)] if undecided else []))
    console.print(taken)
    figures = {"accuracy": found["accuracy"], "macro F1": found["macro_f1"], "loss": found["loss"]}
    console.print(
        ", ".join(
            f"{name} {'none' if value is None else format(value, '.4f')}" for name, value in figures.items()
        ),
        highlight=False,
    )
