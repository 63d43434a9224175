"""In a notebook or a program: a checkpoint that takes texts, and a verdict as a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from concord.backends.interface import Settings
from concord.backends.worker import Worker
from concord.conformance.campaign import Setup
from concord.model import reader
from concord.spec.errors import SpecError, optional, refuse
from concord.spec.files import read_as
from concord.spec.runs import PROGRESS

if TYPE_CHECKING:
    from concord.conformance.verdict import Verdict
    from concord.training.plan import TrainingPlan
    from concord.training.prediction import TextModel

TEXTS = 32
"""Texts that are computed at once, unless it is said otherwise."""


class Classifier:
    """A trained model that takes texts: what :func:`load` returns.

    Attributes:
        backend: that computes.
        labels: the names of its classes.
    """

    def __init__(self, model: TextModel, worker: Worker, how: Settings) -> None:
        from concord.training.prediction import predictor

        self.model, self.backend, self.labels = model, worker.name, model.labels.names
        self.compute, self._worker = predictor(worker, model, how), worker

    def __call__(self, texts: str | Iterable[str | Sequence[str]]) -> Any:
        """Return for each text, or pair of texts, its label and the probability of each class.

        A single text gives one dictionary, several give a list of them.

        Raises:
            SpecError: listing what is no text.
            WorkerFailure: if the worker gave no result.
        """
        from concord.training.data import Complaints
        from concord.training.prediction import predict

        samples = samples_of([texts] if isinstance(texts, str) else texts)
        lines = list(predict(self.model, self.compute, samples, TEXTS, Complaints()))
        return lines[0] if isinstance(texts, str) else lines

    def close(self) -> None:
        """End the worker; it ends with the program too."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(folder: str | Path, backend: str | None = None, dtype: str = "float32", **setup: Any) -> Classifier:
    """Return the classifier of a checkpoint of any format, or of the best step of a run, ready for texts.

    Args:
        backend: by default that of the checkpoint's format (:func:`framework_of`).
        setup: fields of :class:`concord.conformance.campaign.Setup`, such as ``device``.

    Raises:
        SpecError: if it cannot be read, or lacks a classifier or a tokenizer.
        WorkerFailure: if the framework is not installed.
    """
    with optional("concord.load", "training"):
        import concord.training.data  # noqa: F401
    model, where = model_of(Path(folder)), Setup(**setup)
    return Classifier(model, where.open(backend or framework_of(Path(folder))), where.how(dtype))


def framework_of(path: Path) -> str:
    """Return the backend of a checkpoint: that it was trained in, or that of its format.

    Raises:
        SpecError: if it is no checkpoint.
    """
    from concord import porting
    from concord.porting.registry import known

    plan = _plan_of(path)
    return plan.backend if plan and plan.backend else known(porting.recognise(path).format).home


def knows_pairs(path: Path) -> bool:
    """Return whether a model may have seen pairs: no, if its samples have none."""
    from concord.training.data.samples import by_split, from_path

    plan = _plan_of(path)
    if plan is None or plan.data is None or not Path(plan.data).exists():
        return True
    train = by_split(Path(plan.data))["train"]
    rows = from_path(train, 0, plan.columns)
    return getattr(next(rows, None), "text_b", "") is not None


def _plan_of(path: Path) -> TrainingPlan | None:
    from concord.porting.folder import folder_of
    from concord.training.checkpoint import Progress

    progress = folder_of(path) / PROGRESS
    return read_as(progress, Progress).plan if progress.is_file() else None


def model_of(path: Path, max_tokens: int | None = None) -> TextModel:
    """Return the classifier of a checkpoint.

    Raises:
        SpecError: if it cannot be read, or lacks a classifier or a tokenizer.
    """
    found = reader(path, spelled=False, max_tokens=max_tokens)
    if found.part != "model":
        raise SpecError(
            f"{path}: holds the part {found.part!r} but must hold a classifier: nothing else has labels"
        )
    return found


def samples_of(texts: Iterable[str | Sequence[str]]) -> list[Any]:
    """Return texts, and pairs of texts, as samples.

    Raises:
        SpecError: listing what is neither.
    """
    from concord.training.data.samples import sample_of

    rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    refuse(
        [
            f"text {number} has {len(row)} parts but must be a text, or two texts"
            for number, row in enumerate(rows, start=1)
            if len(row) not in (1, 2)
        ]
    )
    return [
        sample_of(0, number, dict(zip(("text_a", "text_b"), row, strict=False)))
        for number, row in enumerate(rows, start=1)
    ]


class Page(str):
    """An HTML page, which a notebook shows in a frame of its own."""

    def _repr_html_(self) -> str:
        frame = "width:100%;height:40em;border:1px solid #8884"
        return f'<iframe style="{frame}" srcdoc="{html.escape(self)}"></iframe>'


def show(*verdicts: Verdict, title: str = "Verdict") -> Page:
    """Return the page of verdicts, a text that a notebook shows."""
    from concord.conformance import html as pages
    from concord.conformance import record
    from concord.conformance.campaign import Report
    from concord.conformance.verdict import Result

    def results() -> Iterator[Result]:
        for number, verdict in enumerate(verdicts, start=1):
            found = verdict.explained()
            case = f"verdict {number}" if len(verdicts) > 1 else "verdict"
            yield Result("the run", title, case, "as it ran", found.status, verdict=found)

    found = Report([*results()], {"the run": {}}, Setup())
    return Page(pages.page(record.made(found, "compare", title)))
