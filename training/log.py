"""The log of a run: the same lines as CSV and as JSON, and as event files for TensorBoard if they are asked for."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from concord.spec.errors import SpecError, optional
from concord.spec.files import parse_json, read_text

COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "loss",
    "learning_rate",
    "norm",
    "tokens_per_second",
    "memory_mib",
    "dev_loss",
    "dev_accuracy",
)
"""What a line may say: ``loss`` and ``norm`` are means since the line before; ``memory_mib`` is what the worker holds; what is not known is left out."""

FILES = ("log.csv", "log.jsonl")


class Log:
    """The log of a run. Use it in a ``with`` block.

    Args:
        run: the folder of the run.
        lengths: bytes of each file that belong to the run so far: what a kill left behind them is cut off.
        step: that the run has come to.
        tensorboard: a folder for event files.

    Raises:
        SpecError: if it cannot be written.
    """

    def __init__(
        self, run: Path, lengths: dict[str, int], step: int, tensorboard: Path | None = None
    ) -> None:
        self.run, self.files = run, {}
        try:
            for name in FILES:
                self.files[name] = (run / name).open("ab")
                self.files[name].truncate(lengths.get(name, 0))
        except OSError as error:
            raise self._refused(error) from None
        self.events: Any = None
        if not lengths:
            self._put("log.csv", ",".join(COLUMNS) + "\n")
        if tensorboard is not None:
            with optional("--tensorboard", "tensorboard"):
                from tensorboardX import SummaryWriter
            self.events = SummaryWriter(str(tensorboard), purge_step=step + 1)

    def add(self, **row: Any) -> None:
        """Add a line.

        Raises:
            SpecError: if it cannot be written.
        """
        text = io.StringIO()
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(row)
        self._put("log.csv", text.getvalue())
        self._put("log.jsonl", json.dumps(row) + "\n")
        for name, value in row.items() if self.events else ():
            if name != "step":
                self.events.add_scalar(name, value, row["step"])

    def lengths(self) -> dict[str, int]:
        """Return how many bytes each file has."""
        if self.events:
            self.events.flush()
        return {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}

    def _put(self, name: str, line: str) -> None:
        try:
            self.files[name].write(line.encode())
            self.files[name].flush()
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> SpecError:
        return SpecError(f"{self.run}: the log cannot be written: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (*self.files.values(), *([self.events] if self.events else [])):
            file.close()


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log.

    Raises:
        SpecError: if it cannot be read.
    """
    path = run / "log.jsonl"
    lines = read_text(path).splitlines()
    return [parse_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
