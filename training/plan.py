"""What a run of training was asked for: kept with each checkpoint, so that it can go on as it began."""

from __future__ import annotations

from dataclasses import dataclass, fields

from concord.backends.interface import Settings
from concord.spec.errors import refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.spec.training.dropout import GENERATORS

PAD_TO = 16
"""Tokens of a batch are a multiple of it: frameworks compile for each width, JAX each operation."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where samples come from.

    Attributes:
        train, dev: files or folders of samples; None: there are none.
        layout, columns, on_error: how they are read (:func:`concord.training.data.read`).
    """

    train: str
    dev: str | None = None
    layout: str | None = None
    columns: list[str] | None = None
    on_error: str = "fail"


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Settings):
    """How a model is trained, how long and on what, and what is looked at meanwhile.

    Attributes:
        backend: that trains it.
        files: of samples; None: whoever starts the run has them.
        samples: SHA-256 of the training samples as they are encoded: a run goes on with these alone.
        batch: samples in a batch; a step accumulates as many as the recipe says.
        epochs, steps: whichever is reached first ends the run; None: no limit.
        log_every: steps between two lines of the log.
        evaluate_every: steps between two evaluations; None: after each epoch.
        save_every: steps between two checkpoints besides those at evaluations; None: no others.
        patience: evaluations without improvement that end the run; None: no number does.
        dropout_by: what decides which elements are dropped
            (:data:`concord.spec.training.dropout.GENERATORS`).
        threads: computing threads; None: one for each core.

    Raises:
        SpecError: listing every number that is out of range, and what is unknown.
    """

    backend: str
    files: Files | None = None
    samples: str = ""
    batch: int = 32
    epochs: int | None = None
    steps: int | None = None
    log_every: int = 20
    evaluate_every: int | None = None
    save_every: int | None = None
    patience: int | None = None
    dropout_by: str = "spec"
    threads: int | None = None

    def __post_init__(self) -> None:
        counts = (
            "batch",
            "epochs",
            "steps",
            "log_every",
            "evaluate_every",
            "save_every",
            "patience",
            "threads",
        )
        problems = [
            f"{_option(name)} is {value} but must be at least 1"
            for name in counts
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.dropout_by not in GENERATORS:
            problems.append(f"--dropout-by is {self.dropout_by!r} but must be {' or '.join(GENERATORS)}")
        refuse(problems + unknowns("dtype", [self.dtype], PRECISIONS))

    @property
    def settings(self) -> Settings:
        """How it is computed."""
        return Settings(**{field.name: getattr(self, field.name) for field in fields(Settings)})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
